"""Norms within `prefer("invariant")`: by the same formulas, whose sums are invariant."""

from typing import Any

from kernels import invariant
from kernels.rms_norms.reference import rms_norms  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `rms_norms`, or None if it can."""
    return invariant.refusal()
