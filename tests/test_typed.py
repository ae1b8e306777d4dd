"""Types are checked in the tiers and modules where they should be, and all code is installed."""

import ast
import pathlib
import re
import tomllib

import jaxtyping
import pytest

import kernels
import zoo
from tests import typed


ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.skipif(not typed.wanted(), reason="only JAXTYPING_DISABLE=0 checks types")
def test_this_run_checks_them():
    with pytest.raises(jaxtyping.TypeCheckError):
        kernels.attention(1.0, 1.0, 1.0, scale=1.0)
    modules = typed.shaped()
    assert {"zoo.nn.layers", "zoo.models.qwen3", "kernels.attention", "train.step.loss"} <= {*modules}
    assert not {"zoo", "train", "convert", "zoo.nn", "zoo.registry"} & {*modules}
    with pytest.raises(RuntimeError, match=r"zoo, .* was imported before"):
        typed.install()


def test_users_type_checkers_read_ours():
    """All packages have a py.typed file. pyright strictly checks tests/public.py, which has all public names of zoo."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    for package in typed.PACKAGES:
        assert (ROOT / package / "py.typed").exists() and "py.typed" in project["setuptools"]["package-data"][package]
    public = (ROOT / "tests/public.py").read_text()
    assert public.startswith("# pyright: strict\n") and "tests/public.py" in project["pyright"]["include"]
    used = {node.attr for node in ast.walk(ast.parse(public)) if isinstance(node, ast.Attribute)}
    assert set(zoo.__all__) - set(zoo.models.FAMILIES) <= used
    (example,) = re.findall(
        r"<!-- generate -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )
    assert {line.split("  #")[0].strip() for line in example.splitlines()} <= set(map(str.strip, public.splitlines()))


def test_all_folders_of_code_are_installed():
    """Every folder with Python files is among the packages of pyproject.toml, so that a wheel has all of the code."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT) for package in typed.PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert sorted(".".join(folder.parts) for folder in folders) == sorted(listed)
