"""Writing into a cache within `prefer("invariant")`: it computes nothing, so the formula's bits are these."""

from typing import Any

from kernels import invariant
from kernels.cache_write.reference import cache_write  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `cache_write`, or None if it can."""
    return invariant.refusal()
