"""The decode step by the formula that `kernels.delta_rule` has for many tokens within `prefer("invariant")`."""

from typing import Any

from kernels import invariant
from kernels.delta_step.reference import delta_step  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_step`, or None if it can."""
    return invariant.refusal()
