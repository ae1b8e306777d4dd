"""Sorted rows within `prefer("invariant")`: rows are copied, so no bit depends on the other rows."""

from typing import Any

from kernels import invariant
from kernels.sort_rows.reference import sort_rows  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `sort_rows`, or None if it can."""
    return invariant.refusal()
