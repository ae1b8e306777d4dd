"""What is done to any model from outside, by type and path, so that no family knows of it: specs, int8, LoRA."""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int8, PRNGKeyArray

from zoo.layers import AbstractLinear, Embedding, Linear, RMSNorm


T = TypeVar("T")


def path_name(path: Any) -> str:
    """A key path of jax as `layers.period.0.mlp.up_proj`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def modules(model: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    """Dotted path and module, for every outermost module of a type (or of a tuple of types)."""
    is_kind = lambda m: isinstance(m, kind)
    for path, module in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_kind):
        if is_kind(module):
            yield path_name(path), module


def map_linears(model: T, fn: Callable[..., AbstractLinear], where: str = "*", *, key: PRNGKeyArray | None = None) -> T:
    """`model` with each linear whose path matches `where` replaced by `fn(linear)`, vmapped over the axis of a stack.

    With `key`: by `fn(linear, key)`, with a key of its own for every layer. Patterns are those of `fnmatch`.

    Raises:
        ValueError: if no linear matches.
    """
    get = lambda m: [linear for path, linear in modules(m, AbstractLinear) if fnmatch.fnmatch(path, where)]
    linears, new = get(model), []
    single, vmapped = eqx.filter_jit(fn), eqx.filter_jit(eqx.filter_vmap(fn))
    if not linears:
        paths = [path for path, _ in modules(model, AbstractLinear)]
        raise ValueError(f"No linear matches {where!r}; the model has {', '.join(paths)}.")
    for i, linear in enumerate(linears):
        keys = () if key is None else (jax.random.fold_in(key, i),)
        stacked = len(linear.shape) == 3
        if stacked:
            keys = tuple(jax.random.split(k, linear.shape[0]) for k in keys)
        new.append((vmapped if stacked else single)(linear, *keys))
    return eqx.tree_at(get, model, new)


def partition_specs(model: T, rules: Mapping[str, P]) -> T:
    """`model` with each array replaced by its `PartitionSpec`.

    Rules map a pattern of a module's path to the spec of its matrix, `(out, in)` of a linear; the first match wins. A
    spec speaks of the last axes of its array, so the leading axis of a stack stays whole.

    Raises:
        ValueError: naming a module that no rule matches.
    """

    def place(path: Any, module: Any) -> Any:
        name = path_name(path)
        spec = next((spec for pattern, spec in rules.items() if fnmatch.fnmatch(name, pattern)), None)
        if spec is None:
            raise ValueError(f"No partition rule matches {name!r}; add one to the family's PARTITION_RULES.")
        linear = isinstance(module, AbstractLinear)
        specs = module.partition_specs(spec) if linear else jax.tree.map(lambda _: spec, module)
        return jax.tree.map(lambda array, s: P(*(None,) * (array.ndim - len(s)), *s), module, specs)

    parameters = (AbstractLinear, Embedding, RMSNorm)
    return jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda m: isinstance(m, parameters))


def shardings(model: T, rules: Mapping[str, P], mesh: Mesh) -> T:
    """`model` with each array replaced by its `NamedSharding`. Axes that the mesh does not have do not split.

    Raises:
        ValueError: naming a parameter whose axis is not a multiple of the mesh axis that splits it.
    """

    def place(path: Any, array: Any, spec: P) -> NamedSharding:
        spec = P(*(axis if axis in mesh.shape else None for axis in spec))
        for size, axis in zip(array.shape, spec, strict=True):
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"{path_name(path)} of shape {array.shape} can't be split: {size} is not a multiple of the mesh "
                    f"axis {axis}={mesh.shape[axis]}. Choose a smaller {axis}."
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, model, partition_specs(model, rules))


class Int8Linear(AbstractLinear):
    """A `Linear` whose weight is int8, with one scale for each output: at most half a step of `scale` off."""

    weight: Int8[Array, "out in"]
    scale: Float[Array, " out"]
    bias: Float[Array, " out"] | None

    def __init__(self, linear: Linear):
        largest = jnp.max(jnp.abs(linear.weight.astype(jnp.float32)), axis=-1)
        scale = jnp.where(largest > 0, largest / 127, 1)
        self.weight = jnp.round(linear.weight.astype(jnp.float32) / scale[:, None]).astype(jnp.int8)
        self.scale, self.bias = scale.astype(linear.weight.dtype), linear.bias

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight.astype(x.dtype))
        y = y * jnp.broadcast_to(self.scale.astype(x.dtype), y.shape)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)

    def partition_specs(self, spec: P) -> "Int8Linear":
        placed = eqx.tree_at(lambda m: (m.weight, m.scale), self, (spec, P(*spec[:1])))
        return placed if self.bias is None else eqx.tree_at(lambda m: m.bias, placed, P(*spec[:1]))


class LoRALinear(AbstractLinear):
    """`base`, frozen, plus a trained update of low rank (arXiv:2106.09685): `base(x) + alpha / rank * b(a(x))`.

    `base` is any linear; over an `Int8Linear` this is QLoRA. `b` starts at zero, so nothing changes at first.
    """

    base: AbstractLinear
    a: Float[Array, "rank in"]
    b: Float[Array, "out rank"]
    scale: float = eqx.field(static=True)

    def __init__(self, base: AbstractLinear, key: PRNGKeyArray, *, rank: int, alpha: float):
        out_features, in_features = base.shape
        self.base, self.scale = base, alpha / rank
        self.a = jax.random.normal(key, (rank, in_features)) * in_features**-0.5
        self.b = jnp.zeros((out_features, rank))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        a, b = self.a.astype(x.dtype), self.b.astype(x.dtype)
        return self.base(x) + self.scale * jnp.einsum("...r,or->...o", jnp.einsum("...i,ri->...r", x, a), b)

    def partition_specs(self, spec: P) -> "LoRALinear":
        parts = (self.base.partition_specs(spec), P(None, *spec[1:]), P(*spec[:1], None))
        return eqx.tree_at(lambda m: (m.base, m.a, m.b), self, parts)
