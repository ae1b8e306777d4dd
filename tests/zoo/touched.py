"""Counts the files that one writes or changes to add a family: `python -m tests.zoo.touched` prints docs/families.md's
table of them.

Of a family that is here, these are

- its own: its file, those that only its own files import, such as a vision tower, and the tests named like it;
- files of the packages that name it or one of its `model_types` in their code, and are no other family's;
- pages of documentation that name one of its own.

What scripts write is not counted: golden numbers, the pages of docs/models, rows of README.md, tests/README.md and
docs/vision.md, and the names in zoo/__init__.py and zoo/models/index.json. Nor are tests of something else that take
the family as an example, since no family has to be one.
"""

import ast
import collections
import pathlib
import re
from collections.abc import Iterator, Mapping

from zoo.models import FAMILIES


ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("zoo", "kernels", "convert", "train")
EXAMPLES = {"a dense family": "smollm3", "a hybrid": "nemotron_h", "one that sees": "gemma4"}
PAGE = "families.md"
WRITTEN = re.compile(r"<!-- .*?: python -m .*? -->.*?<!-- end -->", re.DOTALL)  # by a script, in a page
IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)


def touched(family: str) -> list[str]:
    """Returns the files that one writes or changes by hand to add this family."""
    own, before, users = {f"zoo/models/{family}.py"}, set(), importers()
    while own != before:
        before = set(own)
        own |= {file for file, by in users.items() if by <= own}
    tests = {_name(path) for path in (ROOT / "tests").rglob("*.py") if path.stem.removeprefix("test_") == family}
    words = re.compile(rf"\b({'|'.join({family, *FAMILIES[family].model_types})})\b")
    naming = {
        file
        for file, text in sources().items()
        if file not in own | {"zoo/__init__.py"}
        and not re.fullmatch(r"zoo/models/\w+\.py", file)
        and words.search(text)
        and any(map(words.search, code(text)))
    }
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != PAGE]
    pages = {path for path in pages if any(file in WRITTEN.sub("", path.read_text()) for file in own | tests)}
    return [*sorted(own), *sorted(naming), *sorted(tests), *sorted(map(_name, pages))]


def sources() -> Mapping[str, str]:
    """Returns the text of each file of the packages."""
    return {_name(path): path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def importers() -> Mapping[str, set[str]]:
    """Returns the files of the packages, each with those that import it."""
    texts, found = sources(), collections.defaultdict(set)
    for user, text in texts.items():
        for module, names in IMPORT.findall(text):
            for name in ("", *re.findall(r"\w+", names)):
                file = f"{module}.{name}".rstrip(".").replace(".", "/") + ".py"
                if file in texts:
                    found[file].add(user)
    return found


def code(text: str) -> Iterator[str]:
    """Yields the identifiers and the strings of a file, docstrings aside."""
    tree, docstrings = ast.parse(text), set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant() as string):
                docstrings.add(string)
            case ast.Constant(str(value)) if node not in docstrings:
                yield value
            case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name):
                yield name


def table() -> str:
    """Returns the table of docs/families.md."""
    lines = ["| to add | files | they are, for one that is here |", "|---|---|---|"]
    for kind, family in EXAMPLES.items():
        files = touched(family)
        lines.append(f"| {kind} | {len(files)} | {', '.join(f'`{file}`' for file in files)} |")
    return "\n".join(lines) + "\n"


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    print(table(), end="")
