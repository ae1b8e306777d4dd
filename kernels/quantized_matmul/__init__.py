"""Products with a matrix in int8 or float8, and their gradients: the signatures and their meaning."""

from typing import get_args

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int8

from kernels import dispatch
from kernels.backends.device import device
from kernels.quantized_matmul.quantize import BLOCK, LARGEST, MX, exact_dtype
from kernels.quantized_matmul.shared import SAVED, Formula, Gradients, Granularity, Matrix
from kernels.stacked import Stacked


HOPPER = 9  # the major compute capability of GPUs on which "triton" multiplies 8 bits by their fastest instructions
DECODE_ROWS = 64  # up to this number of rows, reading the matrix takes most of the time


def int8_matmul(
    x: Float[Array, "*batch in"],
    w: Float[Array, "out in"] | Int8[Array, "out in"] | Stacked,
    scale: Float[Array, "..."] | None = None,
    *,
    granularity: Granularity = "channel",
    activations: bool = False,
    gradients: Gradients = "float",
    implementation: str | None = None,
) -> Float[Array, "*batch out"]:
    """Multiplies `x` by the transpose of `w`, with `w` in int8, and with `activations` also `x` in int8.

    `w` may be int8 already, with its `scale`: () if all of `w` shares one, (out,) if each row has its own, or
    (ceil(out / 128), ceil(in / 128)) for blocks of 128 x 128, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). Then
    neither `w` nor the scale has a gradient, and `granularity` is ignored in favour of the scale's shape. Such a `w`
    may be a layer of a stack, which is not copied (`kernels.stacked`). Or `w` is a float array of the dtype of `x`:
    then it is quantised here, with a scale for the whole "tensor", for each "channel" (row) or for each "block"; in
    float8 also for 32 neighbours ("mx").

    `activations` quantises `x` as well, at each call: with one scale ("tensor"), one for each row ("channel"), or one
    for each 128 features of a row ("block"). `kernels.quantized_matmul.quantize.quantize` has the formula: values are
    rounded to the nearest of -127...127 times the scale. A group with a value that is not finite becomes NaN, and so
    does every output computed from it.

    Products of two int8 sum up exactly in int32 and are then scaled, in float32; all others accumulate in float32. The
    output is rounded to the dtype of `x` at the end.

    Gradients pass straight through the rounding (arXiv:1308.3432). With w' for the dequantised `w`, the gradient of `x`
    is `d_out @ w'`, and that of a float `w` is `d_out.T @ x`. "float" computes these, in the dtype of `x`. "quantized"
    computes both as products of two int8: `d_out` (transposed for the gradient of `w`) is quantised like
    `activations`, and the transpose of `w` or `x` like `w`. There are first derivatives only, in reverse mode.

    `implementation` is one of

    - "reference": multiplies dequantised values in float32, or in float64 if `x` is.
    - "xla": plain JAX, with the int8 products of cuBLASLt and of TPUs. Products of two int8 by blocks are a loop.
    - "tpu": Pallas kernels for TPUs. "triton": for NVIDIA GPUs; it does not multiply two float8 by tensor. On a CPU
      both are interpreted.

    None chooses "triton" or "tpu" on their devices for blocks, and for up to 64 rows if `x` stays float. It chooses
    "triton" on Hopper also for two int8, and for two float8 by channel: "xla" writes their sums, and reads them again
    to scale them. Else it chooses "xla", or "reference" for arguments that "xla" refuses.

    Raises:
        ValueError: arguments contradict one another, or the implementation asked for cannot take them.
    """
    return _matmul(jnp.int8, x, w, scale, granularity, activations, gradients, implementation)


def fp8_matmul(
    x: Float[Array, "*batch in"],
    w: Float[Array, "out in"] | Float8e4m3fn[Array, "out in"] | Stacked,
    scale: Float[Array, "..."] | None = None,
    *,
    granularity: Granularity = "channel",
    activations: bool = False,
    gradients: Gradients = "float",
    implementation: str | None = None,
) -> Float[Array, "*batch out"]:
    """Multiplies like `int8_matmul`, in float8_e4m3fn (arXiv:2209.05433): a `w` of that dtype is quantised already.

    Values are rounded to the nearest float8, whose largest is 448, times the scale; all products accumulate in float32.
    With "quantized" gradients `d_out` becomes float8_e5m2 (largest 57,344), which trades a bit of precision for a wider
    range. Both gradients are products of whole tensors with one scale each, even if the output's scales are by channel.
    Then rows and columns of a tensor share a scale, and one pass writes the tensor in 8 bits, both as it is and
    transposed. But if scales are by blocks, the gradients' are, too, and `d_out` is float8_e4m3fn like all else, as in
    DeepSeek-V3.

    `granularity` "mx" is MXFP8 (Open Compute Project, Microscaling Formats, version 1.0): 32 neighbours along the sum
    share a scale, a power of two. Both sides of `w` must be multiples of 32. All values are float8_e4m3fn, and
    "quantized" gradients quantise transposes anew. A `w` that is quantised already cannot have such scales. "xla"
    multiplies by `jax.nn.scaled_matmul` for Blackwell, and dequantised values for others.
    """
    return _matmul(jnp.float8_e4m3fn, x, w, scale, granularity, activations, gradients, implementation)


def _matmul(
    dtype: DTypeLike,
    x: Array,
    w: Matrix,
    scale: Array | None,
    granularity: Granularity,
    activations: bool,
    gradients: Gradients,
    implementation: str | None,
) -> Array:
    for name, value, choices in (("granularity", granularity, Granularity), ("gradients", gradients, Gradients)):
        if value not in get_args(choices):
            raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, get_args(choices)))}.")
    if granularity == "mx" and dtype != jnp.float8_e4m3fn:
        raise ValueError("granularity='mx' is MXFP8's: take fp8_matmul.")
    if granularity == "mx" and any(width % MX for width in w.shape):
        raise ValueError(f"granularity='mx' takes a w with sides in multiples of {MX}, not {w.shape}: take 'channel'.")
    if x.dtype in LARGEST:
        raise ValueError(f"x is {x.dtype}, and its products would be too: give it in bfloat16 or wider.")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"The rows of x have {x.shape[-1]} features, and w, (out, in), takes {w.shape[1]}.")
    if w.dtype == dtype:
        shapes: dict[tuple[int, ...], Granularity] = {(): "tensor", w.shape[:1]: "channel"}
        shapes[-(-w.shape[0] // BLOCK), -(-w.shape[1] // BLOCK)] = "block"
        if scale is None:
            raise ValueError(f"w is {w.dtype} already, so its scale must be given.")
        if scale.shape not in shapes:
            known = ", ".join(map(str, shapes))
            raise ValueError(f"A w of shape {w.shape} has a scale of one of the shapes {known}, not {scale.shape}.")
        granularity = shapes[scale.shape]
        scale = scale.astype(exact_dtype(x))
    elif scale is not None:
        raise ValueError(f"w is {w.dtype}, so its scale is found here: leave it out, or give w in {jnp.dtype(dtype)}.")
    elif w.dtype != x.dtype:
        raise ValueError(f"x and a w that is not quantised must have one dtype, not {x.dtype} and {w.dtype}.")
    few_rows = not activations and x.size <= DECODE_ROWS * x.shape[-1]
    scaled_at_once = activations and (device().capability or (0, 0))[0] == HOPPER
    by_rank = granularity == "block" or few_rows or scaled_at_once
    out = dispatch.run(
        "quantized_matmul", implementation, x, w, scale, first=None if by_rank else "xla",
        formula=Formula(dtype, granularity, activations, gradients),
    )  # fmt: skip
    return checkpoint_name(out, SAVED)  # policies of jax.checkpoint do not see products inside kernels
