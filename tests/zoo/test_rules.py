"""Rules for all code: classes are abstract or final, and the axes of meshes are named in one place."""

import abc
import ast
import importlib
import pathlib
import pkgutil
import re

import pytest

import convert
import kernels
import kernels.mesh
import train
import zoo
import zoo.mesh


PACKAGES = (kernels, train, zoo)
METHODS = (type(lambda: None), property, classmethod, staticmethod)
AXES = {"REPLICA", "FSDP", "TENSOR", "CONTEXT", "EXPERT", "STAGE"}


def nodes(file, pattern):
    """Returns the nodes of a file's syntax tree, or none if nothing in its text matches, since parsing takes long."""
    text = file.read_text()
    return ast.walk(ast.parse(text)) if re.search(pattern, text) else ()


def overrides(classes):
    """Yields (class, method, base) if a class redefines a method that is concrete in a base among these classes."""
    for kind in classes:
        for base in classes.intersection(kind.__mro__[1:]):
            for name in vars(kind).keys() & vars(base).keys():
                method = vars(base)[name]
                special = name.startswith("__") and name != "__call__"  # dataclasses create some for every class
                if isinstance(method, METHODS) and not special and not getattr(method, "__isabstractmethod__", False):
                    yield kind.__name__, name, base.__name__


def test_what_an_override_is():
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def area(self): ...

        def twice(self):
            return 2

    class Final(Abstract):
        def area(self):
            return 1

    class Overriding(Abstract):
        def area(self):
            return 1

        def twice(self):
            return 3

    assert list(overrides({Abstract, Final, Overriding})) == [("Overriding", "twice", "Abstract")]


def test_no_subclass_overrides_a_concrete_method():
    pytest.importorskip("starlette")
    found = []
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                found += vars(importlib.import_module(module.name)).values()
    ours = tuple(package.__name__ for package in PACKAGES)
    classes = {c for c in found if isinstance(c, type) and c.__module__.startswith(ours)}
    assert len(classes) > 150
    assert not list(overrides(classes))


def test_docstrings_begin_with_a_verb_or_a_noun():
    """Docstrings do not begin with a clause as a noun ("What ..."), or with a noun left out ("Of ...")."""
    opening, found = re.compile(r"(?:What|Of|As|So many|How many|How much)\b"), []
    quoted = rf"""["']\s*(?:\\\n\s*)?{opening.pattern}"""
    root = pathlib.Path(__file__).parents[2]
    for file in (file for package in ("zoo", "kernels", "convert", "train", "benchmarks", "tests") for file in
                 (root / package).rglob("*.py")):  # fmt: skip
        for node in nodes(file, quoted):
            body = getattr(node, "body", None)
            for each in body if isinstance(body, list) else ():
                text = each.value.value if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) else None
                if isinstance(text, str) and opening.match(text.strip()):
                    found.append(f"{file.relative_to(root)}:{each.lineno}: {text.strip().splitlines()[0]}")
    assert not found, "\n".join(found)


def test_axes_of_meshes_are_named_once():
    """Code uses FSDP, not "fsdp". Partition rules of families and towers are data, and "tensor" is also a granularity
    of quantising.
    """
    assert all(getattr(kernels.mesh, name) == name.lower() for name in AXES)
    assert sorted(zoo.mesh.AXES) == sorted(map(str.lower, AXES))
    spelt, quoted = set(), rf"""["'](?:{"|".join(AXES).lower()})["']"""
    for package in PACKAGES:
        for file in pathlib.Path(package.__path__[0]).rglob("*.py"):
            constants = (node.value for node in nodes(file, quoted) if isinstance(node, ast.Constant))
            strings = {value for value in constants if isinstance(value, str)}
            if strings & {name.lower() for name in AXES} and not {"models", "vision"} & set(file.parts):
                spelt.add(str(file.relative_to(pathlib.Path(package.__path__[0]).parent)))
    quantised = {f"kernels/quantized_matmul/{name}.py" for name in ("__init__", "shared", "quantize")}
    assert spelt == {"kernels/mesh.py"} | quantised


OWN = {"zoo/text/templates.py"}  # its process for chat templates gets requests only from its parent
CONFINED = {"train/data/fair.py"}  # its source runs in the process of train.data.confine, for the tests of records
RUNS = {"eval", "exec", "compile", "__import__"}  # as names, and as attributes of these modules
UNPICKLES = {"pickle": {"load", "loads", "Unpickler"}, "torch": {"load"}, "joblib": {"load"}, "marshal": {"loads"}}


def test_no_file_can_run_code():
    """No call in these packages runs or unpickles a file's content. NumPy's files are read without pickles."""
    found, named = [], r"\b(?:allow_pickle|trust_remote_code|" + "|".join([*RUNS, *UNPICKLES]) + r")\b"
    for package in (convert, kernels, train, zoo):
        root = pathlib.Path(package.__path__[0])
        for path in root.rglob("*.py"):
            name = str(path.relative_to(root.parent))
            for node in nodes(path, named):
                if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                    bad = not (isinstance(node.value, ast.Constant) and node.value.value is False)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    bad = node.func.id in RUNS and name not in CONFINED
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    bad = node.attr in UNPICKLES.get(node.value.id, ()) and name not in OWN
                else:
                    continue
                found += [f"{name}:{node.lineno}"] * bool(bad)
    assert not found
