"""A model's parameters <-> the tensors of a checkpoint, by the family's CHECKPOINT_NAMES; knows no family.

CHECKPOINT_NAMES maps a pattern of a parameter's path to its tensor's name. Each `{}` of the name takes what the next
`*` of the pattern stands for, and `{config.x}` the config's x. `{expert}` says that the file has one tensor for each
expert, and `^T` at the end that its last two axes are the other way round there.

Loading is all or nothing: every parameter is filled from a tensor of its shape, and every tensor is used or known to be
redundant; otherwise the checkpoint is refused.
"""

import concurrent.futures
import dataclasses
import fnmatch
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import rich.console
import rich.progress
from jax.sharding import Mesh
from numpy.typing import NDArray

from convert.packed import Fp8Blocks, Mxfp4, quantize_blocks
from convert.tensors import Lazy, Tensor
from zoo.gather import gathered
from zoo.layers import AbstractExpertLinear, AbstractLinear, ExpertLinear, Float32, Linear
from zoo.stack import Stack
from zoo.surgery import QuantizedLinear, modules, path_name, quantize_int8, shardings


T = TypeVar("T")
Source = Tensor | Fp8Blocks | Mxfp4
Index = tuple[slice, ...]
Part = Callable[[Any], Any]  # reads what an `Index` takes of an array

# What config.json says of weights stored in 8 bits.
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
PIECE = 2**25  # bytes that a thread reads at a time
INT8_PIECE = 2**18  # and where it quantises them: what fits into a core's cache


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a model, and the tensors that it is made of."""

    path: str
    array: Any  # or its jax.ShapeDtypeStruct
    names: NDArray[Any]  # of the tensors; its axes are the array's first: none, layers, experts, or both
    transposed: bool  # the tensors' last two axes

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each tensor."""
        shape = self.array.shape[self.names.ndim :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


def skeleton(family: ModuleType, config: Any, *, mtp: bool = False) -> Any:
    """A model whose arrays are `jax.ShapeDtypeStruct`; `mtp`: with the module that predicts one more token.

    Raises:
        ValueError: if the family has no such module.
    """
    if mtp and "mtp" not in inspect.signature(family.Model).parameters:
        raise ValueError(f"{family.__name__} has no module that predicts one more token (mtp).")
    parts = {"mtp": True} if mtp else {}
    return eqx.filter_eval_shape(lambda: family.Model(config, key=jax.random.key(0), **parts))


def parameters(model: Any, family: ModuleType) -> Iterator[Parameter]:
    """Every parameter of a model, or of its skeleton."""
    stacks = dict(modules(model, Stack))
    for key_path, array in jax.tree_util.tree_leaves_with_path(model):
        path = path_name(key_path)
        each, stacked = [path], False
        for stack_path, stack in stacks.items():
            if path.startswith(f"{stack_path}."):
                part, j, rest = path.removeprefix(f"{stack_path}.").split(".", 2)
                each = [f"{stack_path}.{n}.{rest}" for n in stack.layer_numbers(part, int(j))]
                stacked = part == "period"
        pattern, template = next(pair for pair in family.CHECKPOINT_NAMES.items() if stars(pair[0], each[0]))
        per_expert = "{expert}" in template
        experts = range(array.shape[stacked]) if per_expert else range(1)
        name = template.removesuffix("^T")
        names = [[name.format(*stars(pattern, p), expert=m, config=model.config) for m in experts] for p in each]
        lead = array.shape[: stacked + per_expert]
        yield Parameter(path, array, np.array(names, object).reshape(lead), template.endswith("^T"))


def stars(pattern: str, text: str) -> tuple[str, ...]:
    """What each `*` of the pattern stands for in the text; nothing if the text is no such one."""
    match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), text)
    return match.groups() or ("",) if match else ()


def standard_names(tensors: Mapping[str, T], family: ModuleType) -> dict[str, T]:
    """The tensors under the names that the family writes: ALIASES are other beginnings of names."""
    aliases = getattr(family, "ALIASES", {})

    def rename(name: str) -> str:
        old = next((old for old in aliases if name.startswith(old)), "")
        return aliases.get(old, "") + name.removeprefix(old)

    return {rename(name): tensor for name, tensor in tensors.items()}


def fill(
    skeleton: Any,
    tensors: Mapping[str, Source],
    family: ModuleType,
    *,
    dtype: np.dtype | None,
    mesh: Mesh | None,
    int8: bool = False,
) -> Any:
    """`skeleton` (from `eqx.filter_eval_shape`) with its arrays read from `tensors`.

    `dtype` None keeps the stored one. With a `mesh`, each device gets its part by the family's PARTITION_RULES, and
    each process reads only those of its own devices. Without one, a tensor that needs neither cast nor stacking is not
    copied on a CPU: the array is the memory-mapped file. `int8` is `zoo.surgery.quantize_int8`, done as each tensor is
    read, in whole rows.

    Raises:
        ValueError: naming tensors that are missing, unknown, of a wrong shape, or not floating point.
    """
    wanted, tensors = list(parameters(skeleton, family)), standard_names(tensors, family)
    check(wanted, tensors, skeleton.config, family, dtype)
    result = eqx.filter_eval_shape(quantize_int8, skeleton) if int8 else skeleton
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(result)]
    places = jax.tree.leaves(shardings(result, family.PARTITION_RULES, mesh)) if mesh else []
    float32 = tuple(f"{path}." for path, _ in modules(skeleton, Float32))
    arrays: dict[str, jax.Array] = {}

    def put(path: str, shape: tuple[int, ...], part: Part) -> None:
        """Places the parameter whose values `part` reads, index by index."""
        if mesh:
            arrays[path] = jax.make_array_from_callback(shape, places[paths.index(path)], part)
        else:
            arrays[path] = jax.device_put(part((slice(None),) * len(shape)))

    size = sum(tensors[name].nbytes for parameter in wanted for name in parameter.names.flat)
    with (
        rich.progress.Progress(
            "loading", rich.progress.BarColumn(), rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn(),
            transient=True, disable=size < 2**30 or not sys.stderr.isatty(), console=rich.console.Console(stderr=True),
        ) as bar,
        concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):  # fmt: skip
        task = bar.add_task("", total=size)
        for parameter in wanted:
            path, shape, stored = parameter.path, parameter.array.shape, [tensors[n] for n in parameter.names.flat]
            kind = np.dtype(np.float32) if path.startswith(float32) else dtype or stored[0].dtype
            if (scale := f"{path.removesuffix('.weight')}.scale") in paths:
                both = once(lambda index, p=parameter, kind=kind: read_int8(p, tensors, index, kind, pool))
                put(path, shape, lambda index, both=both: both(index[:-1])[0][..., index[-1]])
                put(scale, shape[:-1], lambda index, both=both: both(index)[1])
            else:
                put(path, shape, once(lambda index, p=parameter, kind=kind: read(p, tensors, index, kind, pool)))
            bar.advance(task, sum(tensor.nbytes for tensor in stored))
    return jax.tree.unflatten(jax.tree.structure(result), [arrays[path] for path in paths])


def once(part: Part) -> Part:
    """`part`, which reads each index only once, however many of the devices hold it."""
    held: dict[tuple, Any] = {}

    def get(index: Index) -> Any:
        key = tuple((s.start, s.stop) for s in index)
        if key not in held:
            held[key] = part(index)
        return held[key]

    return get


def read(
    parameter: Parameter,
    tensors: Mapping[str, Source],
    index: Index,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
) -> np.ndarray:
    """`array[index]` of a parameter, with at most one copy made."""
    names, inner, shape = locate(parameter, index)
    if names.ndim == 0 and not parameter.transposed:
        tensor = tensors[names.item()]
        whole = shape == tensor.shape
        if isinstance(tensor, Tensor) and dtype == tensor.dtype and not (whole and tensor.offset % 64):
            # An aligned mapping becomes the array; any other would be copied from it.
            return tensor.view(own=True)[inner]
    out = aligned_empty((*names.shape, *shape), dtype)

    def fetch(tensor: Source, at: tuple[int, ...], piece: slice) -> None:
        plain = whole_rows(tensor, inner) and not parameter.transposed
        if plain and isinstance(tensor, Tensor) and tensor.dtype == dtype:
            tensor.read_into(out[at][piece], inner[0].start + piece.start)
        else:
            out[at][piece] = rows(tensor, inner, piece, dtype, parameter.transposed)

    for_each_piece(fetch, tensors, names, shape, PIECE // dtype.itemsize, pool)
    return out


def read_int8(
    parameter: Parameter,
    tensors: Mapping[str, Source],
    index: Index,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
) -> tuple[np.ndarray, np.ndarray]:
    """`zoo.surgery.int8_rows` of the rows `index` of a parameter in `dtype`, worked out piece by piece.

    The rows are read whole, since a row's scale depends on all of it.
    """
    names, inner, shape = locate(parameter, (*index, slice(None)))
    quantized = aligned_empty((*names.shape, *shape), np.dtype(np.int8))
    scales = aligned_empty((*names.shape, *shape[:-1]), dtype)

    def fetch(tensor: Source, at: tuple[int, ...], piece: slice) -> None:
        weight = rows(tensor, inner, piece, dtype, parameter.transposed).astype(np.float32)
        largest = np.max(np.abs(weight), axis=-1)
        scale = np.where(largest > 0, largest * np.float32(1 / 127), np.float32(1))
        quantized[at][piece] = np.rint(weight * (1 / scale)[..., None])
        scales[at][piece] = scale

    for_each_piece(fetch, tensors, names, shape, INT8_PIECE // dtype.itemsize, pool)
    return quantized, scales


def locate(parameter: Parameter, index: Index) -> tuple[NDArray[Any], Index, tuple[int, ...]]:
    """Where `array[index]` of a parameter lies: the names of the tensors, what it takes of each, and its shape."""
    lead = parameter.names.ndim
    names, sizes = parameter.names[(*index[:lead], ...)], parameter.array.shape[lead:]
    inner = tuple(slice(*s.indices(n)) for s, n in zip(index[lead:], sizes, strict=True))
    return names, inner, tuple(s.stop - s.start for s in inner)


def rows(tensor: Source, index: Index, piece: slice, dtype: np.dtype, transposed: bool) -> np.ndarray:
    """`tensor[index][piece]` in the model's orientation."""
    first = slice(index[0].start + piece.start, index[0].start + piece.stop)
    index = (first, *index[1:])
    if transposed:
        index = (*index[:-2], index[-1], index[-2])
    elif isinstance(tensor, Tensor) and whole_rows(tensor, index):  # not mapped: its pages would count as memory
        out = np.empty((first.stop - first.start, *tensor.shape[1:]), tensor.dtype)
        tensor.read_into(out, first.start)
        return out.astype(dtype, copy=False)
    mapped = isinstance(tensor, Tensor)
    part = tensor.view(own=True)[index].astype(dtype, copy=False) if mapped else tensor.part(index, dtype)
    return part.swapaxes(-1, -2) if transposed else part


def whole_rows(tensor: Source, index: Index) -> bool:
    return tuple(s.stop - s.start for s in index[1:]) == tensor.shape[1:]


def for_each_piece(
    fetch: Callable[[Source, tuple[int, ...], slice], None],
    tensors: Mapping[str, Source],
    names: NDArray[Any],
    shape: tuple[int, ...],
    size: int,
    pool: concurrent.futures.Executor,
) -> None:
    """`fetch(tensor, its place among the names, some of its rows)` for all rows of all tensors, by several threads.

    `size`: how many numbers at a time, or one row if that has more.
    """
    step = max(1, size // max(1, math.prod(shape[1:])))
    pieces = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    work = [
        pool.submit(fetch, tensors[str(names[at])], at, piece) for at in np.ndindex(names.shape) for piece in pieces
    ]
    for done in work:
        done.result()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, from where `jax.device_put` takes it over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def check(
    wanted: list[Parameter], tensors: Mapping[str, Source], config: Any, family: ModuleType, dtype: np.dtype | None
) -> None:
    """Raises unless `tensors` are exactly those of the parameters, but for the redundant ones."""
    where = next(iter(tensors.values())).file.parent if tensors else "the checkpoint"
    first = lambda names: ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    names = {name for parameter in wanted for name in parameter.names.flat}
    if missing := names - tensors.keys():
        raise ValueError(f"{where} lacks {len(missing)} tensors that its config.json calls for: {first(missing)}.")
    unknown = []
    for name in tensors.keys() - names:
        known, twin = redundant(name, config, family)
        if not known:
            unknown.append(name)
        elif twin and not equal(tensors[name], tensors[twin]):
            raise ValueError(
                f"{tensors[name].file} has a {name} that differs from {twin}, though config.json says they are "
                "tied; set tie_word_embeddings to false there if it is meant to be used."
            )
    if unknown:
        raise ValueError(
            f"{where} has {len(unknown)} tensors that {family.__name__} has no place for: {first(unknown)}. "
            "Its config.json does not describe this checkpoint."
        )
    for parameter in wanted:
        stored = [tensors[name] for name in parameter.names.flat]
        for tensor in stored:
            if tensor.shape != parameter.stored_shape:
                raise ValueError(
                    f"{tensor.name} in {tensor.file} has shape {tensor.shape}; config.json calls for "
                    f"{parameter.stored_shape}."
                )
            if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize not in (2, 4):
                raise ValueError(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype}; {parameter.path} needs a 16 or 32 bit float."
                )
            if dtype is None and tensor.dtype != stored[0].dtype:
                raise ValueError(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype}, but {stored[0].name} is {stored[0].dtype}; "
                    "what runs together needs one: choose it with dtype=."
                )


def check_headers(tensors: Mapping[str, Source], family: ModuleType, config: Any) -> None:
    """As `check`, of tensors that cannot be read, in any dtypes; that some repeat others is taken on trust."""
    wanted, tensors = list(parameters(skeleton(family, config), family)), standard_names(tensors, family)
    names = {name for parameter in wanted for name in parameter.names.flat}
    checked = {name: t for name, t in tensors.items() if name in names or not redundant(name, config, family)[0]}
    check(wanted, checked, config, family, np.dtype(np.float32))


def redundant(name: str, config: Any, family: ModuleType) -> tuple[bool, str | None]:
    """Whether a tensor is one that the model does not need, by the family's REDUNDANT, and which one it repeats."""
    for pattern, twin in family.REDUNDANT.items():
        if fnmatch.fnmatch(name, pattern.format(config=config)):
            return True, twin
    return False, None


def equal(a: Source, b: Source) -> bool:
    """Whether both hold the same bits."""
    bits = lambda tensor: tensor.part((), tensor.dtype).reshape(-1).view(np.uint8)
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def export(model: Any, family: ModuleType, *, fp8: bool = False) -> dict[str, Lazy]:
    """The inverse of `fill`: tensor name -> (shape, dtype, function that gets the tensor as numpy), in layer order.

    `fp8` stores the matrices that the family's FP8_BLOCKS name in 8 bits, with a scale for each block of 128 x 128.

    Raises:
        ValueError: if surgery has replaced a linear by something that the Hub layout has no place for, or the family
            has no such layout.
    """
    if fp8 and not hasattr(family, "FP8_BLOCKS"):
        raise ValueError(f"{family.__name__} has no layout with fp8 blocks.")
    for path, linear in modules(model, (AbstractLinear, AbstractExpertLinear)):
        if not isinstance(linear, Linear | QuantizedLinear | ExpertLinear):
            raise ValueError(f"{path} is a {type(linear).__name__}; the Hub layout only holds plain linears.")
    out: dict[str, Lazy] = {}
    for parameter in parameters(model, family):
        blocks = fp8 and any(fnmatch.fnmatch(parameter.path, pattern) for pattern in family.FP8_BLOCKS)
        for at in np.ndindex(parameter.names.shape):
            name, shape = str(parameter.names[at]), parameter.stored_shape
            get = functools.partial(stored, parameter, at)
            if blocks:
                scales = tuple(-(-n // 128) for n in shape)
                out[name] = (shape, np.dtype(ml_dtypes.float8_e4m3fn), lambda get=get: quantize_blocks(get())[0])
                out[f"{name}_scale_inv"] = (scales, np.dtype(np.float32), lambda get=get: quantize_blocks(get())[1])
            else:
                out[name] = (shape, np.dtype(parameter.array.dtype), get)
    return out


def stored(parameter: Parameter, at: tuple[int, ...]) -> np.ndarray:
    """The values of the tensor `parameter.names[at]`."""
    tensor = gathered(parameter.array[at])
    return tensor.swapaxes(-1, -2) if parameter.transposed else tensor
