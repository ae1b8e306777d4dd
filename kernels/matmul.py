"""Products with a matrix in int8 or float8: the two operations, and what all their implementations share.

An implementation brings two products: float rows times a quantised matrix, and both sides quantised. This module
decides what is quantised when, and has the derivatives. Rounding has no useful derivative, so gradients pass straight
through it (the straight-through estimator, arXiv:1308.3432).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int8, Shaped

from kernels import dispatch
from kernels.quantize import BLOCK, LARGEST, Quantized, dequantize, exact_dtype, largest_magnitudes, quantize
from kernels.stacked import Stacked, read


Granularity = Literal["tensor", "channel", "block"]
Gradients = Literal["float", "quantized"]
Matrix = Shaped[Array, "out in"] | Stacked
SAVED = "matmul"  # names the results for policies of jax.checkpoint
INT32_TERMS = 1 << 17  # the sum of this many products of two int8 fits an int32
DECODE_ROWS = 64  # up to so many rows, reading the matrix takes most of the time


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
    """Multiplies `x` by the transpose of `w`, where `w` is int8, and with `activations` `x` is, too.

    `w` may be int8 already, with its `scale`: () if all of it shares one, (out,) if each row has its own, or
    (ceil(out / 128), ceil(in / 128)) for blocks of 128 x 128, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). Then
    neither it nor the scale has a gradient, and the shape of the scale decides, not `granularity`. It may be a layer of
    a stack, which is not copied (`kernels.stacked`). Or `w` is a float array of the dtype of `x`: then it is quantised
    here, with a scale for the whole "tensor", for each "channel" (row) or for each "block".

    `activations` quantises `x` as well, at each call: with one scale ("tensor"), one for each row ("channel"), or one
    for each 128 features of a row ("block"). `kernels.quantize.quantize` says how: values are rounded to the nearest of
    -127...127 times the scale. A group with a value that is not finite becomes NaN, and so does every output computed
    from it.

    Products of two int8 sum up exactly in int32 and are then scaled, in float32; all others accumulate in float32. The
    output is rounded to the dtype of `x` at the end.

    Gradients pass straight through the rounding (arXiv:1308.3432). With w' for the dequantised `w`, the gradient of `x`
    is `d_out @ w'`, and that of a float `w` is `d_out.T @ x`. "float" computes these, in the dtype of `x`. "quantized"
    computes both as products of two int8: `d_out` (transposed for the gradient of `w`) is quantised like
    `activations`, and the transpose of `w` or `x` like `w`. There are first derivatives only, in reverse mode.

    `implementation` is one of

    - "reference": multiplies dequantised values in float32, or in float64 if `x` is.
    - "xla": plain JAX, with the int8 products of cuBLASLt and of TPUs. Products of two int8 by blocks are a loop.
    - "tpu": Pallas kernels for TPUs. "triton": for NVIDIA GPUs; it multiplies two int8 only by blocks. On a CPU both
      are interpreted.

    None chooses "triton" or "tpu" on their devices for blocks, and for up to 64 rows where `x` stays float; else "xla",
    and "reference" for what that refuses.

    Raises:
        ValueError: where arguments contradict one another, or the implementation asked for cannot take them.
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
    range. Both gradients are products of whole tensors with one scale each, whether or not the output's are by channel:
    rows and columns of a tensor then share a scale, and one pass writes it in 8 bits both as it is and transposed. But
    where scales are by blocks, the gradients' are too, and `d_out` is float8_e4m3fn like all else, as in DeepSeek-V3.
    """
    return _matmul(jnp.float8_e4m3fn, x, w, scale, granularity, activations, gradients, implementation)


class Formula(NamedTuple):
    """The arguments that are not arrays."""

    dtype: DTypeLike  # int8 or float8_e4m3fn
    granularity: Granularity
    activations: bool
    gradients: Gradients

    @property
    def of_rows(self) -> Literal["tensor", "channel", "piece"]:
        """Which values of a row share a scale."""
        return "piece" if self.granularity == "block" else self.granularity

    @property
    def gradients_by_tensor(self) -> bool:
        """Whether the backward pass has a scale for each whole tensor."""
        return self.dtype == jnp.float8_e4m3fn and self.granularity != "block"

    @property
    def gradient_dtype(self) -> DTypeLike:
        return jnp.float8_e5m2 if self.gradients_by_tensor else self.dtype


class Kernels(NamedTuple):
    """The two products of an implementation. Both sum over the last axes and return the dtype asked for.

    `weight_only(x, w, dtype)` multiplies float rows (*batch, in) by a `Quantized` matrix (out, in), whose values may be
    `Stacked`.
    `both(x, w, dtype)` multiplies two `Quantized`, whose scales have one granularity; where the matrix has it by
    blocks, the rows have it by pieces.
    """

    weight_only: Callable[[Array, Quantized, DTypeLike], Array]
    both: Callable[[Quantized, Quantized, DTypeLike], Array]


class Residuals(NamedTuple):
    """What the backward pass is given. It quantises both sides anew, as they are or transposed.

    The largest magnitudes of their groups are named, so that policies of `jax.checkpoint` keep them: they take few
    bytes, and to find them again both sides would have to be read once more.
    """

    x: Array
    w: Matrix
    scale: Array | None
    largest_x: Array | None  # None: float rows
    largest_w: Array | None  # None: `w` is quantised already


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_matmul(
    kernels: Kernels, formula: Formula, x: Array, w: Matrix, scale: Array | None
) -> Float[Array, "*batch out"]:
    """Computes `int8_matmul` or `fp8_matmul` by these kernels."""
    return _forward(kernels, formula, x, w, scale)[0]


def _forward(kernels: Kernels, formula: Formula, x: Array, w: Matrix, scale: Array | None) -> tuple[Array, Residuals]:
    largest = lambda side, granularity: checkpoint_name(largest_magnitudes(side, granularity), SAVED)
    largest_w = None if scale is not None else largest(read(w), formula.granularity)
    if not formula.activations:
        out = kernels.weight_only(x, _matrix(formula, w, scale, largest_w), x.dtype)
        return out, Residuals(x, w, scale, None, largest_w)
    largest_x = largest(x, formula.of_rows)
    rows = quantize(x, formula.dtype, formula.of_rows, largest_x)
    out = kernels.both(rows, _matrix(formula, read(w), scale, largest_w), x.dtype)
    return out, Residuals(x, w, scale, largest_x, largest_w)


def _backward(
    kernels: Kernels, formula: Formula, residuals: Residuals, d_out: Array
) -> tuple[Array, Array | None, None]:
    x, w, scale, largest_x, largest_w = residuals
    w = read(w)
    matrix = _matrix(formula, w, scale, largest_w)
    rows = lambda side: side.reshape(-1, side.shape[-1])
    exact = exact_dtype(x)

    if formula.gradients == "float":
        meant = dequantize(matrix).astype(x.dtype)
        dx = jnp.einsum("...o,oi->...i", d_out, meant, preferred_element_type=exact).astype(x.dtype)
        if scale is not None:
            return dx, None, None
        dw = jnp.einsum("to,ti->oi", rows(d_out), rows(x), preferred_element_type=exact)
        return dx, dw.astype(w.dtype), None

    of_rows, of_matrices = formula.of_rows, formula.granularity
    largest_d_out = None
    if formula.gradients_by_tensor:
        of_rows = of_matrices = "tensor"
        whole = lambda largest: None if largest is None else largest_magnitudes(largest, "tensor")
        largest_x, largest_w, largest_d_out = whole(largest_x), whole(largest_w), whole(d_out)
    else:
        largest_x = largest_w = None  # the groups of a transpose are others
    if formula.granularity == "channel":
        transposed = quantize((w if scale is None else dequantize(matrix)).T, formula.dtype, of_matrices, largest_w)
    else:
        transposed = Quantized(matrix.values.T, matrix.scale.T)
    dx = kernels.both(quantize(d_out, formula.gradient_dtype, of_rows, largest_d_out), transposed, x.dtype)
    if scale is not None:
        return dx, None, None
    d_out_rows = quantize(rows(d_out).T, formula.gradient_dtype, of_rows, largest_d_out)
    return dx, kernels.both(d_out_rows, quantize(rows(x).T, formula.dtype, of_matrices, largest_x), w.dtype), None


quantized_matmul.defvjp(_forward, _backward)


def refusal(x: Float[Array, "*batch in"], w: Matrix) -> str | None:
    """Returns why no implementation but the reference can take these arguments, or None."""
    if x.dtype == jnp.float64:
        return "it computes in float32, and x is float64"
    return None if x.size and w.size else "it needs a row, a feature and an output at least"


def _matrix(formula: Formula, w: Matrix, scale: Array | None, largest: Array | None) -> Quantized:
    if scale is None:
        return quantize(read(w), formula.dtype, formula.granularity, largest)
    values: Any = w
    return Quantized(values, scale)


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
    out = dispatch.run(
        "quantized_matmul", implementation, x, w, scale, first=None if granularity == "block" or few_rows else "xla",
        formula=Formula(dtype, granularity, activations, gradients),
    )  # fmt: skip
    return checkpoint_name(out, SAVED)  # policies of jax.checkpoint do not see products inside of kernels
