"""A model's parameters <-> the tensors of a checkpoint, by the family's CHECKPOINT_NAMES; knows no family.

Loading is all or nothing: every parameter is filled from a tensor of its shape, and every tensor is used or known to be
redundant; otherwise the checkpoint is refused.
"""

import concurrent.futures
import fnmatch
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from jax.sharding import Mesh

from convert.tensors import Tensor
from zoo.layers import AbstractLinear, Linear
from zoo.stack import Stack
from zoo.surgery import modules, path_name, shardings


T = TypeVar("T")


def checkpoint_names(model: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Any, bool, list[str]]]:
    """Path, array, whether it is stacked, and its tensor's name (one for each layer of a stack), of every parameter."""
    stacks = dict(modules(model, Stack))
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        ours = path_name(path)
        each, stacked = [ours], False
        for stack_path, stack in stacks.items():
            if ours.startswith(f"{stack_path}."):
                part, j, rest = ours.removeprefix(f"{stack_path}.").split(".", 2)
                each = [f"{stack_path}.{n}.{rest}" for n in stack.layer_numbers(part, int(j))]
                stacked = part == "period"
        template = next(template for pattern, template in names.items() if fnmatch.fnmatch(ours, pattern))
        yield ours, array, stacked, [template.format(name) for name in each]


def fill(
    skeleton: T, tensors: Mapping[str, Tensor], family: ModuleType, *, dtype: np.dtype | None, mesh: Mesh | None
) -> T:
    """`skeleton` (from `eqx.filter_eval_shape`) with its arrays read from `tensors`.

    `dtype` None keeps the stored one. With a `mesh`, each device gets its part by the family's PARTITION_RULES, and
    only that part is read. Without one, a tensor that needs neither cast nor stacking is not copied on a CPU: the array
    is the memory-mapped file.

    Raises:
        ValueError: naming tensors that are missing, unknown, of a wrong shape, or not floating point.
    """
    parameters = list(checkpoint_names(skeleton, family.CHECKPOINT_NAMES))
    check(parameters, tensors, family, dtype)
    places = jax.tree.leaves(shardings(skeleton, family.PARTITION_RULES, mesh)) if mesh else [None] * len(parameters)

    def read(parameter: tuple[str, Any, bool, list[str]], place: Any) -> jax.Array:
        _, skeleton_array, stacked, names = parameter
        parts = [tensors[name] for name in names]
        part = lambda index: read_part(parts, index, stacked, dtype or parts[0].dtype)
        if place is None:
            return jax.device_put(part((slice(None),) * skeleton_array.ndim))
        return jax.make_array_from_callback(skeleton_array.shape, place, part)

    size = sum(tensors[name].nbytes for *_, names in parameters for name in names)
    with (
        rich.progress.Progress(
            "loading", rich.progress.BarColumn(), rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn(),
            transient=True, disable=size < 2**30 or not sys.stderr.isatty(), console=rich.console.Console(stderr=True),
        ) as bar,
        concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):  # fmt: skip
        task, leaves = bar.add_task("", total=size), []
        for parameter, leaf in zip(parameters, pool.map(read, parameters, places), strict=True):
            leaves.append(leaf)
            bar.advance(task, sum(tensors[name].nbytes for name in parameter[-1]))
    return jax.tree.unflatten(jax.tree.structure(skeleton), leaves)


def read_part(tensors: list[Tensor], index: tuple[slice, ...], stacked: bool, dtype: np.dtype) -> np.ndarray:
    """`np.stack(tensors)[index]` of a stack, or `tensors[0][index]`, as `dtype`, with at most one copy made."""
    layers, inner = (tensors[index[0]], index[1:]) if stacked else (tensors, index)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(inner, tensors[0].shape, strict=True))
    whole = shape == tensors[0].shape
    if not stacked and dtype == tensors[0].dtype and not (whole and tensors[0].offset % 64):
        return tensors[0].view()[inner]  # an aligned mapping becomes the array; any other would be copied from it
    out = aligned_empty((len(layers), *shape), dtype)
    for tensor, row in zip(layers, out, strict=True):
        if whole and tensor.dtype == dtype:
            tensor.read_into(row)
        else:
            row[...] = tensor.view()[inner].astype(dtype)
    return out if stacked else out[0]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, from where `jax.device_put` takes it over on a CPU without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def check(parameters: list, tensors: Mapping[str, Tensor], family: ModuleType, dtype: np.dtype | None) -> None:
    """Raises unless `tensors` are exactly those of the parameters, but for the redundant ones."""
    where = next(iter(tensors.values())).file.parent if tensors else "the checkpoint"
    first = lambda names: ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    wanted = {name for *_, names in parameters for name in names}
    if missing := wanted - tensors.keys():
        raise ValueError(f"{where} lacks {len(missing)} tensors that its config.json calls for: {first(missing)}.")
    unknown = []
    for name in tensors.keys() - wanted:
        twins = [twin for pattern, twin in family.REDUNDANT.items() if fnmatch.fnmatch(name, pattern)]
        if not twins:
            unknown.append(name)
        elif twins[0] and not equal(tensors[name], tensors[twins[0]]):
            raise ValueError(
                f"{tensors[name].file} has a {name} that differs from {twins[0]}, though config.json says they are "
                "tied; set tie_word_embeddings to false there if it is meant to be used."
            )
    if unknown:
        raise ValueError(
            f"{where} has {len(unknown)} tensors that {family.__name__} has no place for: {first(unknown)}. "
            "Its config.json does not describe this checkpoint."
        )
    for ours, array, stacked, names in parameters:
        shape = array.shape[1:] if stacked else array.shape
        for tensor in (tensors[name] for name in names):
            if tensor.shape != shape:
                raise ValueError(
                    f"{tensor.name} in {tensor.file} has shape {tensor.shape}; config.json calls for {shape}."
                )
            if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize not in (2, 4):
                raise ValueError(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype}; {ours} needs a 16 or 32 bit float."
                )
            if dtype is None and tensor.dtype != tensors[names[0]].dtype:
                raise ValueError(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype}, but {names[0]} is {tensors[names[0]].dtype}; "
                    "layers that run together need one: choose it with dtype=."
                )


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same bits."""
    bits = lambda tensor: tensor.view().reshape(-1).view(np.uint8)
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def export(model: Any, family: ModuleType) -> dict[str, Any]:
    """The inverse of `fill`: tensor name -> (shape, dtype, function that gets the tensor as numpy), in layer order.

    Raises:
        ValueError: if surgery has replaced a linear by something that the Hub layout has no place for.
    """
    for path, linear in modules(model, AbstractLinear):
        if not isinstance(linear, Linear):
            raise ValueError(f"{path} is a {type(linear).__name__}; the Hub layout only holds plain linears.")
    out = {}
    for _, array, stacked, names in checkpoint_names(model, family.CHECKPOINT_NAMES):
        for n, name in enumerate(names):
            get = (
                (lambda array=array, n=n: np.asarray(array[n])) if stacked else (lambda array=array: np.asarray(array))
            )
            out[name] = (array.shape[1:] if stacked else array.shape, np.dtype(array.dtype), get)
    return out
