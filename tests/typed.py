"""Checks the types and shapes of arguments and results while tests run, if JAXTYPING_DISABLE=0 is set.

.ci/run sets it for the newest Python, whose tests reach every family and kernel. Elsewhere the checks would
take a fifth of a run, most of which is tracing our functions.

Modules that import jaxtyping are checked. Modules without shapes read files, records and options. pyright has checked
their types, and their functions are called most often: checking them at runtime, too, took a tenth of a run's CPU
seconds.
"""

import os
import pathlib
import re
import sys

import jaxtyping


PACKAGES = ("zoo", "kernels", "convert", "train")


def wanted() -> bool:
    """Returns whether a run checks types."""
    return os.environ.get("JAXTYPING_DISABLE") == "0"


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
