"""The parts that `rms_norms` implementations share: what a norm is."""

from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Float


Scaling = Literal["rounded", "float32", "offset"]
"""How a row in float32, divided by its root mean square, is scaled.

"rounded": it is rounded to its dtype, and then multiplied by the weight; "float32": it is multiplied by the weight, and
then rounded; "offset": it is multiplied by 1 + weight, and then rounded.
"""


@runtime_checkable
class Norm(Protocol):
    """A root mean square norm of the last axis (arXiv:1910.07467): a pytree, which defines itself when it is called."""

    scaling: ClassVar[Scaling]

    @property
    def weight(self) -> Any:
        """The factors of the features: an array, or a layer of a stack, `kernels.stacked.Stacked`."""
        ...

    @property
    def eps(self) -> float:
        """The number that is added to the mean of squares."""
        ...

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]: ...


def features(norm: Norm) -> int:
    """Returns the number of features that are normed."""
    return norm.weight.shape[0]
