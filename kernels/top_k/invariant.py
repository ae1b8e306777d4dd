"""The best options within `prefer("invariant")`: the same formula, row by row. `shared.scores_of` refuses a softmax."""

from typing import Any

from kernels import invariant
from kernels.top_k.reference import top_k  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any, **__: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `top_k`, or None if it can."""
    return invariant.refusal()
