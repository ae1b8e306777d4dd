"""The README's example runs as it is written, and its table lists the families as they are."""

import pathlib
import re

import zoo
from tests.zoo import make_table, tiny
from zoo.models import FAMILIES


README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_example(capsys):
    (code,) = re.findall(r"<!-- generate -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 6
    exec(code, {})
    (shown,) = re.findall(r"<!-- generated -->\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert capsys.readouterr().out == shown


def test_table():
    """Rows and counts of lines equal the families'. Errors may be older, and are below the promised bound."""
    without_errors = lambda row: row.split("|")[:5]
    section = README.split("## Families")[1].split("##")[0]
    assert sorted(FAMILIES) == sorted(tiny.MODULES)
    written = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [row for row in make_table.rows(dict.fromkeys(FAMILIES, 0.0)) if row.startswith("| ")]
    assert list(map(without_errors, rows)) == list(map(without_errors, written)), (
        "python -m tests.zoo.make_table writes it"
    )
    assert all(float(row.split("|")[-2]) < 1e-4 for row in written[1:])


def test_every_file_named_is_there():
    root = pathlib.Path(__file__).parents[1]
    tree = README.split("## What is where")[1].split("```")[1]
    files = set()
    for package in ("zoo", "kernels", "convert", "train", "tests", "benchmarks"):
        assert f"{package}/" in tree and (root / package).is_dir()
        files |= {path.name for path in (root / package).rglob("*.py")}
    assert set(re.findall(r"[a-z0-9_]+\.py", tree)) <= files
    assert zoo.names()[0] == "tiny"
