"""Decides whether a run checks the types and shapes of arguments and results, and in which modules.

A run checks them if it includes thorough tests. In the default tier the checks would take an eighth of its minutes.

Modules that import jaxtyping are checked. Modules without shapes read files, records and options. pyright has checked
their types, and their functions are called most often: checking them at runtime, too, took a tenth of a run's CPU
seconds.
"""

import collections
import pathlib
import re
import sys

import jaxtyping


PACKAGES = ("zoo", "kernels", "convert", "train")


def wanted(expression: str) -> bool:
    """Returns whether a run checks types, given pytest's -m expression: whether it selects thorough tests."""
    # The expression is valid Python, with the marks as names.
    return not jaxtyping.config.jaxtyping_disable and bool(
        eval(expression or "True", {}, collections.defaultdict(bool, thorough=True))
    )


def shaped() -> list[str]:
    """Returns the names of the modules that import jaxtyping; the name of a package covers all modules in it."""
    root, found = pathlib.Path(__file__).parents[1], []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        if re.search(r"^(from|import) jaxtyping\b", path.read_text(), re.M):
            parts = path.relative_to(root).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def install() -> None:
    """Makes later imports of our modules with shapes add the checks.

    Raises:
        RuntimeError: if one of our packages was imported before.
    """
    if early := [name for name in PACKAGES if name in sys.modules]:
        raise RuntimeError(f"{', '.join(early)} was imported before tests/conftest.py could have its types checked.")
    jaxtyping.install_import_hook(shaped(), "beartype.beartype")
