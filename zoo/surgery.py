"""Transform any model from outside: replace linear maps or its head, cast, rematerialise, or make partition specs.

Modules are selected by type and path, so families need no code for this.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from kernels.mesh import FSDP, PARAMETERS, STAGE, TENSOR, fitting
from zoo.nn.block import AbstractBlock
from zoo.nn.heads import AbstractHead
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding, Float32
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Stack


T = TypeVar("T")
M = TypeVar("M", bound=AbstractModel)
HEADS = {"head.*": P()}  # the partition rule of heads, which are small, in every family


def path_name(path: Any) -> str:
    """Write a key path of jax as `layers.period.0.mlp.up_proj`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_stacked(path: Any) -> bool:
    """Whether the array at a key path of jax has an axis of layers in front: `Stack.period` is in the path."""
    return any(getattr(key, "name", None) == "period" for key in path)


def modules(tree: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every outermost module of a type (or of a tuple of types)."""
    is_kind = lambda m: isinstance(m, kind)
    for path, module in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kind):
        if is_kind(module):
            yield path_name(path), module


def cast(tree: T, dtype: DTypeLike) -> T:
    """Cast a tree's floating point arrays to `dtype`, except `Float32` and weights stored in eight bits."""
    kept = lambda m: isinstance(m, Float32)
    one = lambda a: a.astype(dtype) if eqx.is_inexact_array(a) and a.dtype.itemsize > 1 else a
    return jax.tree.map(lambda a: a if kept(a) else one(a), tree, is_leaf=kept)


def with_remat(model: T, remat: Callable[..., Callable] | None) -> T:
    """Put `remat`, such as `jax.checkpoint`, around each layer, to save memory in training.

    The backward pass then recomputes the values that `remat` does not keep. None: all values are kept.
    """
    is_stack = lambda m: isinstance(m, Stack)
    return jax.tree.map(lambda m: m.with_remat(remat) if is_stack(m) else m, model, is_leaf=is_stack)


def with_head(model: M, head: AbstractHead) -> M:
    """Put a head in the place of a model's output embeddings, or of another head."""
    outputs = lambda m: [linear for path, linear in modules(m, AbstractLinear) if path == "lm_head"]
    if outputs(model):
        model = eqx.tree_at(outputs, model, [None])
    return eqx.tree_at(lambda m: m.head, model, head, is_leaf=lambda m: m is None)


def with_layer(model: M, n: int, layer: AbstractBlock) -> M:
    """Put `layer`, which is a changed `model.layers[n]`, in the place of layer n; -1 is the last one.

    Raises:
        IndexError: there is no layer n.
        ValueError: anything but the values of arrays differs from the old layer, as layers share a compiled scan.
    """
    return eqx.tree_at(lambda m: m.layers, model, model.layers.with_layer(n, layer))


def map_linears(
    model: T,
    fn: Callable[..., Any],
    where: str = "*",
    *,
    kind: type[AbstractLinear | AbstractExpertLinear] = AbstractLinear,
    key: PRNGKeyArray | None = None,
) -> T:
    """Replace each linear map whose path matches `where` by `fn(linear)`, vmapped over the layers of a stack.

    Args:
        model: any tree of modules.
        fn: makes the new module. With `key` it is called as `fn(linear, key)`, with another key for every layer.
        where: a pattern of paths, as `fnmatch` reads it.
        kind: which modules to select: AbstractLinear, or AbstractExpertLinear for the linear maps of experts.
        key: random key.

    Raises:
        ValueError: no linear map matches.
    """
    get = lambda m: [linear for path, linear in modules(m, kind) if fnmatch.fnmatch(path, where)]
    linears, new = get(model), []
    single, vmapped = eqx.filter_jit(fn), eqx.filter_jit(eqx.filter_vmap(fn))
    if not linears:
        paths = [path for path, _ in modules(model, kind)]
        raise ValueError(f"No linear matches {where!r}; the model has {', '.join(paths)}.")
    for i, linear in enumerate(linears):
        keys = () if key is None else (jax.random.fold_in(key, i),)
        stacked = len(linear.shape) == (4 if kind is AbstractExpertLinear else 3)
        if stacked:
            keys = tuple(jax.random.split(k, linear.shape[0]) for k in keys)
        new.append((vmapped if stacked else single)(linear, *keys))
    return eqx.tree_at(get, model, new)


def partition_specs(model: T, rules: Mapping[str, P]) -> T:
    """Replace each array of a model by its `PartitionSpec`.

    Rules map patterns to specs; the first match wins. For linear maps and embeddings the pattern matches the module's
    path, and the spec is that of its matrix: `(out, in)`, or `(experts, out, in)` for experts. Other arrays are matched
    by their own path. A spec is for the last axes of its array; the leading axis of a stack is split over "stage".

    Raises:
        ValueError: no rule matches a module or an array; the message names it.
    """

    def place(path: Any, module: Any) -> Any:
        name = path_name(path)
        spec = next((spec for pattern, spec in (HEADS | {**rules}).items() if fnmatch.fnmatch(name, pattern)), None)
        if spec is None:
            raise ValueError(f"No partition rule matches {name!r}; add one to the family's partition_rules.")
        linear = isinstance(module, AbstractLinear | AbstractExpertLinear)
        specs = module.partition_specs(spec) if linear else jax.tree.map(lambda _: spec, module)
        layers = (STAGE,) if is_stacked(path) else ()
        whole = lambda array, s: (None,) * (array.ndim - len(layers) - len(s))
        return jax.tree.map(lambda array, s: P(*layers, *whole(array, s), *s), module, specs)

    parameters = (AbstractLinear, AbstractExpertLinear, Embedding)
    return jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda m: isinstance(m, parameters))


def shardings(model: T, rules: Mapping[str, P], mesh: Mesh) -> T:
    """Replace each array of a model by its `NamedSharding`. Axes of a rule that the mesh lacks are ignored.

    A key or value projection is not split over "tensor" if that does not divide its rows: every device along "tensor"
    then holds all key/value heads, and `kernels.mesh.split_attention` uses those of the device's query heads.

    An axis that a rule splits over "fsdp" is also split over the other axes of `kernels.mesh.PARAMETERS`, if they
    divide it and the rule does not use them otherwise. So no device keeps parameters that it can gather when needed.
    Layers are not split over "stage" if that does not divide the number of their repeats: they are outside the
    pipeline.

    Raises:
        ValueError: a parameter's axis is not a multiple of the mesh axis that splits it; the message names the
            parameter.
    """

    def place(path: Any, array: Any, spec: P) -> NamedSharding:
        if is_stacked(path) and array.shape[0] % mesh.shape.get(STAGE, 1):
            spec = P(None, *spec[1:])
        axes = [axis if axis in mesh.shape else None for axis in spec]
        for i, (size, axis) in enumerate(zip(array.shape, axes, strict=True)):
            if axis == TENSOR and size % mesh.shape[axis] and fnmatch.fnmatch(path_name(path), "*.[kv]_proj.*"):
                axes[i] = None
            elif axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"{path_name(path)} of shape {array.shape} can't be split: {size} is not a multiple of the mesh "
                    f"axis {axis}={mesh.shape[axis]}. Choose a smaller {axis}."
                )
            if axis == FSDP:
                more = {a: mesh.shape[a] for a in PARAMETERS if a not in spec and mesh.shape.get(a, 1) > 1}
                axes[i] = (FSDP, *more_axes) if (more_axes := fitting(size // mesh.shape[FSDP], more)) else FSDP
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(place, model, partition_specs(model, rules))
