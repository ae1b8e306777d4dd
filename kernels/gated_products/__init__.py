"""The hidden layer of a gated MLP, of all rows or of rows sorted by expert: signature and meaning."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import dispatch
from kernels.stacked import Stacked


SAVED = "mlp_gate", "mlp_up"  # the names of the two products, for policies of jax.checkpoint

Formula = Callable[[Float[Array, "*batch out"], Float[Array, "*batch out"]], Float[Array, "*batch out"]]


def gated_products(
    x: Float[Array, "*batch in"],
    gate: Float[Array, "*groups out in"] | Stacked,
    up: Float[Array, "*groups out in"] | Stacked,
    formula: Formula,
    group_sizes: Int[Array, " groups"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch out"]:
    """Computes `formula(x gate', x up')`, the hidden layer of a gated MLP (arXiv:2002.05202).

    Without `group_sizes` the products are those of `kernels.products`, with matrices (out, in). With them they are
    those of `kernels.ragged_dot`: rows are sorted by group, and each group has its own matrices.

    Args:
        x: rows of features; with `group_sizes` one axis of rows.
        gate: in the dtype of x. A layer of a stack (`kernels.stacked.Stacked`) is not copied by "triton".
        up: like `gate`.
        formula: maps the two products, rounded to the dtype of x, element by element, and zeros to zero. "triton" hands
            them over in float32, and rounds its result once.
        group_sizes: the number of each group's rows.
        implementation: is one of

            - "reference": the products, as these operations choose to compute them, and then the formula.
            - "triton": for NVIDIA GPUs, in 16 bits: one kernel for both products and the formula, which reads the
              matrices where they are. Up to 16 rows, or up to 256 rows in groups of up to 16 on average.

            None chooses "triton" on a GPU, and "reference" for what it refuses.

    Raises:
        ValueError: matrices differ in shape, or have another dtype or number of features than `x`; or the
            implementation asked for cannot take these arguments.
    """
    for w in (gate, up):
        if w.dtype != x.dtype or w.shape[-1] != x.shape[-1] or w.shape != gate.shape:
            raise ValueError(
                f"Matrices, (out, in), have the shapes {gate.shape} and {up.shape} in {w.dtype}, and x has rows of "
                f"{x.shape[-1]} features in {x.dtype}: shapes of both, dtype and features must be the same."
            )
    sizes = None if group_sizes is None else group_sizes.astype(jnp.int32)
    return dispatch.run("gated_products", implementation, x, gate, up, formula, sizes)
