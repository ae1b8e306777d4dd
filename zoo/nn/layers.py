"""The layers that all families are written in: linear maps, embeddings, norms. None has a config or a family's flag."""

import abc
import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels.backends.device import device
from kernels.gated_products import SAVED
from kernels.mesh import split_lookup
from kernels.rms_norms.shared import Scaling
from kernels.stacked import read
from kernels.sums import lookup, scaled, spread
from kernels.tiles import FEW


class AbstractReadInPlace(eqx.Module):
    """A module with arrays that kernels read out of the whole stack of layers."""

    in_place: ClassVar[tuple[str, ...]] = ()
    """The fields that may be a `kernels.stacked.Stacked`, a layer of the stack that is not copied, when decoding."""


class AbstractLinear(AbstractReadInPlace):
    """A linear map of the last axis. Families declare it, and `zoo.surgery` may replace its implementation."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`, with the layers' axis in front if it is in a stack."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]: ...

    @abc.abstractmethod
    def matrix(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        """Returns the matrix in `dtype`, for the few formulas that need more than the product with it."""

    @abc.abstractmethod
    def partition_specs(self, spec: P) -> "AbstractLinear":
        """Replaces each array of this module by its `PartitionSpec`, given the one for `(out, in)`."""


class Linear(AbstractLinear):
    """Computes `x @ weight.T + bias`. The weight is `(out, in)`, as in Hugging Face checkpoints."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None
    in_place: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02, key: PRNGKeyArray
    ):
        self.weight = std * jax.random.truncated_normal(key, -3, 3, (out_features, in_features))
        self.bias = jnp.zeros(out_features) if bias else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return self.biased(kernels.product(x, read(self.weight)))

    def biased(self, y: Float[Array, "*batch out"]) -> Float[Array, "*batch out"]:
        """Adds the bias, if there is one, to the product with the weight."""
        return y if self.bias is None else kernels.apart(y) + spread(self.bias, y.shape)

    def matrix(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        return read(self.weight).astype(dtype)

    def partition_specs(self, spec: P) -> "Linear":
        placed = eqx.tree_at(lambda m: m.weight, self, spec)
        return placed if self.bias is None else eqx.tree_at(lambda m: m.bias, placed, P(*spec[:1]))


def project(x: Float[Array, "*batch in"], *linears: AbstractLinear) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `(linear(x), ...)`. On a GPU one kernel reads all plain matrices for a few rows (`kernels.products`)."""
    plain = [linear for linear in linears if type(linear) is Linear]
    if len(plain) < len(linears):
        return tuple(linear(x) for linear in linears)
    ys = kernels.products(x, *(linear.weight for linear in plain))
    return tuple(linear.biased(y) for linear, y in zip(plain, ys, strict=True))


class AbstractExpertLinear(AbstractReadInPlace):
    """A linear map for each expert of a mixture, for tokens sorted by expert. `zoo.surgery` may replace it."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(experts, out, in)`, with the layers' axis in front if it is in a stack."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "rows in"], group_sizes: Int[Array, " experts"]) -> Float[Array, "rows out"]:
        """The first `group_sizes[0]` rows through the first expert's map, the next ones through the second's, ..."""

    @abc.abstractmethod
    def part(self, axis: str) -> "AbstractExpertLinear":
        """Returns what a device computes in a `shard_map` over `axis`, which splits `in`, where the outputs are added.

        Adds a bias once, on the first device. Arrays are split as `partition_specs` says.
        """

    @abc.abstractmethod
    def partition_specs(self, spec: P) -> "AbstractExpertLinear":
        """Replaces each array of this module by its `PartitionSpec`, given the one for `(experts, out, in)`."""


class ExpertLinear(AbstractExpertLinear):
    """`Linear`, once for each expert."""

    weight: Float[Array, "experts out in"]
    bias: Float[Array, "experts out"] | None
    in_place: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        std: float = 0.02,
        key: PRNGKeyArray,
    ):
        self.weight = std * jax.random.truncated_normal(key, -3, 3, (experts, out_features, in_features))
        self.bias = jnp.zeros((experts, out_features)) if bias else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __call__(self, x: Float[Array, "rows in"], group_sizes: Int[Array, " experts"]) -> Float[Array, "rows out"]:
        return biased(kernels.ragged_dot(x, self.weight, group_sizes), self.bias, group_sizes)

    def part(self, axis: str) -> "ExpertLinear":
        return self if self.bias is None else eqx.tree_at(lambda m: m.bias, self, on_first(self.bias, axis))

    def partition_specs(self, spec: P) -> "ExpertLinear":
        placed = eqx.tree_at(lambda m: m.weight, self, spec)
        return placed if self.bias is None else eqx.tree_at(lambda m: m.bias, placed, P(*spec[:2]))


def biased(
    y: Float[Array, "rows out"], bias: Float[Array, "experts out"] | None, group_sizes: Int[Array, " experts"]
) -> Float[Array, "rows out"]:
    """Adds to each row its expert's bias, if there are any."""
    if bias is None:
        return y
    if len(y) <= FEW:  # comparisons are one kernel on a GPU, and repeating is three
        ends = jnp.cumsum(group_sizes)
        expert = jnp.minimum(jnp.sum(ends[None] <= jnp.arange(len(y))[:, None], axis=1), len(bias) - 1)
    else:
        expert = jnp.repeat(jnp.arange(len(bias)), group_sizes, total_repeat_length=len(y))
    return y + lookup(bias, expert)


def on_first(array: Float[Array, "*shape"], axis: str) -> Float[Array, "*shape"]:
    """Returns the array on the first device along an axis of a `shard_map`, and zeros on the others."""
    return jnp.where(jax.lax.axis_index(axis) == 0, array, 0)


class Conv1d(eqx.Module):
    """The parameters of a causal convolution of each channel by itself, for `kernels.causal_conv`."""

    weight: Float[Array, "channels 1 width"]
    bias: Float[Array, " channels"] | None

    def __init__(self, channels: int, width: int, *, bias: bool = False, key: PRNGKeyArray):
        self.weight = jax.random.uniform(key, (channels, 1, width), minval=-(width**-0.5), maxval=width**-0.5)
        self.bias = jnp.zeros(channels) if bias else None


class Float32(eqx.Module):
    """An array that stays in float32, whatever the model around it is cast to."""

    value: Float[Array, "*shape"]


class Embedding(eqx.Module):
    """A table with a vector for each token. `attend` uses it as the output head, in models that tie the two."""

    weight: Float[Array, "vocab embed"]

    def __init__(self, vocab: int, embed: int, *, std: float = 0.02, key: PRNGKeyArray):
        self.weight = std * jax.random.truncated_normal(key, -3, 3, (vocab, embed))

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        check_tokens(tokens, len(self.weight))
        return split_lookup(self.weight, tokens)

    def attend(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return jnp.einsum("...e,ve->...v", x, self.weight)


def check_tokens(tokens: Any, vocab: int) -> None:
    """Raises ValueError unless these are ids [batch, seq] of a vocabulary of so many tokens.

    Values are not checked within a compiled function, nor where several processes hold them: there JAX replaces an id
    that is out of range by the nearest one.
    """
    if not hasattr(tokens, "shape"):
        raise ValueError(
            f"A model takes an integer array of token ids [batch, seq], not a {type(tokens).__name__}, such as "
            "jnp.array([tokenizer.encode(text)]); zoo.generate takes texts."
        )
    if tokens.ndim != 2:
        hint = "; tokens[None] is a batch of one" if tokens.ndim == 1 else ""
        raise ValueError(f"A model takes token ids [batch, seq]; these have the shape {tokens.shape}{hint}.")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"A model takes integer token ids; these are {tokens.dtype}.")
    if not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True) and tokens.size:
        known = np.asarray(tokens)
        for id in (known.min(), known.max()):
            if not 0 <= id < vocab:
                raise ValueError(
                    f"Token {id} is outside of the model's vocabulary of {vocab}; is the tokenizer the model's?"
                )


recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
"""Makes the backward pass keep a function's arguments alone, and compute what it needs of the rest again.

It is for what is elementwise or a norm, whose steps would be kept one by one, in float32: that costs more time to write
and read than to compute again. Values and gradients stay as they are. In a layers' scan no `prevent_cse` is needed.
"""


# The names, for policies of `jax.checkpoint`, of the results of an MLP's first products; `MLP_UP` if there is no gate.
MLP_GATE, MLP_UP = SAVED


def swiglu(
    x: Float[Array, "*batch in"], gate: Any, up: Any, *sizes: Int[Array, " experts"]
) -> Float[Array, "*batch out"]:
    """Computes silu(gate(x)) * up(x) (arXiv:2002.05202). The maps of experts take the `sizes` of their groups of rows.

    On a GPU one kernel does all of it for a few rows, if the maps are plain (`kernels.gated_products`).
    """
    if _are_plain(gate, up):
        return kernels.gated_products(x, gate.weight, up.weight, _silu_times, *sizes)
    return silu_times(*_products(x, gate, up, *sizes))


def geglu(
    x: Float[Array, "*batch in"], gate: Any, up: Any, *sizes: Int[Array, " experts"]
) -> Float[Array, "*batch out"]:
    """Computes gelu(gate(x)) * up(x) (arXiv:2002.05202), as `swiglu` does, with gelu's approximation by tanh.

    The formula is computed in float32, and rounded once.
    """
    if _are_plain(gate, up):
        return kernels.gated_products(x, gate.weight, up.weight, _gelu_times, *sizes)
    return gelu_times(*_products(x, gate, up, *sizes))


def silu_times(gate: Float[Array, "*batch dim"], up: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes silu(gate) * up: `swiglu` of products that are there, such as the halves of one."""
    return _silu_times(checkpoint_name(gate, MLP_GATE), checkpoint_name(up, MLP_UP))


def gelu_times(gate: Float[Array, "*batch dim"], up: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes gelu(gate) * up: `geglu` of products that are there, such as the halves of one."""
    return _gelu_times(checkpoint_name(kernels.apart(gate), MLP_GATE), checkpoint_name(up, MLP_UP))


def gelu(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes gelu(x) (arXiv:1606.08415), with its approximation by tanh: in float32, and rounded once."""
    return _gelu(_stored_gradient(checkpoint_name(x, MLP_UP)), True)


def erf_gelu(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes gelu(x) (arXiv:1606.08415) itself, without an approximation: in float32, and rounded once."""
    return _gelu(_stored_gradient(checkpoint_name(x, MLP_UP)), False)


@jax.custom_vjp
def _stored_gradient(x: Array) -> Array:
    """Returns `x`. On a GPU the backward pass writes its gradient before anything is made of it.

    A bias's gradient is the sum of it over all tokens. XLA would compute GELU's derivative within that sum, and for
    that write and read the tanh, and read the inputs once more than for the products.
    """
    return x


_stored_gradient.defvjp(
    lambda x: (x, None),
    lambda _, d_x: (jax.lax.optimization_barrier(d_x) if device().platform == "gpu" else d_x,),
)


# The names are outside of what is computed again, so that a policy may keep the named arrays.
@recomputed
def _silu_times(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


@recomputed
def _gelu_times(gate: Array, up: Array) -> Array:
    exact = lambda a: a.astype(jnp.float32)
    return (jax.nn.gelu(exact(gate), approximate=True) * exact(up)).astype(gate.dtype)


def _are_plain(*maps: Any) -> bool:
    return all(type(each) in (Linear, ExpertLinear) and each.bias is None for each in maps)


def _products(x: Array, gate: Any, up: Any, *sizes: Array) -> Any:
    return (gate(x, *sizes), up(x, *sizes)) if sizes else project(x, gate, up)


@functools.partial(recomputed, static_argnums=1)
def _gelu(x: Array, approximate: bool) -> Array:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


class LayerNorm(eqx.Module):
    """Layer norm (arXiv:1607.06450) as in PyTorch: computed in float32, and rounded once, at the end."""

    weight: Float[Array, " dim"]
    bias: Float[Array, " dim"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, eps: float):
        self.weight, self.bias, self.eps = jnp.ones(dim), jnp.zeros(dim), eps

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        return _layer_norm(self.eps, x, self.weight, self.bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(eps: float, x: Array, weight: Array, bias: Array) -> Array:
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    weight, bias = (jnp.broadcast_to(array.astype(jnp.float32), x.shape) for array in (weight, bias))
    return (y * weight + bias).astype(x.dtype)


def _layer_norm_backward(eps: float, residuals: tuple[Array, Array, Array], d_out: Array) -> tuple[Array, Array, Array]:
    """Computes the gradients from the inputs as they are.

    The means and deviations, two numbers of a row, are computed first and kept apart. Otherwise XLA computes them once
    more where it multiplies the rows by `d_out`, and writes these products in float32, to sum them over all rows.
    """
    x, weight, bias = residuals
    y, d = x.astype(jnp.float32), d_out.astype(jnp.float32)
    of_row = lambda y: jnp.mean(y, axis=-1, keepdims=True)
    mean = of_row(y)
    mean, inverse = jax.lax.optimization_barrier((mean, jax.lax.rsqrt(of_row(jnp.square(y - mean)) + eps)))
    normed = (y - mean) * inverse
    over_rows = lambda products: jnp.sum(products, axis=tuple(range(x.ndim - 1)))
    d_normed = d * jnp.broadcast_to(weight.astype(jnp.float32), d.shape)
    d_x = inverse * (d_normed - of_row(d_normed) - normed * of_row(d_normed * normed))
    return d_x.astype(x.dtype), over_rows(d * normed).astype(weight.dtype), over_rows(d).astype(bias.dtype)


_layer_norm.defvjp(
    lambda eps, x, weight, bias: (_layer_norm(eps, x, weight, bias), (x, weight, bias)), _layer_norm_backward
)


class RMSNorm(AbstractReadInPlace):
    """Root mean square norm (arXiv:1910.07467) as in Llama: computed in float32, cast back, then scaled."""

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    in_place: ClassVar[tuple[str, ...]] = ("weight",)
    scaling: ClassVar[Scaling] = "rounded"

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = jnp.ones(dim), eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return scaled(y.astype(x.dtype), read(self.weight))


class Float32RMSNorm(AbstractReadInPlace):
    """Root mean square norm (arXiv:1910.07467) that multiplies by its weight in float32 too, and rounds after that."""

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    in_place: ClassVar[tuple[str, ...]] = ("weight",)
    scaling: ClassVar[Scaling] = "float32"

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = jnp.ones(dim), eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * jnp.broadcast_to(read(self.weight).astype(jnp.float32), x.shape)).astype(x.dtype)


class OffsetRMSNorm(AbstractReadInPlace):
    """Root mean square norm (arXiv:1910.07467) as in Gemma: scaled by 1 + weight, in float32 to the end."""

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    in_place: ClassVar[tuple[str, ...]] = ("weight",)
    scaling: ClassVar[Scaling] = "offset"

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = jnp.zeros(dim), eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * jnp.broadcast_to(1 + read(self.weight).astype(jnp.float32), x.shape)).astype(x.dtype)


class GatedRMSNorm(eqx.Module):
    """Root mean square norm (arXiv:1910.07467) times silu(gate), as after a gated delta rule (arXiv:2412.06464).

    Computed in float32; only what the norm itself gives is rounded to the dtype of x, as in transformers.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = jnp.ones(dim), eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch dim"], gate: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y.astype(x.dtype).astype(jnp.float32) * jnp.broadcast_to(self.weight.astype(jnp.float32), x.shape)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def times(x: Float[Array, "*batch dim"], factor: float) -> Float[Array, "*batch dim"]:
    """Multiplies by a number that is not rounded to the dtype of x, as PyTorch does."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def rms_normalized(x: Float[Array, "*batch dim"], eps: float) -> Float[Array, "*batch dim"]:
    """Divides each vector by its root mean square (arXiv:1910.07467), as the norms above do but without a weight.

    Computed in float32 and cast back.
    """

    @recomputed
    def normalized(x: Array) -> Array:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)).astype(x.dtype)

    return normalized(x)


@recomputed
def l2_normalized(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Divides each vector by its length, `sqrt(sum(x**2) + 1e-6)`, as queries and keys of a delta rule are
    (arXiv:2412.06464). Computed in float32 and cast back, as in flash-linear-attention."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
