"""The hidden layer of a gated MLP within `prefer("invariant")`: by the same products, which are invariant then."""

from typing import Any

from kernels import invariant
from kernels.gated_products.reference import gated_products  # noqa: F401 (dispatch asks for it)


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(*_: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `gated_products`, or None if it can."""
    return invariant.refusal()
