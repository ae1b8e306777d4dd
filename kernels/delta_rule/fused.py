"""Parts of the fused kernels of the gated delta rule, `triton_fused` and `triton_channels`: limits and launches."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.backends.triton import exp2, launch
from kernels.delta_rule.shared import CHUNK


WIDEST, V_WIDEST = 128, 256  # features of a key and of a value
SHARED = 227  # kilobytes of shared memory that its blocks fit in
LOG2_E = math.log2(math.e)
STRONGEST = -100.0  # a decay of a stronger logarithm is 0 in float32, also as the sum of others
RESTART = -150.0  # its power is 0 in float32, without denormal numbers


def unfit(q: Array, k: Array, v: Array) -> str | None:
    """Returns why kernels for bfloat16 cannot take these vectors on this device, or None if they can."""
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        dtypes = sorted({x.dtype.name for x in (q, k, v)})
        return f"it is for bfloat16, and q, k and v are {' and '.join(dtypes)}"
    if k.shape[3] > WIDEST or v.shape[3] > V_WIDEST:
        return (
            f"its keys have at most {WIDEST} features and its values {V_WIDEST}, and these have {k.shape[3]} and "
            f"{v.shape[3]}"
        )
    if not k.size or not v.size:
        return "it needs a token, a head and a feature at least"
    reason, here = elsewhere("gpu", (9, 0)), device()
    if reason is None and here.platform == "gpu" and here.shared < SHARED:
        return f"it needs {SHARED} KB of shared memory, and this {here.kind} has {here.shared}"
    return reason


def array(like: Array, *shape: int) -> jax.ShapeDtypeStruct:
    """Describes an array of the dtype of `like`, and of its shape unless another is given."""
    return jax.ShapeDtypeStruct(shape or like.shape, like.dtype)


def sizes(module: str, kernel: str, k: Array, v: Array) -> dict[str, int]:
    """Returns the sizes of a kernel's blocks: the features of keys, "dim", or of values, "v", at a time."""
    size = blocks.sizes(module, kernel, k.dtype, f"d{max(k.shape[3], v.shape[3])}")
    return size | {side: min(size[side], x.shape[3]) for side, x in {"dim": k, "v": v}.items() if side in size}


def run(
    module: str,
    name: str,
    products: Callable[[str, int, int], int],
    scale: float,
    k: Array,
    v: Array,
    kernel: str,
    body: Callable[..., None],
    operands: Sequence[Array | None],
    results: Any,
) -> Any:
    """Runs a kernel for each row and head, and for each chunk, each block of features, or both.

    `module` has the table of its blocks, `name` comes before its own, and `products(kernel, dim, v_dim)` is the number
    of products of a token and head.
    """
    (batch, seq, kv_heads, dim), (*_, heads, v_dim), size = k.shape, v.shape, sizes(module, kernel, k, v)
    by_chunk = (seq // CHUNK, heads, batch)
    grids = {
        "forward": (v_dim // size.get("v", 1), heads, batch),
        "backward": (v_dim // size.get("v", 1), heads, batch),
        "keys": (dim // size.get("dim", 1), seq // CHUNK, batch * kv_heads),
    }
    return launch(
        functools.partial(body, scale, size),
        *operands,
        name=f"delta_rule_{name}_{kernel}",
        grid=grids.get(kernel, by_chunk),
        results=results,
        warps=size["warps"],
        stages=size["stages"],
        cost=pl.CostEstimate(
            flops=2 * batch * seq * heads * products(kernel, dim, v_dim),
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((operands, results))),
        ),
    )


def rows_of(chunk: Array) -> Any:
    """Returns the tokens of a chunk."""
    return pl.ds(chunk * CHUNK, CHUNK)


def power(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes 2^x of a decay's logarithm."""
    return exp2(x, 1.0, less=jnp.zeros_like(x))


def product(
    x: Float[Array, "..."], y: Float[Array, "..."], over: tuple[int, int] = (1, 0)
) -> Float[Array, "rows columns"]:
    """Multiplies in TF32, summing over these axes."""
    precision = lax.Precision.HIGHEST if device().platform == "cpu" else lax.DotAlgorithmPreset.TF32_TF32_F32
    axes = ((over[0],), (over[1],)), ((), ())
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
