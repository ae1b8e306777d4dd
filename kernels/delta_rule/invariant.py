"""The gated delta rule one token after the other: the bits of a token do not depend on how many are read at a time."""

from typing import Any

from kernels import invariant
from kernels.delta_rule.reference import delta_rule  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_rule`, or None if it can."""
    return invariant.refusal()
