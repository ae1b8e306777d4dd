"""Whether a run checks the types and shapes of arguments and results, which are a quarter of its CPU seconds.

It does where it has tests of the default tier. Slow and live tests alone, and a second Python (JAXTYPING_DISABLE=1, as
.ci/run sets it), would only check the same calls again.
"""

import collections
import sys

import jaxtyping


PACKAGES = ("zoo", "kernels", "convert", "train")


def wanted(expression: str) -> bool:
    """Returns whether a run checks types, from pytest's -m: whether tests without a mark are in it."""
    # These are expressions of Python, with the marks for names.
    return not jaxtyping.config.jaxtyping_disable and bool(
        eval(expression or "True", {}, collections.defaultdict(bool))
    )


def install() -> None:
    """Lets imports of our packages add the checks, from now on.

    Raises:
        RuntimeError: if one has been imported without them.
    """
    if early := [name for name in PACKAGES if name in sys.modules]:
        raise RuntimeError(f"{', '.join(early)} was imported before tests/conftest.py could have its types checked.")
    jaxtyping.install_import_hook(list(PACKAGES), "beartype.beartype")
