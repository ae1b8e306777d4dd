"""Map a model's parameters to the tensors of a checkpoint and back, by the family's `checkpoint_names`.

`Family.checkpoint_names` maps patterns of parameters' paths to names of tensors. Each `{}` in a name is replaced by the
text that matches the next `*` of the pattern, and `{config.x}` by the config's x. `{expert}` means that the file has
one tensor for each expert, and `^T` at the end that the tensor's last two axes are swapped. `^T?` means the same, but
checkpoints in which they are not swapped are read, too.

Loading is all or nothing: every parameter must have a tensor of its shape, and every tensor must be used or be known to
be redundant. Otherwise the checkpoint is refused.
"""

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import rich.console
import rich.progress
from jax.sharding import Mesh, NamedSharding

from convert.dequantize import PackedIntegers, int4_words
from convert.packed import BLOCK, PAIRS, SCALES, Packed, block_scales, quantize_blocks, quantize_mxfp4, swapped
from convert.tensors import Lazy, Tensor
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, ExpertLinear, Float32, Linear
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.nn.stack import Stack
from zoo.quantized import (
    Format,
    Holding,
    Kept,
    LowPrecisionExpertLinear,
    LowPrecisionLinear,
    QuantizedExpertLinear,
    QuantizedLinear,
    quantize,
)
from zoo.surgery import map_linears, modules, path_name, shardings, with_head
from zoo.weights.gather import gathered
from zoo.weights.reading import Fused, Parameter, Part, Reader, Scan, Stored, kept_as, once


M = TypeVar("M", bound=AbstractModel)

# Linear maps that are stored as plain ones.
PLAIN = (Linear, LowPrecisionLinear, ExpertLinear, LowPrecisionExpertLinear)
QUANTIZED = (QuantizedLinear, QuantizedExpertLinear)
# The quantization_config of an export with `fp8`.
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def skeleton(family: Family, config: AbstractConfig, parts: Sequence[str] = ()) -> AbstractModel:
    """Make a model with these of the family's `parts`, whose arrays are `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: if there are no such parts, or the config describes no model.
    """
    try:
        return eqx.filter_eval_shape(lambda: family.init_model(config, key=jax.random.key(0), parts=parts))
    except ValueError as error:
        raise ValueError(f"{config.source / 'config.json'}: {error}" if config.source else str(error)) from error


def check_sizes(config: AbstractConfig, tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if there are more layers than tensors. Building that many could take hours and all memory."""
    if config.num_hidden_layers > len(tensors):
        raise ValueError(
            f"{config.source}/config.json calls for {config.num_hidden_layers} layers, but there are only "
            f"{len(tensors)} tensors."
        )


def parameters(model: AbstractModel, family: Family, most: int = 2**31) -> Iterator[Parameter]:
    """List the parameters of a model, or of its skeleton. Scales of quantized weights have the names of the weights.

    Raises:
        ValueError: before listing the tensors of a parameter, if they are more than `most`.
    """
    stacks, head = dict(modules(model, Stack)), model.head
    names_of = {f"head.{path}": name for path, name in head.tensors.items()} if head else {}
    names_of |= family.checkpoint_names
    scales = {f"{path}.scale" for path, _ in modules(model, QUANTIZED)}
    for key_path, array in jax.tree_util.tree_leaves_with_path(model):
        path = path_name(key_path)
        named = path.removesuffix("scale") + "weight" if path in scales else path
        each, stacked = [named], False
        for stack_path, stack in stacks.items():
            if path.startswith(f"{stack_path}."):
                part, j, rest = named.removeprefix(f"{stack_path}.").split(".", 2)
                each = [f"{stack_path}.{n}.{rest}" for n in stack.layer_numbers(part, int(j))]
                stacked = part == "period"
        pattern, template = next(pair for pair in names_of.items() if match_wildcards(pair[0], each[0]))
        per_expert = "{expert}" in template
        experts = range(array.shape[stacked]) if per_expert else range(1)
        if len(each) * len(experts) > most:
            raise ValueError(
                f"{model.config.source}/config.json calls for {len(each) * len(experts)} tensors {template}, but "
                f"there are only {most}."
            )
        name = template.removesuffix("?").removesuffix("^T")
        names = [
            [name.format(*match_wildcards(pattern, p), expert=m, config=model.config) for m in experts] for p in each
        ]
        lead = array.shape[: stacked + per_expert]
        names, swapped, either = np.array(names, object).reshape(lead), name != template, template.endswith("?")
        yield Parameter(path, array, names, swapped, either)


def as_stored(wanted: Sequence[Parameter], tensors: Mapping[str, Stored]) -> list[Parameter]:
    """Decide by shapes whether a checkpoint has swapped the axes of its `^T?` tensors: of all, or of none.

    A mixture's experts cannot fit both ways, because at most one of their two matrices is square.
    """
    plain = [dataclasses.replace(p, transposed=False) if p.either else p for p in wanted]

    def fits(parameters: Sequence[Parameter]) -> bool:
        pairs = ((tensors.get(name), p.stored_shape) for p in parameters if p.either for name in p.names.flat)
        return all(tensor is None or tensor.shape == shape for tensor, shape in pairs)

    return plain if fits(plain) and not fits(wanted) else list(wanted)


def match_wildcards(pattern: str, text: str) -> tuple[str, ...]:
    """Return the text that each `*` of the pattern matches; empty if the pattern does not match."""
    match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), text)
    return match.groups() or ("",) if match else ()


def standard_names(tensors: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Rename tensors to the names that the family writes, and join the tensors of single experts.

    Of the prefixes in the family's `beginnings`, and the prefixes and patterns in its `aliases`, the first that fits is
    replaced. Tensors of single experts that its `fused` lists are read as one `Fused` tensor. Tensors of a model alone,
    which lack the beginning of the family's names, such as `model.`, get it.
    """
    beginnings = {new: old for names in family.beginnings.values() for old, new in names.items()}
    standard = {**beginnings, **family.aliases}

    def rename(name: str) -> str:
        for old, new in standard.items():
            if "*" in old and (matched := match_wildcards(old, name)):
                return new.format(*matched)
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    out = {rename(name): tensor for name, tensor in tensors.items()}
    if not any(name.startswith(beginning(family)) for name in out):
        out = {name if "/" in name else beginning(family) + name: tensor for name, tensor in out.items()}
    for end, ends in family.fused.items():
        first = ends[0].format(0)
        for start in [name.removesuffix(first) for name in out if name.endswith(first)]:
            out = with_fused(out, start, end, ends)
    return out


def beginning(family: Family) -> str:
    """Return how the names of a family's tensors begin, such as `model.`, unless it is the output embeddings'."""
    return family.checkpoint_names["*"].partition("{")[0]


def with_fused(tensors: dict[str, Any], start: str, end: str, ends: Sequence[str]) -> dict[str, Any]:
    """Replace the tensors of single experts by one `Fused` tensor, if each expert has all, of one shape.

    The names of the tensors of expert n are `start` and each of `ends` with n in the place of `{}`; that of the fused
    one is `start` and `end`.
    """
    names: list[list[str]] = []
    while (expert := [start + part.format(len(names)) for part in ends])[0] in tensors:
        names.append(expert)
    experts: Any = tuple(tuple(map(tensors.get, expert)) for expert in names)
    shapes = {tuple(tensor and tensor.shape for tensor in expert) for expert in experts}
    if len(shapes) > 1 or None in experts[0]:
        return tensors
    apart = set(itertools.chain(*names))
    rest = {name: tensor for name, tensor in tensors.items() if name not in apart}
    return rest | {start + end: Fused(start + end, experts)}


def fill(
    skeleton: M,
    tensors: Mapping[str, Stored],
    family: Family,
    *,
    dtype: np.dtype | None,
    mesh: Mesh | None,
    format: Format | Literal["stored"] | None = None,
    check_values: bool = True,
    mmap: bool = True,
) -> M:
    """Fill a skeleton's arrays from tensors.

    Args:
        skeleton: a model of `jax.ShapeDtypeStruct`s, from `eqx.filter_eval_shape`.
        tensors: name -> tensor of the checkpoint.
        family: the model's.
        dtype: dtype of the arrays; None keeps the stored one.
        mesh: each device gets its part by the family's `partition_rules`, and each process reads only the parts of its
            own devices.
        format: quantize each tensor as it is read, in whole rows, as `zoo.quantized.quantize` does. "stored": do not
            dequantise linear maps' weights that can stay as they are stored.
        check_values: check all values read by `zoo.weights.reading.Scan`.
        mmap: on a CPU and without a mesh, do not copy a tensor that needs neither cast nor stacking: the array is the
            memory-mapped file.

    Raises:
        ValueError: tensors are missing, unknown, of a wrong shape, or not floating point, `Scan` refuses them, or they
            cannot stay as they are stored; the message names them.
    """
    wanted, tensors = list(parameters(skeleton, family, len(tensors))), standard_names(tensors, family)
    wanted = as_stored(wanted, tensors)
    check(wanted, tensors, skeleton.config, family, dtype)
    dtypes = dtypes_of(skeleton, wanted, tensors, dtype)
    if format == "stored":
        result = with_kept(skeleton, wanted, tensors, dtypes)
    else:
        result = eqx.filter_eval_shape(quantize, skeleton, format) if format else skeleton
    shapes = {path_name(path): a.shape for path, a in jax.tree_util.tree_leaves_with_path(result)}
    places = jax.tree.leaves(shardings(result, family.partition_rules, mesh)) if mesh else [None] * len(shapes)
    places = dict(zip(shapes, places, strict=True))
    arrays: dict[str, jax.Array] = {}
    scan = Scan() if check_values else None
    size = sum(tensors[name].nbytes for parameter in wanted for name in parameter.names.flat)
    with progress(size) as advance, concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        reader = Reader(tensors, pool, scan, mmap)
        for parameter in wanted:
            stored = [tensors[name] for name in parameter.names.flat]
            parts = parts_of(parameter, reader, dtypes[parameter.path], format, shapes)
            arrays |= {path: put(part, shapes[path], places[path]) for path, part in parts.items()}
            if scan:
                scan.end(stored)
            advance(sum(tensor.nbytes for tensor in stored))
    return jax.tree.unflatten(jax.tree.structure(result), [arrays[path] for path in shapes])


def dtypes_of(
    skeleton: AbstractModel, wanted: Sequence[Parameter], tensors: Mapping[str, Stored], dtype: np.dtype | None
) -> dict[str, np.dtype]:
    """Map each parameter's path to its dtype: `dtype`, or that of its tensors; float32 where the model asks for it."""
    float32 = tuple(f"{path}." for path, _ in modules(skeleton, Float32))
    own = lambda parameter: dtype or tensors[parameter.names.flat[0]].dtype
    return {p.path: np.dtype(np.float32) if p.path.startswith(float32) else own(p) for p in wanted}


def with_kept(
    skeleton: M, wanted: Sequence[Parameter], tensors: Mapping[str, Stored], dtypes: Mapping[str, np.dtype]
) -> M:
    """Replace the linear maps of a skeleton whose weights can stay as they are stored by ones that hold them so.

    Raises:
        ValueError: a linear map's weight is stored in another quantized format, its layers or experts are stored in
            different ones, or the model's dtype cannot hold its scales; the message names the tensor.
    """
    held: dict[str, Holding] = {}
    linears = dict(modules(skeleton, (Linear, ExpertLinear)))
    for parameter in wanted:
        path, _, field = parameter.path.rpartition(".")
        stored = [tensors[name] for name in parameter.names.flat]
        if path not in linears or field != "weight" or all(map(plain, stored)):
            continue
        dtype = dtypes[parameter.path]
        for tensor in stored:
            how = kept_as(tensor, dtype)
            if how is None or how != held.setdefault(path, how):
                raise ValueError(
                    f"{tensor.name} in {tensor.file} cannot stay as it is stored, as quantize='stored' asks. float8 in "
                    "blocks, MXFP4, NVFP4, and four bits with a scale for 32, 64 or 128 weights and no zero points "
                    "can, for all layers and experts alike."
                )
            if isinstance(tensor, PackedIntegers) and not np.can_cast(tensor.scales.dtype, dtype):
                raise ValueError(
                    f"{tensor.scales.name} in {tensor.file} is {tensor.scales.dtype}; {dtype} cannot hold all of its "
                    "numbers. With quantize='stored', choose dtype='float32'."
                )

    def with_held(model: M) -> M:
        for kind in (AbstractLinear, AbstractExpertLinear):
            for path in [path for path, _ in modules(model, kind) if path in held]:
                model = map_linears(model, held[path].zeros, path, kind=kind)
        return model

    return eqx.filter_eval_shape(with_held, skeleton)


def plain(tensor: Stored) -> bool:
    """Whether a tensor holds its values as they are."""
    return isinstance(tensor, Tensor) or (isinstance(tensor, Fused) and all(map(plain, sum(tensor.experts, ()))))


@contextlib.contextmanager
def progress(size: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for loading `size` bytes, if they take long; yields a function to call with bytes that were read."""
    with rich.progress.Progress(
        "loading", rich.progress.BarColumn(), rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn(),
        transient=True, disable=size < 2**30 or not sys.stderr.isatty(), console=rich.console.Console(stderr=True),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=size)
        yield lambda count: bar.advance(task, count)


def put(part: Part, shape: tuple[int, ...], place: NamedSharding | None) -> jax.Array:
    """Place an array on its devices, without a `place` on the default one; `part` reads its values, index by index."""
    if place is None:
        return jax.device_put(part((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, place, part)


def parts_of(
    parameter: Parameter,
    reader: Reader,
    dtype: np.dtype,
    format: Format | Literal["stored"] | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Part]:
    """Return how a parameter is read: path of an array of the model -> part. A quantized weight is two arrays.

    `shapes` are those of the model's arrays, by path.
    """
    path = parameter.path
    scale = f"{path.removesuffix('.weight')}.scale"
    if format is None or scale not in shapes:
        return {path: once(lambda index: reader.read(parameter, index, dtype))}
    if format == "stored":
        both = once(lambda index: reader.read_stored(parameter, index, dtype))
    else:
        both = once(lambda index: reader.read_quantized(parameter, index, dtype, format))
    rows, scaled = parameter.array.ndim - 1, len(shapes[scale])
    return {
        path: lambda index: both(index[:rows])[0][..., index[rows]],
        scale: lambda index: both(index[:rows])[1][(..., *index[rows:scaled])],
    }


def check(
    wanted: list[Parameter],
    tensors: Mapping[str, Stored],
    config: AbstractConfig,
    family: Family,
    dtype: np.dtype | None,
) -> None:
    """Raise ValueError unless `tensors` are exactly those of the parameters, redundant ones aside."""
    check_names({name for parameter in wanted for name in parameter.names.flat}, tensors, config, family)
    for parameter in wanted:
        stored = [tensors[name] for name in parameter.names.flat]
        for tensor in stored:
            check_kind(tensor, parameter)
            if dtype is None and tensor.dtype != stored[0].dtype:
                raise ValueError(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype}, but {stored[0].name} is {stored[0].dtype}; "
                    "what runs together needs one: choose it with dtype=."
                )


def check_names(names: Set[str], tensors: Mapping[str, Stored], config: AbstractConfig, family: Family) -> None:
    """Raise ValueError unless `tensors` have these names, and others only if they are redundant."""
    where = next(iter(tensors.values())).file.parent if tensors else "the checkpoint"
    first = lambda names: ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if missing := names - tensors.keys():
        how = " Without output embeddings a model is loaded with a head, such as head='embedding'."
        raise ValueError(
            f"{where} lacks {len(missing)} tensors that its config.json calls for: {first(missing)}."
            + how * (missing == {"lm_head.weight"})
        )
    unknown = []
    for name in tensors.keys() - names:
        known, twin = redundant(name, config, family)
        if not known and not adds_nothing(name, tensors):
            unknown.append(name)
        if twin and not equal(tensors[name], tensors[twin]):
            raise ValueError(
                f"{tensors[name].file} has a {name} that differs from {twin}, though config.json says they are "
                "tied; set tie_word_embeddings to false there if it is meant to be used."
            )
    if unknown:
        raise ValueError(
            f"{where} has {len(unknown)} tensors that {family.name} has no place for: {first(unknown)}. "
            "Its config.json does not describe this checkpoint."
        )


def check_kind(tensor: Stored, parameter: Parameter) -> None:
    """Raise ValueError unless a tensor has the shape of those of a parameter, and floating point numbers."""
    if tensor.shape != parameter.stored_shape:
        raise ValueError(
            f"{tensor.name} in {tensor.file} has shape {tensor.shape}; config.json calls for {parameter.stored_shape}."
        )
    if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize not in (2, 4):
        raise ValueError(
            f"{tensor.name} in {tensor.file} is {tensor.dtype}; {parameter.path} needs a 16 or 32 bit float."
        )


def check_headers(tensors: Mapping[str, Stored], family: Family, config: AbstractConfig) -> None:
    """Check as `check` does, from headers alone: any dtype passes, and tensors that repeat others are not compared."""
    check_sizes(config, tensors)
    wanted = list(parameters(skeleton(family, config), family, len(tensors)))
    tensors = standard_names(tensors, family)
    wanted = as_stored(wanted, tensors)
    names = {name for parameter in wanted for name in parameter.names.flat}
    checked = {name: t for name, t in tensors.items() if name in names or not redundant(name, config, family)[0]}
    check(wanted, checked, config, family, np.dtype(np.float32))


def redundant(name: str, config: AbstractConfig, family: Family) -> tuple[bool, str | None]:
    """Whether the model does not need this tensor, by the family's `redundant`; and the tensor that it repeats."""
    for pattern, twin in family.redundant.items():
        if fnmatch.fnmatch(name, pattern.format(config=config)):
            return True, twin
    return False, None


def adds_nothing(name: str, tensors: Mapping[str, Stored]) -> bool:
    """Whether a tensor is a bias of zeros beside a quantized weight, as GPTQ's tools write. Unreadable values pass."""
    bias, weight = tensors[name], tensors.get(name.removesuffix("bias") + "weight")
    if not (name.endswith(".bias") and isinstance(weight, Packed) and isinstance(bias, Tensor)):
        return False
    return not (bias.readable and bias.view().astype(np.float32).any())


def equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors hold the same bits."""
    bits = lambda tensor: tensor.part((), tensor.dtype).reshape(-1).view(np.uint8)
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def export(model: AbstractModel, family: Family, *, fp8: bool = False, mxfp4: bool = False) -> dict[str, Lazy]:
    """Invert `fill`: return tensor name -> (shape, dtype, function that returns it as numpy), in layer order.

    A weight in few bits that came from a checkpoint is stored as it was there, in two or three tensors.

    `fp8` stores the matrices in the family's `fp8_blocks` in 8 bits, with a scale for each block of 128 x 128. Experts
    that otherwise are one tensor are then stored one by one, as in published checkpoints. `mxfp4` stores the experts in
    the family's `mxfp4` in 4 bits.

    Raises:
        ValueError: if surgery has replaced a linear by a kind that the Hub layout cannot hold, if the model is not
            what the family makes of its config, or if `fp8` or `mxfp4` is asked of a family without that layout, or
            `fp8` of a model with weights that stay as they are stored.
    """
    if fp8 and not family.fp8_blocks:
        raise ValueError(f"{family.name} has no layout with fp8 blocks.")
    if mxfp4 and not family.mxfp4:
        raise ValueError(f"{family.name} has no layout with MXFP4.")
    check_unchanged(model, family)
    linears = dict(modules(model, QUANTIZED))
    if fp8 and linears:
        held = " and ".join(sorted({linear.format for linear in linears.values()}))
        raise ValueError(f"The model holds weights in {held}, which stay so: save it without fp8.")
    out: dict[str, Lazy] = {}
    for parameter in parameters(model, family):
        if linear := linears.get(parameter.path.rpartition(".")[0]):
            for at in np.ndindex(parameter.names.shape):
                out |= kept_tensors(parameter, at, family, linear)
            continue
        blocks = fp8 and matches(parameter.path, family.fp8_blocks)
        for at in np.ndindex(parameter.names.shape):
            if mxfp4 and matches(parameter.path, family.mxfp4):
                out |= mxfp4_tensors(parameter, at)
                continue
            if not blocks:
                get = functools.partial(stored, parameter, at)
                out[str(parameter.names[at])] = (parameter.stored_shape, np.dtype(parameter.array.dtype), get)
                continue
            for name, shape, get in matrices(parameter, at, family):
                scales = tuple(-(-n // 128) for n in shape)
                out[name] = (shape, np.dtype(ml_dtypes.float8_e4m3fn), lambda get=get: quantize_blocks(get())[0])
                out[f"{name}_scale_inv"] = (scales, np.dtype(np.float32), lambda get=get: quantize_blocks(get())[1])
    return {published_name(name, model, family): tensor for name, tensor in out.items()}


def matches(path: str, patterns: Collection[str]) -> bool:
    """Whether a path matches one of the patterns."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def mxfp4_tensors(parameter: Parameter, at: tuple[int, ...]) -> dict[str, Lazy]:
    """Return the two tensors in MXFP4 of `array[at]` of a parameter."""
    parameter = dataclasses.replace(parameter, transposed=False)
    name, (*rows, columns), byte = str(parameter.names[at]), parameter.stored_shape, np.dtype(np.uint8)
    blocks, get = (*rows, columns // (2 * PAIRS)), functools.partial(stored, parameter, at)
    return {
        f"{name}_blocks": ((*blocks, PAIRS), byte, lambda: quantize_mxfp4(get())[0]),
        f"{name}_scales": (blocks, byte, lambda: quantize_mxfp4(get())[1]),
    }


def kept_tensors(
    parameter: Parameter, at: tuple[int, ...], family: Family, linear: QuantizedLinear | QuantizedExpertLinear
) -> dict[str, Lazy]:
    """Return the tensors for `array[at]` of a linear map as it was stored: for its codes, its scales, or its bias.

    Raises:
        ValueError: the weight is in nvfp4; or the family stores one in int4 with swapped axes, or all experts' as one
            tensor.
    """
    field, name = parameter.path.rpartition(".")[2], str(parameter.names[at])
    if field == "bias":
        return {
            name: (parameter.stored_shape, np.dtype(parameter.array.dtype), functools.partial(stored, parameter, at))
        }
    parameter = dataclasses.replace(parameter, transposed=parameter.transposed and linear.format == "int4")
    shape, dtype = parameter.stored_shape, np.dtype(parameter.array.dtype)
    get = functools.partial(stored, parameter, at)
    match linear.format, field:
        case "nvfp4", _:
            raise ValueError(
                f"{name} stays in NVFP4, which is read and not written: load the model without quantize='stored' to "
                "save it as plain floats, or save its adapter alone."
            )
        case "fp8_blocks", "weight":
            return {name: (shape, dtype, get) for name, shape, get in matrices(parameter, at, family)}
        case "fp8_blocks", _:
            columns, kind = linear.shape[-1], SCALES[dtype.itemsize]
            return {
                f"{name}_scale_inv": (
                    (-(-shape[0] // BLOCK), -(-columns // BLOCK)), kind, lambda get=get: block_scales(get(), columns)
                )
                for name, shape, get in matrices(parameter, at, family)
            }  # fmt: skip
        case "mxfp4", "weight":
            groups = (*shape[:-1], shape[-1] // PAIRS, PAIRS)
            return {f"{name}_blocks": (groups, dtype, lambda: swapped(get()).reshape(groups))}
        case "mxfp4", _:
            return {f"{name}_scales": (shape, dtype, get)}
        case _, "weight" if parameter.transposed or len(shape) != 2:
            raise ValueError(f"{name} has no layout in int4: {parameter.path} is not stored as matrices of (out, in).")
        case _, "weight":
            rows, columns = shape[0], 2 * shape[1]
            return {
                f"{name}_packed": ((rows, columns // 8), np.dtype(np.int32), lambda: int4_words(get())),
                f"{name}_shape": ((2,), np.dtype(np.int32), lambda: np.array([rows, columns], np.int32)),
            }
    return {f"{name}_scale": (shape, dtype, get)}


def kept_config(model: AbstractModel, tensors: Mapping[str, Lazy]) -> dict[str, Any] | None:
    """Return the quantization_config of an export with these tensors; None if all are plain floats."""
    linears = [linear for _, linear in modules(model, QUANTIZED)]
    formats = {linear.format for linear in linears}
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    floats = [n for n in names if len(tensors[f"{n}.weight"][0]) == 2 and f"{n}.weight_scale_inv" not in tensors]
    if "fp8_blocks" in formats:
        return FP8 | dict(modules_to_not_convert=floats)
    if any(name.endswith("_blocks") for name in tensors):
        return dict(quant_method="mxfp4", modules_to_not_convert=floats)
    if "int4" not in formats:
        return None
    sizes = {linear.shape[-1] // linear.scale.shape[-1] for linear in linears}
    if len(sizes) > 1:
        raise ValueError(f"A scale is for {sorted(sizes)} weights in int4; config.json can say one number of them.")
    weights = dict(type="int", num_bits=4, symmetric=True, strategy="group", group_size=sizes.pop(), dynamic=False)
    group = dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)
    return dict(
        quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed",
        config_groups={"group_0": group}, ignore=floats,
    )  # fmt: skip


def check_unchanged(model: AbstractModel, family: Family) -> None:
    """Raise ValueError unless a model is what the family makes of its config, so that a folder can hold it."""
    for path, linear in modules(model, (AbstractLinear, AbstractExpertLinear)):
        if not isinstance(linear, PLAIN) and not is_kept(linear):
            raise ValueError(f"{path} is a {type(linear).__name__}; the Hub layout only holds plain linears.")
    parts = [part for part in family.parts if getattr(model, part) is not None]
    made = skeleton(family, model.config, parts)
    made = made if model.head is None else with_head(made, eqx.filter_eval_shape(lambda: model.head))
    if change := changed(model, made, "model"):
        raise ValueError(
            f"{change}. A folder holds the tensors and the config, of which {family.name} would make another model: "
            "register a family of your own for it (docs/families.md)."
        )


def is_kept(linear: Any) -> bool:
    """Whether a linear map is quantized as checkpoints store maps, too."""
    return isinstance(linear, QUANTIZED) and linear.format in get_args(Kept)


def changed(model: Any, made: Any, path: str) -> str | None:
    """Describe the first class, static field or shape in which a model differs from its family's; None if none does.

    `PLAIN` linear maps may replace one another or be as a checkpoint stores them, and layers may be rematerialised.
    """
    if type(made) in PLAIN and (type(model) in PLAIN or is_kept(model)):
        matrix = lambda linear: jax.ShapeDtypeStruct(linear.shape, linear.weight.dtype)
        model, made = ((matrix(linear), linear.bias) for linear in (model, made))
    if isinstance(made, jax.ShapeDtypeStruct):
        shape = getattr(model, "shape", None)
        return None if shape == made.shape else f"{path} has the shape {shape}, and its family's has {made.shape}"
    if type(model) is not type(made):
        return f"{path} is a {type(model).__name__}, and its family's a {type(made).__name__}"
    if isinstance(made, tuple | list):
        if len(model) != len(made):
            return f"{path} has {len(model)} entries, and its family's {len(made)}"
        pairs = ((f"{path}.{n}", *pair) for n, pair in enumerate(zip(model, made, strict=True)))
        return next(filter(None, (changed(a, b, name) for name, a, b in pairs)), None)
    if not isinstance(made, eqx.Module):
        return None if model == made else f"{path} is {model!r}, and its family's {made!r}"
    return next(filter(None, (changed_in(field, model, made, path) for field in dataclasses.fields(made))), None)


def changed_in(field: dataclasses.Field, model: eqx.Module, made: eqx.Module, path: str) -> str | None:
    """Describe how a field of two modules of one class differs, as `changed` does."""
    name, (a, b) = f"{path}.{field.name}", (getattr(m, field.name) for m in (model, made))
    if not field.metadata.get("static"):
        return changed(a, b, name)
    remat = isinstance(made, Stack) and field.name == "remat"
    return None if remat or a == b else f"{name} is {a!r}, and its family's {b!r}"


def published_name(name: str, model: AbstractModel, family: Family) -> str:
    """Return a tensor's name in checkpoints of models with this model's parts, by the family's `beginnings`.

    In those of some heads the model's tensors lack the family's beginning (`AbstractHead.bare`).
    """
    if model.head is not None and model.head.bare:
        return name.removeprefix(beginning(family))
    begun = [pair for part, names in family.beginnings.items() if getattr(model, part) for pair in names.items()]
    old, new = next((pair for pair in begun if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)


def matrices(
    parameter: Parameter, at: tuple[int, ...], family: Family
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """Yield the tensor `parameter.names[at]`, or, if the family's `fused` lists it, the matrices of its experts.

    Each is a name, a shape, and a function that returns the values.
    """
    name = str(parameter.names[at])
    end = next((end for end in family.fused if name.endswith(end)), None)
    if end is None:
        yield name, parameter.stored_shape, functools.partial(stored, parameter, at)
        return
    parameter = dataclasses.replace(parameter, transposed=False)  # matrices of single experts are always (out, in)
    ends, shape = family.fused[end], parameter.stored_shape
    for n, (i, part) in itertools.product(range(shape[0]), enumerate(ends)):
        rows = lambda n=n, i=i: np.split(stored(parameter, (*at, n)), len(ends))[i]
        yield name.removesuffix(end) + part.format(n), (shape[1] // len(ends), shape[2]), rows


def stored(parameter: Parameter, at: tuple[int, ...]) -> np.ndarray:
    """Return the values of the tensor `parameter.names[at]`."""
    tensor = gathered(parameter.array[at])
    return tensor.swapaxes(-1, -2) if parameter.transposed else tensor
