"""Low-rank adapters (LoRA, arXiv:2106.09685): add them to any model, split them from it, and merge them.

    model = lora.add(model, rank=16, alpha=32, key=key)  # over a quantised model this is QLoRA (arXiv:2305.14314)
    adapters, frozen = lora.split(model)                 # the parameters to train (a head's, too), and all others
    model = lora.merge(model)                            # the updates added to the weights

`zoo.peft` reads and writes adapters.
"""

import fnmatch
import functools
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from zoo.nn.heads import AbstractHead
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, ExpertLinear, Linear
from zoo.surgery import map_linears, modules, path_name


T = TypeVar("T")
LAYERS = "layers.*"  # every linear map of the layers, but not the output head


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def low_rank(
    x: Float[Array, "*batch in"], a: Float[Array, "rank in"], b: Float[Array, "out rank"], scale: float
) -> Float[Array, "*batch out"]:
    """Computes `scale * b(a(x))`, so that only arrays of width `rank` are scaled, and transposed.

    The gradients are JAX's, except for the order of operands in two products: XLA for CPUs transposes the left operand
    of a sum over tokens, which in JAX's order is the wide one.
    """
    return _low_rank_forward(x, a, b, scale)[0]


def _low_rank_forward(x: Array, a: Array, b: Array, scale: float) -> tuple[Array, tuple[Array, ...]]:
    low = scale * jnp.einsum("...i,ri->...r", x, a)
    return jnp.einsum("...r,or->...o", low, b), (x, a, b, low)


def _low_rank_backward(scale: float, residuals: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    x, a, b, low = residuals
    d_low = scale * jnp.einsum("...o,or->...r", gradient, b)
    tokens = tuple(range(x.ndim - 1))
    over_tokens = lambda narrow, wide: jnp.tensordot(narrow, wide, (tokens, tokens))
    return jnp.einsum("...r,ri->...i", d_low, a), over_tokens(d_low, x), over_tokens(low, gradient).T


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


class LoRALinear(AbstractLinear):
    """`base`, frozen, plus a trained update of low rank: `base(x) + alpha / rank * b(a(x))`."""

    base: AbstractLinear
    a: Float[Array, "rank in"]
    b: Float[Array, "out rank"]
    scale: float = eqx.field(static=True)

    @classmethod
    def new(cls, base: AbstractLinear, key: PRNGKeyArray, *, rank: int, alpha: float) -> "LoRALinear":
        """Makes `b` zero, so that nothing changes at first, and `a` random with PEFT's deviation of 1 / sqrt(3 in)."""
        out_features, in_features = base.shape
        a = in_features**-0.5 * jax.random.uniform(key, (rank, in_features), minval=-1, maxval=1)
        return cls(base, a, jnp.zeros((out_features, rank)), alpha / rank)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        a, b = self.a.astype(x.dtype), self.b.astype(x.dtype)
        return self.base(x) + low_rank(x, a, b, self.scale)

    def matrix(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        base = self.base.matrix(dtype)
        return base + self.scale * (self.b @ self.a).astype(base.dtype)

    def partition_specs(self, spec: P) -> "LoRALinear":
        parts = (self.base.partition_specs(spec), P(None, *spec[1:]), P(*spec[:1], None))
        return eqx.tree_at(lambda m: (m.base, m.a, m.b), self, parts)


class LoRAExpertLinear(AbstractExpertLinear):
    """A `LoRALinear` for each expert."""

    base: AbstractExpertLinear
    a: Float[Array, "experts rank in"]
    b: Float[Array, "experts out rank"]
    scale: float = eqx.field(static=True)

    @classmethod
    def new(cls, base: AbstractExpertLinear, key: PRNGKeyArray, *, rank: int, alpha: float) -> "LoRAExpertLinear":
        """Makes `a` and `b` as `LoRALinear.new` does."""
        experts, out_features, in_features = base.shape
        a = in_features**-0.5 * jax.random.uniform(key, (experts, rank, in_features), minval=-1, maxval=1)
        return cls(base, a, jnp.zeros((experts, out_features, rank)), alpha / rank)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __call__(self, x: Float[Array, "rows in"], group_sizes: Int[Array, " experts"]) -> Float[Array, "rows out"]:
        low = self.scale * kernels.ragged_dot(x, self.a.astype(x.dtype), group_sizes)
        return self.base(x, group_sizes) + kernels.ragged_dot(low, self.b.astype(x.dtype), group_sizes)

    def part(self, axis: str) -> "LoRAExpertLinear":
        return eqx.tree_at(lambda m: m.base, self, self.base.part(axis))

    def partition_specs(self, spec: P) -> "LoRAExpertLinear":
        experts, out, in_ = spec
        parts = (self.base.partition_specs(spec), P(experts, None, in_), P(experts, out, None))
        return eqx.tree_at(lambda m: (m.base, m.a, m.b), self, parts)


ADAPTERS = (LoRALinear, LoRAExpertLinear)


def add(model: T, *, rank: int, alpha: float, where: str = LAYERS, key: PRNGKeyArray) -> T:
    """Puts an adapter over each linear map whose path matches `where`, including experts'.

    Raises:
        ValueError: if none matches, or the rank is not positive.
    """
    if rank < 1:
        raise ValueError(f"An adapter has a rank of at least 1, not {rank}.")
    found = False
    for kind, adapter in ((AbstractLinear, LoRALinear), (AbstractExpertLinear, LoRAExpertLinear)):
        if any(fnmatch.fnmatch(path, where) for path, _ in modules(model, kind)):
            found, make = True, functools.partial(adapter.new, rank=rank, alpha=alpha)
            model = map_linears(model, make, where, kind=kind, key=key)
    if not found:
        paths = ", ".join(path for path, _ in modules(model, (AbstractLinear, AbstractExpertLinear)))
        raise ValueError(f"No linear map matches {where!r}; the model has {paths}.")
    return model


def split(model: T) -> tuple[T, T | None]:
    """Splits a model into the arrays of adapters and of its head, and all others.

    Each result has None in place of the other's. Without adapters the results are the model and None.
    """
    if not any(modules(model, ADAPTERS)):
        return model, None
    parts = (*ADAPTERS, AbstractHead)

    def is_trained(module: Any) -> Any:
        none = jax.tree.map(lambda _: isinstance(module, AbstractHead), module)
        return eqx.tree_at(lambda m: (m.a, m.b), none, (True, True)) if isinstance(module, ADAPTERS) else none

    return eqx.partition(model, jax.tree.map(is_trained, model, is_leaf=lambda m: isinstance(m, parts)))


def combine(model: T, frozen: T | None) -> T:
    """Inverts `split`: returns the whole model."""
    return model if frozen is None else eqx.combine(model, frozen)


def bare(model: T) -> T:
    """Removes the adapters. The arrays of the result are the model's own, not copies."""
    strip = lambda m: m.base if isinstance(m, ADAPTERS) else m
    return jax.tree.map(strip, model, is_leaf=lambda m: isinstance(m, ADAPTERS))


def merge(model: T) -> T:
    """Adds each adapter's update to the weight under it, in float32 rounded once, and removes the adapter.

    Raises:
        ValueError: if an adapter lies over quantised weights, which could not hold the sum.
    """

    def plain(path: Any, module: Any) -> Any:
        if not isinstance(module, ADAPTERS):
            return module
        if not isinstance(module.base, Linear | ExpertLinear):
            raise ValueError(
                f"{path_name(path)} is a {type(module.base).__name__}, whose weights are quantised; load the model "
                "without quantize= to merge the adapter."
            )
        weight = module.base.weight
        update = jnp.einsum("...or,...ri->...oi", module.b.astype(jnp.float32), module.a.astype(jnp.float32))
        return eqx.tree_at(
            lambda m: m.weight, module.base, (weight.astype(jnp.float32) + module.scale * update).astype(weight.dtype)
        )

    return jax.tree_util.tree_map_with_path(plain, model, is_leaf=lambda m: isinstance(m, ADAPTERS))
