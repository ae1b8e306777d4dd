"""The files that a reader of fine-tuning opens stay short, and docs/sft.md lists the other folders that they call."""

import ast
import pathlib
import re


ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sft.md").read_text().split("## The code")[1]
READ = re.findall(r"^\d\. \[(train/[\w/]+\.py)\]", PAGE, flags=re.MULTILINE)  # in this order
CALLED = re.findall(r"^\| `(\w+/)` \|", PAGE, flags=re.MULTILINE)  # these need not be read


def imported(path):
    """Returns the folders of train that a file imports from."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "train":
            names |= {f"train.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("train."):
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("train.")}
    return {f"{name.split('.')[1]}/" for name in names}


def test_what_a_reader_of_fine_tuning_opens():
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in READ}
    assert READ[0] == "train/sft.py" and len(lines) == 5
    assert sum(lines.values()) <= 600, f"{lines}: put what is a thing of its own into a file of its own, with its test"


def test_all_else_is_named():
    assert all((ROOT / "train" / folder).is_dir() for folder in CALLED)
    assert set().union(*map(imported, READ)) <= set(CALLED)
