"""Runs the notebooks of examples/, and compares what they print with the outputs in them: `python -m tests.notebooks`.

`--write` keeps the new outputs. Each notebook has a Jupyter kernel of its own, as for a reader who opens it, in a new
folder. Numbers may differ as in transcripts (`tests/transcripts.py`). It needs `pip install -e '.[notebooks]'`.
"""

import json
import os
import pathlib
import re
import resource
import sys
import tempfile
from typing import Any

import jax

from tests import compiled, hurry
from tests.transcripts import ROOT, first_difference


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LIMIT = 120  # seconds for a cell
COLOR = re.compile(r"\x1b\[[\d;]*m")


def run(notebook: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the notebook with the outputs of its cells, as text alone.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises an error.
    """
    import nbclient
    import nbformat

    made = nbformat.reads(json.dumps(notebook), as_version=4)
    nbclient.NotebookClient(made, timeout=LIMIT, resources={"metadata": {"path": folder}}).execute()
    made = json.loads(nbformat.writes(made))
    for cell in code(made):
        cell["metadata"].pop("execution", None)  # times
        text = COLOR.sub("", "".join(printed(output) for output in cell["outputs"]))
        lines = [line.rstrip() + "\n" for line in text.splitlines()]
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return made


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(output: dict[str, Any]) -> str:
    """Returns the text of an output: of stdout, or of a table of rich, which is there as HTML, too."""
    if output["output_type"] == "stream":
        return "".join(output["text"]) if output["name"] == "stdout" else ""  # not warnings of the machine
    return "".join(output["data"]["text/plain"])


def shown(cell: dict[str, Any]) -> list[str]:
    return [line.rstrip("\n") for output in cell["outputs"] for line in output["text"]]


def difference(path: pathlib.Path, kept: dict[str, Any], new: dict[str, Any]) -> str:
    """Returns the notebook and a diff of the first cell that prints something else than is kept; "" if none does.

    Cells with the tag "varies" are not compared: they print times, or draw at random.
    """
    for number, (old, now) in enumerate(zip(code(kept), code(new), strict=True), 1):
        found = first_difference(shown(old), shown(now))
        if found and "varies" not in old["metadata"].get("tags", ()):
            return "\n".join([f"{path.name}, cell {number} prints something else than it shows:", *found[1]])
    return ""


def main(*, write: bool) -> int:
    """Runs all notebooks, and prints each one's CPU seconds.

    Returns the number of those that print something else, or end with an error.
    """
    jax.config.update("jax_compilation_cache_dir", str(compiled.folder()))
    os.environ |= hurry.environment() | {
        "HF_HUB_OFFLINE": "1", "TPU_LOG_DIR": "disabled", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    failed, seconds = 0, 0.0
    for path in NOTEBOOKS:
        kept, told = json.loads(path.read_text()), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                new = run(kept, folder)
                told = difference(path, kept, new)
                if write:
                    path.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")
                    told = ""
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
        failed += bool(told)
        before, seconds = seconds, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        print(f"{'FAILED' if told else 'ok':7}{seconds - before:5.1f} s  {path.name}\n{told}".rstrip(), flush=True)
    print(f"{failed} failed; {seconds:.0f} CPU seconds in all.")
    return failed


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv) > 0)
