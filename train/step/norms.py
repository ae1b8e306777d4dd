"""Norms of each layer: of its output features, and of its gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import Tokens
from train.step.microbatches import per, split
from train.step.step import Batch, Recipe
from zoo.lora import combine
from zoo.nn.block import AbstractBlock, AbstractSharingBlock, Report, Shared, run_block
from zoo.nn.cache import AbstractCache
from zoo.nn.stack import Stack
from zoo.surgery import cast, modules, path_name, with_remat


class Size(eqx.Module):
    """A layer's report: the root mean square of its output features, over the tokens that are not padding."""

    value: Float[Array, "*layers"]
    names: tuple[str, ...] = eqx.field(static=True)  # names of the layers


class Sized(AbstractSharingBlock):
    """A layer that reports the `Size` of its output features, instead of its own report."""

    block: AbstractBlock
    names: tuple[str, ...] = eqx.field(static=True)

    def run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
        own: Float[Array, "batch seq dim"] | None,
        shared: Shared,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
        x, cache, _, left = run_block(self.block, x, cache, at, own, shared)
        real = jnp.ones(x.shape[:2]) if at.segments is None else (at.segments != 0).astype(jnp.float32)
        squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)
        mean = jnp.sum(squares * real) / jnp.maximum(jnp.sum(real), 1)
        return x, cache, Size(jnp.sqrt(mean), self.names), left


def sized(model: Any) -> Any:
    """Returns the model with layers that report the `Size` of their output features."""
    names = {
        id(block): tuple(f"{path}.{n:02d}" for n in numbers)
        for path, stack in modules(model, Stack)
        for numbers, block in stack.blocks()
    }
    in_stack = lambda m: id(m) in names
    return jax.tree.map(lambda m: Sized(m, names[id(m)]) if in_stack(m) else m, model, is_leaf=in_stack)


def gradient_norms(gradients: Any) -> dict[str, Float[Array, ""]]:
    """Computes the norm of the gradients of each layer, and of each other part of the model, such as embed_tokens."""
    squares = lambda a, axes=None: jnp.sum(jnp.square(a.astype(jnp.float32)), axis=axes)
    found, in_stacks = {}, set()
    for path, stack in modules(gradients, Stack):
        for numbers, block in stack.blocks():
            stacked = any(block is each for each in stack.period)
            for leaf in jax.tree.leaves(block):
                in_stacks.add(id(leaf))
                each = squares(leaf, tuple(range(1, leaf.ndim))) if stacked else squares(leaf)[None]
                for n, square in zip(numbers, each, strict=True):
                    name = f"{path}.{n:02d}"
                    found[name] = found.get(name, 0.0) + square
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        if id(leaf) not in in_stacks:
            name = path_name(path[:1])
            found[name] = found.get(name, 0.0) + squares(leaf)
    return {name: jnp.sqrt(square) for name, square in found.items()}


def jit_norms(recipe: Recipe) -> Callable[..., Any]:
    """Compiles `norms(model, frozen, batch, reference)`.

    The norms are measured on the first microbatch only, so that they need no more memory than a step. For layer 3 they
    are "activation_rms/layers.03", the root mean square of its output features, and "gradient_norm/layers.03", the norm
    of its gradients.
    """

    def norms(model: Any, frozen: Any, batch: Batch, reference: Any) -> dict[str, Array]:
        parameters, fixed = eqx.partition(model, eqx.is_inexact_array)
        part = jax.tree.map(lambda a: a[0], split(batch, recipe.microbatches))

        def loss(low: Any) -> tuple[Array, list[Size]]:
            model = sized(combine(eqx.combine(low, fixed), cast(frozen, recipe.compute_dtype)))
            total, count, _, reports = recipe.objective(with_remat(model, recipe.remat), part, reference)
            is_size = lambda m: isinstance(m, Size)
            return per(count, total), [size for size in jax.tree.leaves(reports, is_leaf=is_size) if is_size(size)]

        gradients, sizes = jax.grad(loss, has_aux=True)(cast(parameters, recipe.compute_dtype))
        each = ((name, value) for size in sizes for name, value in zip(size.names, size.value.reshape(-1), strict=True))
        return {f"activation_rms/{name}": value for name, value in each} | {
            f"gradient_norm/{name}": value for name, value in gradient_norms(gradients).items()
        }

    return jax.jit(norms)
