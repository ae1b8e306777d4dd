"""The table "Sizes that switch code" of README.md: it names every such constant, and only what is there."""

import ast
import functools
import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("zoo", "kernels", "train", "convert")
# Tiles and limits of GPUs and TPUs, which have no path on a CPU.
ELSEWHERE = re.compile(r"kernels/\w+/(tpu|triton|mosaic|cudnn|fused)\w*\.py")


def is_number(node):
    match node:
        case ast.Constant():
            return type(node.value) in (int, float)
        case ast.BinOp():
            return is_number(node.left) and is_number(node.right)
        case ast.UnaryOp():
            return is_number(node.operand)
    return False


def bound(tree):
    """Yields the names that a module binds to numbers."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = zip(names, values, strict=True)
            case ast.Assign(targets=names, value=value):
                pairs = [(name, value) for name in names]
            case ast.AnnAssign(target=name, value=value):
                pairs = [(name, value)]
            case _:
                continue
        for name, value in pairs:
            if isinstance(name, ast.Name) and name.id.isupper() and is_number(value):
                yield name.id


def imported(tree):
    """Returns the full name of each name that a module imports."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def operands(node):
    """Returns what a node compares by order, divides, or gives to min, max or range."""
    match node:
        case ast.Compare() if any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops):
            return [node.left, *node.comparators]
        case ast.Call(func=ast.Name(id="min" | "max" | "range")):
            return node.args
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod()):
            return [node.left, node.right]
    return []


def compared_in(tree):
    """Yields the nodes of what the functions of a module compare by order, divide or bound."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)):
        for node in ast.walk(function):
            for part in operands(node):
                yield from ast.walk(part)


@functools.cache
def constants():
    """Returns the file and the name of all constants, and of those that functions compare, by their full names."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    files = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    module = lambda file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    every = {f"{module(file)}.{name}": (file, name) for file, tree in files.items() for name in bound(tree)}
    compared = set()
    for file, tree in files.items():
        names = imported(tree)
        for node in compared_in(tree):
            match node:
                case ast.Name(id=name):
                    compared.add(names.get(name, f"{module(file)}.{name}"))
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in names:
                    compared.add(f"{names[name]}.{attribute}")
    return set(every.values()), {every[name] for name in compared & every.keys()}


def written():
    """Returns the section's constants with their tests, and the constants that it says switch no code."""
    text = (ROOT / "tests" / "README.md").read_text()
    section = re.search(r"^## Sizes that switch code\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, "tests/README.md has no section 'Sizes that switch code'"
    table = {}
    for names, file, _, tests in re.findall(r"^\| (`[A-Z].*?) \| `(.*?)` \| (.*?) \| (.*?) \|$", section[1], re.M):
        for name in re.findall(r"`(\w+)`", names):
            assert (file, name) not in table, f"{file}: {name} has two rows"
            table[file, name] = re.findall(r"`(.*?)`", tests)
    others = [(file, name) for file, names in re.findall(r"`([\w/]+\.py): ([A-Z0-9_, ]+)`", section[1])
              for name in names.split(", ")]  # fmt: skip
    assert len(others) == len(set(others)), "a constant is listed twice"
    return table, set(others)


def test_every_size_that_switches_code_has_a_row():
    (_, compared), (table, others) = constants(), written()
    needed = {(file, name) for file, name in compared if not ELSEWHERE.fullmatch(file)}
    assert len(table) > 20 and not needed - table.keys() - others, (
        "These constants have no row in 'Sizes that switch code' of tests/README.md, with a test that runs the code on "
        "both sides of them, nor do they stand below the table, among those that switch no code."
    )


def test_what_is_written_is_there():
    (every, _), (table, others) = constants(), written()
    assert not (table.keys() | others) - every, "there are no such constants"
    assert not table.keys() & others, "these are in the table and below it"
    for tests in table.values():
        assert tests
        for test in tests:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / file).read_text())
            assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), test


@pytest.mark.parametrize(
    "code, names",
    [
        ("A = 2**5\ndef f(x): return x if x > A else 0", {"A"}),
        ("A, B = 1, 2 << 3\ndef f(x): return min(x, 2 * B)", {"B"}),
        ("A: int = -1\nf = lambda x: x // A", {"A"}),
        ("A = 1\ndef f(x): return x == A", set()),
        ("A = 1\nB = A > 0\ndef f(x): return x + A", set()),
    ],
)
def test_the_rule(code, names):
    tree = ast.parse(code)
    assert {node.id for node in compared_in(tree) if isinstance(node, ast.Name)} & {*bound(tree)} == names
