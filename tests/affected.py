"""Runs the tests that a change can reach, for the minutes between edits: `python -m tests.affected`.

    python -m tests.affected                       # what differs from main, committed or not
    python -m tests.affected zoo/models/qwen3.py   # a change of these files
    python -m tests.affected HEAD~3..              # what these commits changed
    python -m tests.affected --list                # print the tests' files, and run none

Arguments after `--` go to pytest (`-- -x`). A change reaches a test file that imports the changed file, directly or
through other files. A name that a package's __init__ re-exports counts for the file that defines it. A fixture counts
for its conftest.py.

Families, kernel backends and data formats are alternatives (CHOICES). A table imports all of them, and nothing else in
the library depends on a single one. So a change of one reaches the tests that import it, and the cases of other tests
that are about it: for a family, the cases with one of its checkpoints in their names; for a backend, the cases with its
name. Other tests may use it as an example, so the whole suite still has the last word.
"""

import argparse
import ast
import collections
import fnmatch
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.groups import group
from tests.seconds import README, read
from tests.zoo import tiny


ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("zoo", "kernels", "convert", "train", "tests", "benchmarks")
CHECKPOINTS = ("tests/zoo/tiny/__init__.py", "tests/zoo/programs.py")  # tests take all checkpoints' names from these
ALL = ("pyproject.toml", "tests/conftest.py", "tests/hurry.py", "tests/compiled.py")  # every test depends on these
NONE = (".ci/*", "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "SECURITY.md", ".gitignore")
FAMILY = re.compile(r"(?:zoo/models|tests/zoo/tiny|tests/zoo/golden)/(?!__init__)(\w+)\.(?:py|npz)")
BACKEND = re.compile(r"kernels/(?!backends/)(\w+)[_/](xla|triton|tpu|cudnn|mosaic)\.py")
BACKENDS = {"xla", "triton", "tpu", "cudnn", "mosaic", "reference"}
CHOICES = (
    FAMILY,
    BACKEND,
    re.compile(r"train/data/formats/(?!__init__)\w+\.py"),
    re.compile(r"zoo/vision/(?:towers|processors)/(?!__init__)\w+\.py"),
)
DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")


class House:
    """The files of a checkout, and which files use which."""

    def __init__(self, root: pathlib.Path = ROOT):
        files = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
        self.files = {_module(path.relative_to(root)): str(path.relative_to(root)) for path in files}
        self.trees = {file: ast.parse((root / file).read_text()) for file in self.files.values()}
        self.aliases = {file: dict(_aliases(module, file, self.trees[file])) for module, file in self.files.items()}
        self.stars = {file: list(_stars(module, file, self.trees[file])) for module, file in self.files.items()}

    @functools.cached_property
    def names(self) -> Mapping[str, set[str]]:
        """Maps each file to the dotted names in it."""
        return {file: set(self._names(file)) for file in self.trees}

    @functools.cached_property
    def users(self) -> Mapping[str, set[str]]:
        """Maps each file to the files that use it."""
        users = collections.defaultdict(set)
        for file, names in self.names.items():
            named = {one for name in names for one in self.resolve(name)} | set(self._conftests(file))
            for other in named - {file}:
                users[other].add(file)
        return users

    def _names(self, file: str) -> Iterator[str]:
        """Yields the dotted names of modules and attributes that a file imports, uses, or writes in strings."""
        aliases = self.aliases[file]
        if not file.endswith("__init__.py"):  # an __init__ imports for others
            yield from self.imports(file)
        for node in ast.walk(self.trees[file]):
            match node:
                case ast.Attribute() | ast.Name():
                    root, *attributes = _dotted(node)
                    if root in aliases:
                        yield ".".join((aliases[root], *attributes))
                case ast.Constant(str(text)) if DOTTED.fullmatch(text):
                    yield text

    def imports(self, file: str) -> set[str]:
        """Returns the dotted names that a file imports. `import zoo.mesh` binds zoo, but counts only as zoo.mesh."""
        return {name for alias, name in self.aliases[file].items() if "." in name or alias.startswith("import ")}

    def _conftests(self, file: str) -> Iterator[str]:
        """Yields the conftest.py files whose fixtures a test file uses."""
        taken = {
            a.arg for node in ast.walk(self.trees[file]) if isinstance(node, ast.FunctionDef) for a in node.args.args
        }
        for folder in pathlib.Path(file).parents:
            conftest = str(folder / "conftest.py")
            if conftest != file and conftest in self.trees and taken & set(_fixtures(self.trees[conftest])):
                yield conftest

    def resolve(self, name: str) -> set[str]:
        """Returns the files of a dotted name: the one that defines it, and the __init__ files that re-export it."""
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            if file := self.files.get(".".join(parts[:n])):
                break
        else:
            return set()
        if n == len(parts) or not file.endswith("__init__.py"):
            return {file}
        rest = parts[n:]
        if target := self.aliases[file].get(rest[0]):
            return {file} | (self.resolve(".".join((target, *rest[1:]))) if target != name else set())
        for package in self.stars[file]:
            if f"{package}.{rest[0]}" in self.files:
                return {file} | self.resolve(".".join((package, *rest)))
        return {file}

    def reached(self, changed: Iterable[str], but: Iterable[str] = ()) -> set[str]:
        """Returns the given files and all that a change of them can reach, without going through the files in `but`."""
        seen, left = set(but), list(changed)
        while left:
            file = left.pop()
            if file not in seen:
                seen.add(file)
                users = self.users.get(file, set())
                if is_choice(file):
                    users = {user for user in users if is_choice(user) or user.startswith("tests/")}
                left += users
        return seen - set(but)

    def naming(self, module: str) -> set[str]:
        """Returns the files that use a module by name, even if the module no longer exists."""
        return {
            file for file, names in self.names.items() if any(f"{name}.".startswith(f"{module}.") for name in names)
        }

    def mention(self, text: str) -> set[str]:
        """Returns the files in which a string contains this text."""
        has = lambda node: isinstance(node, ast.Constant) and isinstance(node.value, str) and text in node.value
        return {file for file, tree in self.trees.items() if any(map(has, ast.walk(tree)))}


def is_choice(file: str) -> bool:
    return any(pattern.fullmatch(file) for pattern in CHOICES)


def is_test(file: str) -> bool:
    return file.startswith("tests/") and pathlib.Path(file).name.startswith("test_")


def _module(file: pathlib.Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _dotted(node: ast.expr) -> list[str]:
    """Returns ["a", "b", "c"] for the expression a.b.c. Its first part is "" unless a name begins the expression."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(attributes)]


def _origin(module: str, file: str, node: ast.ImportFrom) -> str:
    """Returns the absolute name of the module that a `from` import takes names from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + file.endswith("__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _aliases(module: str, file: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the names that imports bind, at the top of a file or within functions, each with its full dotted name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                for name in names:
                    root = name.name.split(".")[0]
                    yield (name.asname, name.name) if name.asname else (root, root)
                    yield f"import {name.name}", name.name
            case ast.ImportFrom(names=names):
                for name in names:
                    if name.name != "*":
                        yield name.asname or name.name, f"{_origin(module, file, node)}.{name.name}"


def _fixtures(tree: ast.Module) -> Iterator[str]:
    """Yields the names of a file's fixtures."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(each) for each in node.decorator_list):
            yield node.name


def _stars(module: str, file: str, tree: ast.Module) -> Iterator[str]:
    """Yields the modules of which a file imports everything (`import *`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield _origin(module, file, node)


class Cases(NamedTuple):
    """The cases of a test file that are about some families, or some backends."""

    only: frozenset[str]
    rest: bool  # also the cases about no family, or no backend

    def have(self, nodeid: str) -> bool:
        family, words = group(nodeid), set(nodeid.rstrip("]").partition("[")[2].split("-"))
        about = {family} & set(tiny.MODULES) if self.only <= set(tiny.MODULES) else words & BACKENDS
        return bool(about & self.only) or (self.rest and not about)


WHOLE = None
Selection = dict[str, Cases | None]


def select(changed: Iterable[str], house: House) -> Selection | None:
    """Returns the test files that a change of these files can reach, each with its cases. None stands for all tests."""
    starts, families = set(), set()
    for file in changed:
        path = pathlib.Path(file)
        if file in ALL:
            return None
        if any(fnmatch.fnmatch(file, pattern) for pattern in NONE):
            continue
        if family := FAMILY.fullmatch(file):
            families.add(family[1])
        elif file.endswith(".md"):
            starts |= {"tests/test_readme.py"} | house.mention(path.name)
        elif file.endswith(".py"):
            starts |= {file} if file in house.trees else house.naming(_module(path))
        else:  # data, whose readers contain its name or its folder's name
            readers = house.mention(path.name) or house.mention(path.parent.name)
            if not readers:
                return None
            starts |= readers
    families |= {family[1] for family in map(FAMILY.fullmatch, house.reached(starts)) if family}
    modules = {file for file in house.trees if (family := FAMILY.fullmatch(file)) and family[1] in families}
    selection: Selection = {}

    def add(files: Iterable[str], cases: Cases | None) -> None:
        for file in filter(is_test, files):
            old = selection.get(file, cases)
            mixed = WHOLE in (old, cases) or (old.only <= set(tiny.MODULES)) != (cases.only <= set(tiny.MODULES))
            selection[file] = WHOLE if mixed else Cases(old.only | cases.only, old.rest or cases.rest)

    if families:
        # Tests get the names of all checkpoints from these two files.
        add((user for file in CHECKPOINTS for user in house.users[file]), Cases(frozenset(families), rest=False))
        add(house.reached(modules), Cases(frozenset(families), rest=True))
    reached = house.reached(starts, but=modules)
    for backend in filter(None, map(BACKEND.fullmatch, reached)):
        operation, name = backend.groups()
        about = {f for f in house.trees if _words(f) & set(operation.split("_")) and f.startswith("tests/kernels/")}
        add((file for file in about if "_compile_" not in file), Cases(frozenset({name}), rest=True))
    add(reached, WHOLE)
    return selection


def _words(file: str) -> set[str]:
    return set(pathlib.Path(file).stem.split("_"))


def changes(what: list[str]) -> list[str]:
    """Returns the given paths, or the paths that differ in a given range of commits or, by default, from main."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if what and all((ROOT / one).exists() or one.endswith(".py") for one in what):
        files = [str((ROOT / one).relative_to(ROOT)) for one in what]
        return [file for one in files for file in git("ls-files", one).stdout.split() or [one]]
    if not what:
        base = next((ref for ref in ("main", "origin/main") if git("rev-parse", "-q", "--verify", ref).stdout), "HEAD")
        what = [git("merge-base", "HEAD", base).stdout.strip() or "HEAD"]
    found = git("diff", "--name-only", "--no-renames", *what)
    if found.returncode:
        raise SystemExit(f"{' '.join(what)} is neither a path nor a range of commits: {found.stderr.strip()}")
    new = git("ls-files", "--others", "--exclude-standard").stdout.split() if ".." not in what[0] else []
    return [*found.stdout.split(), *new]


def pytest_addoption(parser):
    parser.addoption("--cases", metavar="FILE", help="run only the cases that tests/affected.py wrote to this file")


def pytest_collection_modifyitems(config, items):
    if path := config.getoption("cases"):
        selection = {file: Cases(frozenset(only), rest) for file, (only, rest) in json.loads(_read(path)).items()}
        chosen = lambda item: (cases := selection.get(item.nodeid.split("::")[0])) is None or cases.have(item.nodeid)
        config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
        items[:] = filter(chosen, items)


def _read(path: str) -> str:
    return pathlib.Path(path).read_text()


def main() -> int:
    """Prints the test files that are selected, with their known CPU seconds, and runs them."""
    mine, theirs = sys.argv[1:], []
    if "--" in mine:
        cut = mine.index("--")
        mine, theirs = mine[:cut], mine[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.affected", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="paths, or one range of commits; by default all that differs from main")
    parser.add_argument("--list", action="store_true", help="print the files of tests, and run none")
    o = parser.parse_args(mine)
    changed = changes(o.what)
    selection = select(changed, House())
    if selection is None:
        print("All tests: every one of them depends on what has changed.")
        selection = {"tests": WHOLE}
    known, files = read(README.read_text()), collections.defaultdict(list)
    for file, cases in sorted(selection.items()):
        about = f"about {', '.join(sorted(cases.only))}" + ", or about none" * cases.rest if cases else ""
        files[f"Cases {about}" if cases else "All cases"].append(file)
    for cases, of in files.items():
        seconds = sum(known.get((file, "default"), 0) for file in of)
        print(f"{cases}{f', {seconds:.0f} CPU s' if 'All' in cases else ''}:", *of, sep="\n  ")
    if any(file.endswith(".md") for file in changed):
        print("The commands of the documentation are run by `python -m tests.documented`, in two minutes.")
    if o.list or not selection:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "cases"
        path.write_text(json.dumps({file: (sorted(c.only), c.rest) for file, c in selection.items() if c}))
        workers = ["-n", "2"] if len(selection) > 1 or selection.keys() == {"tests"} else []
        command = [sys.executable, "-m", "pytest", "-q", *workers, "--cases", str(path), *sorted(selection), *theirs]
        return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
