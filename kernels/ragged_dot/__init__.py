"""Products of sorted rows with the matrices of their groups, as in mixtures of experts: signatures and meaning."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from kernels import dispatch
from kernels.coded import Coded
from kernels.quantized_matmul import quantize
from kernels.stacked import Stacked


SAVED = "experts"  # the name of the results, for policies of jax.checkpoint


def ragged_dot(
    x: Float[Array, "tokens in"] | Int8[Array, "tokens in"],
    w: Float[Array, "groups out in"] | Int8[Array, "groups out in"] | Stacked | Coded,
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """Multiplies each row of `x` by the transpose of its group's matrix, which is (out, in) like a Linear's.

    Rows are sorted by group: the first `group_sizes[0]` belong to group 0, the next `group_sizes[1]` to group 1, and so
    on. This is the product of dropless mixture-of-experts layers (MegaBlocks, arXiv:2211.15841). Groups may be empty.
    Rows beyond the last group yield zeros, get zero gradients and may hold anything. Groups that would go beyond the
    last row end there.

    Narrower dtypes accumulate in float32. A NaN in a row stays in the row, and in the gradient of its group's matrix;
    a NaN in a group's matrix stays in the group's rows. `w` may be int8: then its tiles are cast to the dtype of `x`
    as they are multiplied, and there is no gradient of `w`. `w` may be a layer of a stack, which is not copied
    (`kernels.stacked`). Or it is `Coded`: then it has no gradient, and for few rows no group is dequantised in memory.
    `x` and `w` may both be int8, or both float8_e4m3fn: then the output is float32, and has no
    gradient. "tpu" multiplies them in bfloat16, and rounds the sums to bfloat16.

    `implementation` is one of

    - "reference": multiplies every row by every matrix. It has every derivative, and computes float64 in float64.
    - "xla": works in tiles of at most 128 rows, in plain JAX. The work and memory of this and of all that follow grow
      with tokens, not with groups * tokens. They have first derivatives only, in reverse mode.
    - "tpu": Pallas kernels for TPUs. "triton": for NVIDIA GPUs. On a CPU both are interpreted.
    - "mosaic": kernels for Hopper GPUs. Experimental: compiled, and never yet run on one.

    None chooses by rank (`kernels.dispatch`): "triton" or "tpu" on their devices, else "xla", or "reference" for
    arguments that "xla" refuses.

    Raises:
        ValueError: arguments contradict one another, or the implementation asked for cannot take them.
    """
    if w.dtype not in (x.dtype, jnp.int8):
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}: cast them first.")
    if x.shape[1] != w.shape[2]:
        raise ValueError(f"The rows of x have {x.shape[1]} features, and w, (groups, out, in), takes {w.shape[2]}.")
    if len(group_sizes) != w.shape[0]:
        raise ValueError(f"w has {w.shape[0]} groups: group_sizes must have one size for each, not {len(group_sizes)}.")
    out = dispatch.run("ragged_dot", implementation, x, w, group_sizes.astype(jnp.int32))
    return checkpoint_name(out, SAVED)


def rounded_ragged_dot(
    x: Float[Array, "tokens in"],
    w: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
    dtype: DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """Computes `ragged_dot` of `x` and `w` rounded to int8 or float8_e4m3fn, each row of both with a scale of its own.

    `kernels.quantized_matmul.quantize.quantize` has the formula. The gradients are those of `ragged_dot`, in the dtype
    of `x`: they pass straight through the rounding (arXiv:1308.3432), and are products with the unrounded arrays.

    Raises:
        ValueError: as `ragged_dot` does.
    """
    if w.dtype != x.dtype:
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}: cast them first.")
    return checkpoint_name(_rounded(x, w, group_sizes.astype(jnp.int32), dtype, implementation), SAVED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rounded(x: Array, w: Array, group_sizes: Array, dtype: DTypeLike, implementation: str | None) -> Array:
    rows, matrices = (quantize.quantize(side, dtype, "channel") for side in (x, w))
    sums = dispatch.run("ragged_dot", implementation, rows.values, matrices.values, group_sizes)
    out = sums.astype(rows.scale.dtype) * rows.scale[:, None]
    out *= jnp.repeat(matrices.scale, group_sizes, axis=0, total_repeat_length=len(x))
    in_a_group = jnp.arange(len(x)) < jnp.sum(group_sizes)
    return jnp.where(in_a_group[:, None], out, 0).astype(x.dtype)  # a NaN scale reaches no other rows


def _rounded_forward(
    x: Array, w: Array, group_sizes: Array, dtype: DTypeLike, implementation: str | None
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _rounded(x, w, group_sizes, dtype, implementation), (x, w, group_sizes)


def _rounded_backward(
    _: DTypeLike, implementation: str | None, residuals: tuple[Array, Array, Array], d_out: Array
) -> tuple[Array, Array, None]:
    x, w, group_sizes = residuals
    product = lambda x, w: ragged_dot(x, w, group_sizes, implementation=implementation)
    return *jax.vjp(product, x, w)[1](d_out), None


_rounded.defvjp(_rounded_forward, _rounded_backward)
