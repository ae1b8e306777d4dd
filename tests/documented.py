"""Runs the commands of every page of the documentation, page after page, in one folder: `python -m tests.documented`.

They are the bash blocks of README.md and docs/, in one process, as they stand there but for what makes them large: a
step, a few short rows, and the embedded model under the names of larger ones. So what one leaves is what the next
finds, as for a reader who follows the pages. What needs other machines or other packages is told and left out; of
commands that start others, only the words of the latter are looked at.
"""

import contextlib
import io
import os
import pathlib
import re
import runpy
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import unittest.mock
import warnings
from typing import Any, NoReturn

import uvicorn


ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LIMIT = 120  # seconds for a command
LARGE = ("qwen3-0.6b", "llama3.1-8b")  # for which the embedded model stands in
SHORT = "--seq-len 128 --sample-tokens 1 --sample-every 9 --steps 1 --eval-every 9"
SMALL = {
    "train.sft": f"{SHORT} --batch 4 --eval-batches 1",
    "train.pretrain": f"{SHORT} --batch 4 --eval-batches 1",
    "train.dpo": f"{SHORT} --batch 4 --eval-batches 1",
    "train.distill": f"{SHORT} --batch 4 --eval-batches 1",
    "train.grpo": "--seq-len 128 --sample-tokens 1 --steps 1 --prompts 2 --group 2 --rollout-batch 4 "
    "--max-new-tokens 4",
    "train.prepare": "--seq-len 128 --workers 1",
    "train.inspect": "",
    "train.report": "",
    "train.compare": "",
    "zoo chat": "--max-new-tokens 2",
    "zoo serve": "--batch 1 --max-tokens 64 --port 0",
    "zoo verify": "--tokens 4",
    "zoo merge": "",
}
ELSEWHERE = {
    "python3 -m venv": "CI runs it where it is the first",
    "pip install": "CI installs what is needed",
    "lm_eval": "tests/zoo/test_serve.py runs it where it is installed",
    "pytest": "CI runs all of them",
    "python -m tests.": "these write what lies in the repository",
    "python -m train.sft --eval-tasks my_tasks/": "tests/train/test_tasks.py runs it where lm-eval is installed",
    "python -m train.sft --tracker": "tests/train/test_watch.py runs it, with packages that stand in for the trackers'",
    "python -m train.plan": "it needs the compilers' wheels; tests/train/test_plan.py",
}
LAUNCHERS = ("gcloud", "xpk", "srun", "n=0; for host in", "for n in")


def commands(page: pathlib.Path) -> list[str]:
    """The lines of a page's bash blocks, those that end with a backslash joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def write_data() -> None:
    """The files that commands speak of, where they look for them."""
    tiny = ROOT / "train" / "tiny"
    chats, pairs = (
        (tiny / f"{name}.jsonl").read_text().splitlines(True)[:24] for name in ("instructions", "preferences")
    )
    for folder in ("chats", "corpus"):
        pathlib.Path(folder).mkdir()
    for name in ("chats.jsonl", "code.jsonl", "chats/train.jsonl", "prompts.jsonl"):
        pathlib.Path(name).write_text("".join(chats))
    pathlib.Path("corpus/text.txt").write_text((ROOT / "README.md").read_text())
    pathlib.Path("pairs.jsonl").write_text("".join(pairs))
    pathlib.Path("math.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n' * 4)
    pathlib.Path("rewards.py").write_text(
        "polite = lambda text, record: float('please' in text)\nbrief = lambda text, record: -len(text)\n"
    )


def parse(module: str, words: list[str]) -> None:
    """Whether a script takes these options."""
    import importlib
    import typing

    import tyro

    tyro.cli(typing.get_type_hints(importlib.import_module(module).main)["o"], args=words)


def run(module: str, words: list[str]) -> None:
    """`python -m module words`, in this process, with eight devices where the command speaks of a mesh."""
    import pytest
    import rich

    from tests.train.conftest import devices

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module has been imported before
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr("builtins.input", unittest.mock.Mock(side_effect=["Hello?", EOFError()]))
        if "--mesh" not in words:
            devices(patch, 1)
        patch.setattr(uvicorn.Server, "startup", start_and_stop)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setattr(rich.get_console(), "file", said)
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                if end.code:
                    raise


async def start_and_stop(
    server: uvicorn.Server, sockets: list[socket.socket] | None = None, *, startup: Any = uvicorn.Server.startup
) -> None:
    """A server that ends as soon as it listens."""
    await startup(server, sockets)
    server.should_exit = True


def too_long(*_: Any) -> NoReturn:
    raise TimeoutError(f"It has taken more than {LIMIT} s.")


def do(command: str) -> str:
    """Runs one command. Returns why, if it was left out or only looked at.

    Raises:
        Exception, SystemExit: as the command ends.
    """
    import tyro

    from train.run.launcher import LaunchOptions

    for start, why in ELSEWHERE.items():
        if command.startswith(start):
            return why
    if command.startswith("python -m train.launch "):
        mine, _, theirs = command.partition(" -- ")
        tyro.cli(LaunchOptions, args=shlex.split(mine)[3:])
        _, _, module, *words = shlex.split(theirs)
        parse(module, words)
        return "it starts other processes: only its options were read"
    if command.startswith(LAUNCHERS):
        ((module, words),) = re.findall(r'python -m (train\.\w+) ([^"]*?)(?: &.*|".*)?$', command)
        parse(module, [re.sub(r"\$\w+", "0", word) for word in shlex.split(words)])
        return "it starts other processes: only its options were read"
    words = shlex.split(command.removesuffix("&"), comments=True)
    match words:
        case ["python", "-m", "zoo", kind, *rest] if f"zoo {kind}" in SMALL:
            run("zoo", [kind, *rest, *SMALL[f"zoo {kind}"].split()])
        case ["python", "-m", module, *rest] if module in SMALL:
            run(module, [*rest, *SMALL[module].split()])
        case _:
            raise SystemExit("tests/documented.py does not know how to run this.")
    return ""


def main() -> int:
    from tests import hurry

    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TPU_LOG_DIR": "disabled", "COLUMNS": "200"}
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {hurry.FLAGS}"
    import jax

    import zoo
    from tests import compiled
    from zoo import registry

    jax.config.update("jax_disable_most_optimizations", hurry.HURRY)
    registry.CONFIGS |= dict.fromkeys(LARGE, zoo.config("tiny"))
    registry.EMBEDDED |= dict.fromkeys(LARGE, registry.EMBEDDED["tiny"])
    signal.signal(signal.SIGALRM, too_long)
    work, before, failed = tempfile.mkdtemp(), os.getcwd(), 0
    os.chdir(work)
    try:
        jax.config.update("jax_compilation_cache_dir", str(compiled.folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        write_data()
        # The README begins with it, behind what sets up an environment.
        for place, command in [
            ("README.md", "python -m train.sft"),
            *((page.name, command) for page in PAGES for command in commands(page)),
        ]:
            started, end = time.monotonic(), ""
            signal.alarm(LIMIT)
            try:
                end = do(command)
                mark = "only" if end else "ok"
            except (Exception, SystemExit) as error:
                mark, end, failed = "FAILED", f"{type(error).__name__}: {error}", failed + 1
            print(
                f"{mark:7}{time.monotonic() - started:5.1f} s  {place}: {command}" + f"\n        {end}" * bool(end),
                flush=True,
            )
    finally:
        signal.alarm(0)
        os.chdir(before)
        shutil.rmtree(work)
    print(f"{failed} failed.")
    return failed


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # before the folder that commands run in
    sys.exit(main() > 0)
