"""Products by head within `prefer("invariant")`: by the same formula, whose products are invariant."""

from typing import Any

from kernels import invariant
from kernels.head_products.reference import head_products  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any, **__: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `head_products`, or None if it can."""
    return invariant.refusal()
