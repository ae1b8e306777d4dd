"""Checks and times the programs of `benchmarks.programs` on the device.

JAX offers no device events. So the host queues as many calls as take 20 ms or more together, waits for the last, and
divides its clock's time by their number. Nothing is subtracted. If a pass takes little time, one program makes several
passes, one after the other on different arrays, so that the device never waits for the host.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels
from benchmarks.cases import Case
from benchmarks.gpu import regions
from benchmarks.programs import Arrays, Program, program_of
from kernels import dispatch
from kernels.backends.device import device


# Greatest relative error, in the Frobenius norm, against the reference in float32: of outputs, and of gradients.
BOUNDS = {"bfloat16": (4e-3, 1e-2), "float32": (1e-5, 1e-5)}


def platform() -> tuple[str, str]:
    """Returns the default device's platform and kind, such as ("gpu", "NVIDIA H200")."""
    return device().platform, device().kind


def refusals(case: Case) -> dict[str, str | None]:
    """Returns our implementations of a case's operation for GPUs, each with its reason to refuse the case, or None."""
    if case.operation not in dispatch.operations():
        return {}
    program = program_of(case)
    choice = kernels.explain(program.function(None), *jax.eval_shape(program.arguments, jax.random.key(0)))[0]
    known = {choice.implementation: None} | choice.others
    return {name: why for name, why in known.items() if name not in ("reference", "tpu")}


def measure(case: Case, name: str, which: str, *, seconds: float, count: int) -> dict[str, Any]:
    """Returns "ms" of a call (a list), "error", its "bound", and the bytes of "memory" beside arguments and results of
    a pass.

    Raises:
        MemoryError: if the device's memory is too small.
    """
    program = program_of(case, name)
    sets, d_outs = _arrays(type(program), case)
    run, given = _launch(program, program.function(name), which, sets, d_outs)
    compiled = run.lower(given).compile()
    memory, stats = compiled.memory_analysis(), jax.devices()[0].memory_stats()
    if stats and memory.temp_size_in_bytes + memory.output_size_in_bytes > stats["bytes_limit"] - stats["bytes_in_use"]:
        raise MemoryError(f"it takes {memory.temp_size_in_bytes / 1e9:.0f} GB beside its arguments and results")
    out = _checked(program, which, sets[0], compiled(given)[0])
    pairs = zip(out, _truth(type(program), case, which), strict=True)
    error = float(np.max([_difference(ours, true) for ours, true in pairs]))
    bound = BOUNDS[str(out[0].dtype)][which != "forward"]
    del out, pairs
    times = regions(functools.partial(_queue, compiled, given), seconds=seconds, count=count)
    ms = [ms / case.sets for ms in times]
    return {"ms": ms, "error": error, "bound": bound, "memory": memory.temp_size_in_bytes}


def _queue(compiled: Callable[..., Any], given: Any, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        out = compiled(given)
    jax.block_until_ready(out)
    return time.perf_counter() - begin


@functools.lru_cache(maxsize=1)
def _arrays(kind: type[Program], case: Case) -> tuple[list[Arrays], list[Any]]:
    """Returns the sets of arguments, and for each the gradient of its output; all are normally distributed."""
    program, keys = kind(case), jax.random.split(jax.random.key(time.time_ns() % 2**32), (case.sets, 2))
    sets = [jax.jit(program.arguments)(key) for key, _ in keys]
    out = jax.eval_shape(program.function("reference"), *sets[0])
    gradient = jax.jit(lambda key: jax.random.normal(key, out.shape, out.dtype) if out.shape else jnp.ones_like(out))
    return sets, [gradient(key) for _, key in keys]


def _launch(
    program: Program, function: Callable[..., Any], which: str, sets: list[Arrays], d_outs: list[Any]
) -> tuple[Any, list[Any]]:
    """Returns a jitted program that makes one pass over each set, and its argument."""
    if which == "forward":
        return jax.jit(functools.partial(_each, lambda *arguments: function(*arguments))), sets

    def both(arguments: Arrays, d_out: Any) -> tuple[Any, Any]:
        out, pull = pull_back(program, function, which, arguments)
        return pull(d_out), out

    if which == "all":
        return jax.jit(functools.partial(_each, both)), list(zip(sets, d_outs, strict=True))
    pulls = jax.jit(lambda sets: [pull_back(program, function, which, arguments)[1] for arguments in sets])(sets)
    return jax.jit(functools.partial(_each, lambda pull, d_out: pull(d_out))), list(zip(pulls, d_outs, strict=True))


def pull_back(
    program: Program, function: Callable[..., Any], which: str, arguments: Arrays
) -> tuple[Any, Callable[..., Any]]:
    """Returns the output, and the function from the output's gradient to the gradients of a pass."""

    def of(*some: Any) -> Any:
        every = dict(enumerate(arguments)) | dict(zip(program.gradients[which], some, strict=True))
        return function(*every.values())

    return jax.vjp(of, *(arguments[n] for n in program.gradients[which]))


def _each(function: Callable[..., Any], sets: list[Any]) -> list[Any]:
    """Calls `function(*arguments)` for each set, in order: XLA can neither fuse the calls nor overlap them."""
    outs: list[Any] = []
    for arguments in sets:
        if outs:
            arguments, outs[-1] = lax.optimization_barrier((arguments, outs[-1]))
        outs.append(function(*arguments))
    return outs


def _checked(program: Program, which: str, arguments: Arrays, out: Any) -> list[Any]:
    """Returns the parts of a pass's result that can be compared with `_truth`."""
    if which == "forward":
        return [program.part_of_output(out)]
    gradients = dict(zip(program.gradients[which], out[0] if which == "all" else out, strict=True))
    parts = program.part(tuple((dict(enumerate(arguments)) | gradients).values()))
    return [parts[n] for n in gradients if n in program.checked]


@functools.lru_cache(maxsize=4)
def _truth(kind: type[Program], case: Case, which: str) -> list[Any]:
    """Returns the reference's results on the parts, in float32."""
    program, (sets, d_outs) = kind(case), _arrays(kind, case)
    wide = lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    part, d_out = jax.tree.map(wide, (program.part(sets[0]), program.part_of_output(d_outs[0])))
    with jax.default_matmul_precision("highest"):
        run, given = _launch(program, program.function("reference"), which, [part], [d_out])
        out = run(given)[0]
    if which == "forward":
        return [out]
    gradients = zip(program.gradients[which], out[0] if which == "all" else out, strict=True)
    return [gradient for n, gradient in gradients if n in program.checked]


@jax.jit
def _difference(ours: Any, true: Any) -> Any:
    ours, true = ours.astype(jnp.float32), true.astype(jnp.float32)
    return jnp.linalg.norm((ours - true).ravel()) / jnp.linalg.norm(true.ravel())
