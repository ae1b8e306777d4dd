"""The parts that `rms_norms` implementations share: a norm, and rows with the norms that they pass through."""

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float


Scaling = Literal["rounded", "float32", "offset"]
"""How a row in float32, divided by its root mean square, is scaled.

"rounded": it is rounded to its dtype, and multiplied by the weight; "float32": multiplied by the weight, and rounded;
"offset": multiplied by 1 + weight, and rounded.
"""


@runtime_checkable
class Norm(Protocol):
    """A root mean square norm of the last axis (arXiv:1910.07467), which is a pytree and its own definition."""

    @property
    def weight(self) -> Any:
        """Its factors [features]; or a layer of a stack, `kernels.stacked.Stacked`."""

    @property
    def eps(self) -> float:
        """Is added to the mean of squares."""

    @property
    def scaling(self) -> Scaling: ...

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]: ...


class Chain(NamedTuple):
    """Rows that are normed; and the residual, if there is one, that they are then added to, and the norm of the sum."""

    x: Float[Array, "*batch _"]  # of which as many features are normed as the norm has
    norm: Norm
    residual: Float[Array, "*batch features"] | None = None
    then: Norm | None = None

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm,) if self.then is None else (self.norm, self.then)


def features(norm: Norm) -> int:
    """Returns the number of features that the norm takes."""
    return norm.weight.shape[0]
