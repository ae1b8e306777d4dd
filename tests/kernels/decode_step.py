"""Compiles one decode step of a model for an H200 or a TPU, on any machine, and lists its large results.

A step must read its weights and the cache slots that the queries see. If an instruction's result is as large as a
layer's cache, or as all experts of a layer, the compiled program has copied them. To look at one:
    python -m tests.kernels.decode_step h200 qwen3-8b 8 8192 [layers] [queries] [dtype of the cache] [format of weights]
"""

import collections
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from kernels.backends.compile_options import compile_options
from tests.kernels.gpu import mesh_of
from tests.kernels.tpu import CHIPS, ENVIRONMENT
from train.planning import breakdown, hlo
from zoo import registry
from zoo.nn.cache import init_cache
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.nn.recurrent import RecurrentCache
from zoo.quantized import BLOCKS, Holding, Kept, quantize
from zoo.surgery import map_linears, modules


needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed"
)
# Instructions that create no array: they name one, run others, or write into one in place.
NAMES = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant"}
IN_PLACE = {"dynamic-update-slice", "scatter"}


class Step(NamedTuple):
    """One decode step to compile: `layers` layers of a model, `queries` tokens in each row, bfloat16 weights."""

    model: str
    batch: int
    length: int  # slots of the cache
    layers: int = 2
    queries: int = 1
    cache: str = "bfloat16"
    quantize: str | None = None
    widen: int = 0  # tokens that may be rolled back
    changes: dict[str, Any] | None = None  # fields of the config
    pages: int | None = None  # of 64 slots, which the rows share


class Result(NamedTuple):
    """The result of an instruction of the compiled program, and how often a step runs the instruction."""

    name: str
    kind: str
    shape: str
    bytes: float
    times: int


class Compiled(NamedTuple):
    results: list[Result]  # largest first
    temporary: int  # bytes except arguments and results
    cache: float  # bytes of one layer's keys, values or latents: the smallest large array of any cache
    matrix: float  # bytes of a layer's smallest matrix; for experts, of the matrices of all
    moved: float  # bytes that the step reads and writes; a mixture is assumed to read all experts
    needed: float  # bytes of the weights and caches that it reads, and of recurrent states that it writes
    state: float  # bytes of one layer's recurrent states, one state per row; 0 without any
    kernels: int  # that the step starts


def measure(chip: str, *steps: Step) -> list[Compiled]:
    """Compiles the steps for "h200" or one of the TPUs of `tests.kernels.tpu`, in a process of their own."""
    with tempfile.NamedTemporaryFile() as result:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        process = subprocess.run(
            [sys.executable, "-m", "tests.kernels.decode_step", "--compile", chip, json.dumps(steps), result.name],
            cwd=Path(__file__).parents[2],
            env={**environment, **({"XLA_FLAGS": ""} if chip == "h200" else ENVIRONMENT)},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-5000:]
        found = json.loads(Path(result.name).read_text())
    return [Compiled([Result(*each) for each in results], *rest) for results, *rest in found]


def copies(compiled: Compiled, least: float) -> list[str]:
    """Describes the results of at least `least` bytes. Each of these is an unnecessary copy."""
    found = [f"{r.times} x {r.kind} {r.name} {r.shape}" for r in compiled.results if r.bytes >= least]
    return found + ([f"{compiled.temporary} temporary bytes"] if compiled.temporary >= least else [])


def results(text: str, least: float = 1e5) -> list[Result]:
    """Lists the results, largest first, of instructions outside of fusions that make at least `least` bytes.

    A result counts as a whole array unless an instruction or its fusion writes into the array in place.
    """
    computations = {name.removeprefix("ENTRY "): lines for name, lines in hlo.parse(text)}
    entry = next(name for name, _ in hlo.parse(text) if name.startswith("ENTRY ")).removeprefix("ENTRY ")
    found: list[Result] = []

    def visit(name: str, times: int) -> None:
        for line in computations[name]:
            if not (match := hlo.INSTRUCTION.match(line)):
                continue
            made, shape, kind, _ = match.groups()
            if kind in ("while", "conditional", "call"):
                trips = hlo.trips(line, computations) if kind == "while" else 1
                for one, several in hlo.CALLED.findall(line):
                    for called in [one] if one else re.findall(r"[\w.-]+", several):
                        if f"condition=%{called}" not in line and f"condition={called}" not in line:
                            visit(called, times * trips)
            # Neither data that a TPU moves into its fast memory, S(1), nor cuBLAS's workspace is a copy.
            kept = re.sub(r"\w+\[[\d,]*\]\{[^}]*S\(1\)\}|s8\[\d+\]", "", shape)
            size = hlo._bytes(kept, kind.endswith("-start"))
            if kind in NAMES or kind in IN_PLACE or kind.endswith("-start") or size < least:
                continue
            if (
                kind == "fusion"
                and (body := re.search(r"calls=%?([\w.-]+)", line))
                and _in_place(computations[body[1]], shape)
            ):
                continue
            aliased = line.partition("output_to_operand_aliasing=")[2].partition(")}")[0].count(":")
            if kind == "custom-call" and aliased == len(re.findall(r"\w\[[\d,]+\]", kept)):  # all of it in place
                continue
            found.append(Result(made, kind, re.sub(r"\{[^}]*\}", "", shape), size, times))

    visit(entry, 1)
    return sorted(found, key=lambda result: -result.bytes)


def _in_place(fusion: list[str], shape: str) -> bool:
    """Whether a fusion writes in place into its result of this shape, or into all of the arrays of a tuple."""
    sizes = lambda text: [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
    plain = lambda shape: re.sub(r"\{[^}]*\}", "", shape)
    writes = [m for line in fusion if (m := hlo.INSTRUCTION.match(line)) and m[3] in IN_PLACE]
    written = collections.Counter(size for m in writes for size in sizes(plain(m[2])))
    return bool(writes) and not collections.Counter(sizes(plain(shape))) - written


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """Returns a config with changed fields; JSON has lists for tuples, and objects for changes of nested configs."""
    field = lambda old, new: _changed(old, new) if isinstance(new, dict) else tuple(new) if type(new) is list else new
    return dataclasses.replace(config, **{name: field(getattr(config, name), new) for name, new in changes.items()})


def program(step: Step) -> tuple[Any, tuple[Any, ...], tuple[float, ...]]:
    """Returns the decode step, the shapes of its arguments (cache, model, tokens, positions), and four fields of
    `Compiled`: cache, matrix, needed and state.
    """
    config: Any = zoo.config(step.model)
    changes: dict[str, Any] = dict(num_hidden_layers=step.layers)
    if hasattr(config, "layer_types"):
        changes["layer_types"] = config.layer_types[-step.layers :]  # the last layers include all kinds
    if hasattr(config, "first_k_dense_replace"):
        changes["first_k_dense_replace"] = 0
    config = _changed(config, changes | (step.changes or {}))
    family = registry.family_of(config)
    model = eqx.filter_eval_shape(lambda: family.Model(config, key=jax.random.key(0)))
    in_bf16 = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype)
    model = jax.tree.map(in_bf16, model)
    if step.quantize in get_args(Kept):
        model = eqx.filter_eval_shape(as_stored, model, step.quantize)
    elif step.quantize:
        model = eqx.filter_eval_shape(quantize, model, step.quantize)
    options: Any = dict(widen=step.widen) | (dict(pages=lambda window: step.pages) if step.pages else {})
    cache = eqx.filter_eval_shape(lambda m: init_cache(m, step.batch, step.length, step.cache, **options), model)
    vectors = [x for x in jax.tree.leaves(cache) if x.ndim >= 4 and x.shape[-1] >= 16]  # not the scales
    of_layer = [x.size // x.shape[0] * x.dtype.itemsize for x in vectors]
    tokens = jax.ShapeDtypeStruct((step.batch, step.queries), jnp.int32)
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def decode(cache: Any, arrays: Any, tokens: Any, positions: Any) -> Any:
        return eqx.combine(arrays, static).decode(tokens, cache, positions=positions)

    function = jax.jit(decode, donate_argnums=0, compiler_options=compile_options("decode"))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))
    linears = [m for block in model.layers.period for _, m in modules(block, (AbstractLinear, AbstractExpertLinear))]
    matrices = [m.weight.size // m.weight.shape[0] * m.weight.dtype.itemsize for m in linears]
    looked_up = 0 if getattr(config, "tie_word_embeddings", True) else size(model.embed_tokens)
    recurrent = [c for block in cache for c in block if isinstance(c, RecurrentCache)]
    slot = lambda x: x.size // x.shape[2] * x.dtype.itemsize  # each step reads one slot, and writes one
    twice = sum(2 * (slot(c.state) + slot(c.tail)) - size(c) for c in recurrent)
    state = max((slot(c.state) // len(c.state) for c in recurrent), default=0)
    facts = (min(of_layer), min(matrices), size(model) - looked_up + size(cache) + twice, state)
    return function, (cache, arrays, tokens, tokens), facts


def as_stored(model: Any, format: Kept) -> Any:
    """Makes the shapes of a model whose checkpoint has the format: in MXFP4 experts alone, else all linear maps."""
    scale = np.dtype(dict(mxfp4=np.uint8, fp8_blocks=np.uint32, nvfp4=np.uint32).get(format, jnp.bfloat16))
    zeros = Holding(format, scale, BLOCKS[format]).zeros
    for kind in (AbstractExpertLinear,) if format == "mxfp4" else (AbstractLinear, AbstractExpertLinear):
        if any(modules(model.layers, kind)):
            model = map_linears(model, zeros, "layers.*", kind=kind)
    return model


def _compile(chip: str, steps: list[Step]) -> list[Compiled]:
    jax.config.update("jax_platforms", "cpu")
    if chip == "h200":
        mesh = mesh_of(chip)
    else:
        topology = topologies.get_topology_desc(CHIPS[chip], platform="tpu")
        mesh = Mesh(np.array(topology.devices)[:1], ("device",))
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    found = []
    for step in steps:
        with jax.set_mesh(mesh):
            function, arguments, (cache, matrix, needed, state) = program(step)
            compiled = function.lower(*jax.tree.map(on_mesh, arguments)).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
        if dump := os.environ.get("DECODE_STEP_TEXT"):
            Path(dump).write_text(text)
        assert memory is not None
        kernels = breakdown.kernels(text)
        moved, started = (sum(each(k) * k.times for k in kernels) for each in (lambda k: k.bytes, lambda _: 1))
        found.append(Compiled(results(text), memory.temp_size_in_bytes, cache, matrix, moved, needed, state, started))
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--compile", chip, steps, result]:
            Path(result).write_text(json.dumps(_compile(chip, [Step(*step) for step in json.loads(steps)])))
        case [chip, model, batch, length, *more]:
            options: dict[str, Any] = dict(zip(("cache", "quantize"), more[2:], strict=False))
            options |= dict(zip(("layers", "queries"), map(int, more[:2]), strict=False))
            (compiled,) = measure(chip, Step(model, int(batch), int(length), **options))
            print(f"{compiled.kernels:,} kernels")
            print(f"{compiled.temporary:,} temporary bytes; an array of a layer's cache has {compiled.cache:,.0f}")
            print(
                f"{compiled.moved:,.0f} bytes moved, {compiled.needed:,.0f} needed, a matrix has {compiled.matrix:,.0f}"
            )
            for result in compiled.results[:20]:
                print(f"{result.bytes:15,.0f} bytes, {result.times} x {result.kind} {result.name} {result.shape}")
        case _:
            sys.exit(__doc__)
