"""Products with several matrices, within `prefer("invariant")`: by the same formula, whose products are invariant."""

from typing import Any

from kernels import invariant
from kernels.products.reference import products  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `products`, or None if it can."""
    return invariant.refusal()
