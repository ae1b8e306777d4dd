"""Defines the hidden layer of a gated MLP: two products, and a formula of both."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.gated_products import SAVED, Formula
from kernels.products import apart, products
from kernels.ragged_dot import ragged_dot
from kernels.stacked import Stacked


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def gated_products(
    x: Float[Array, "*batch in"],
    gate: Float[Array, "*groups out in"] | Stacked,
    up: Float[Array, "*groups out in"] | Stacked,
    formula: Formula,
    group_sizes: Int[Array, " groups"] | None,
) -> Float[Array, "*batch out"]:
    """Computes `kernels.gated_products` by two products."""
    if group_sizes is None:
        ys = map(apart, products(x, gate, up))
    else:
        ys = (ragged_dot(x, w, group_sizes) for w in (gate, up))
    return formula(*map(checkpoint_name, ys, SAVED))
