"""A search for the origin of NaNs in a step: the first array, and the first operation with its line of code.

The step is computed once more. Every operation gets a mark, which records whether its results have a NaN or an
infinity; inside a stack of layers there is a mark for each layer. All marks come from one compiled program, which saves
no activations for them, so it needs about the memory of the step itself.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jaxtyping import Array

from zoo.surgery import path_name


INFINITY, NAN = 1, 2
LIBRARIES = (pathlib.Path(jax.__file__).parents[1], pathlib.Path(json.__file__).parents[1])


BODIES = (
    "jit", "pjit", "closed_call", "eval_jaxpr", "remat2", "checkpoint", "scan", "custom_jvp_call", "custom_vjp_call",
)  # fmt: skip


# Operations that only pass on their operands, or choose among them, so that a NaN never begins there. (An optimizer's
# update is in a cond.)
PASSIVE = {
    "broadcast_in_dim", "concatenate", "cond", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "gather",
    "neg", "optimization_barrier", "pad", "reshape", "rev", "select_n", "sharding_constraint", "slice", "split",
    "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


class Marks(NamedTuple):
    """The marks of a program's operations. In a loop, all arrays have a leading axis for its turns.

    `made` is [operations]: 2 if the results of the operation have a NaN, 1 if they have an infinity, else 0. `inside`
    has the marks within operations that are programs themselves, by the operations' indices.
    """

    made: Any
    inside: dict[int, "Marks"]


class NaNSource(NamedTuple):
    operation: str
    where: str  # the operation's line of code
    turns: str  # turns of the loops around the operation, in words


def first(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str]]:
    """Computes `function` of arrays once more. Returns its result, and sentences on the origin of NaNs and infinities.

    The sentences name the arguments' arrays that have NaNs. If there are none, they name the first operation that made
    a NaN, and the first that made an infinity, if that comes before. Without a NaN they name the first operation that
    made an infinity.
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat, marks = jax.jit(lambda *values: _marked(program, values))(*jax.tree.leaves(arguments))
    result = jax.tree.unflatten(jax.tree.structure(shape), flat)
    paths, values = zip(*jax.tree_util.tree_leaves_with_path(arguments), strict=True)
    given = jax.device_get(jax.jit(lambda values: jnp.stack([_worst([value]) for value in values]))(values))
    names = [path_name(path) for path, bad in zip(paths, given, strict=True) if bad == 2]
    if names:
        more = f", and {len(names) - 1} more arrays" if names[1:] else ""
        return result, [f"{names[0]}{more} had NaNs before the step."]
    marks = jax.device_get(marks)
    if (found := _first(program, marks, NAN)) is None:
        found = _first(program, marks, INFINITY)
        return result, [] if found is None else [f"The first infinity is made by {_sentence(found)}"]
    said = [f"The first NaN is made by {_sentence(found)}"]
    before = _first(program, marks, INFINITY)
    if before and before != found and not given.any():
        said.append(f"The first infinity is made by {_sentence(before)}")
    return result, said


def _sentence(found: NaNSource) -> str:
    return f"`{found.operation}` at {found.where}{found.turns}."


def _worst(values: Sequence[Any]) -> Array:
    """Returns 2 if there is a NaN among the values, 1 if there is +inf, or else 0. (-inf is usual in masks.)"""
    arrays = [v for v in values if hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating) and v.size]
    kind = lambda a: jnp.max(jnp.where(jnp.isnan(a), 2, jnp.where(jnp.isposinf(a), 1, 0)).astype(jnp.int8))
    return functools.reduce(jnp.maximum, map(kind, arrays), jnp.zeros((), jnp.int8))


def _marked(program: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Marks]:
    """Evaluates a program. Returns its results, and its marks."""
    jaxpr, values = program.jaxpr, dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    made, inside = [], {}
    for n, operation in enumerate(jaxpr.eqns):
        given = [read(atom) for atom in operation.invars]
        if body := _body(operation):
            turns = _turns if operation.primitive.name == "scan" else lambda _, body, given: _marked(body, given)
            results, inside[n] = turns(operation, body, given)
        else:
            parameters = operation.primitive.get_bind_params(operation.params)
            with operation.ctx.manager:
                results = operation.primitive.bind(*given, **parameters)
            results = results if operation.primitive.multiple_results else [results]
        passive = operation.primitive.name in PASSIVE
        made.append(_worst([] if passive else results))
        values |= dict(zip(operation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars], Marks(jnp.stack(made) if made else jnp.zeros(0, jnp.int8), inside)


def _body(operation: Any) -> ClosedJaxpr | None:
    """Returns the program that an operation runs, once or in turns; None if the operation runs no program."""
    if operation.primitive.name not in BODIES:
        return None
    found = next((operation.params[key] for key in ("jaxpr", "call_jaxpr") if key in operation.params), None)
    return found if isinstance(found, ClosedJaxpr) or found is None else ClosedJaxpr(found, [])


def _turns(operation: Any, body: ClosedJaxpr, given: Sequence[Any]) -> tuple[list[Any], Marks]:
    """Evaluates a scan. Returns its results, and the marks of each of its turns."""
    own = lambda atoms, inner: [a.aval.shape == b.aval.shape for a, b in zip(atoms, inner, strict=True)]
    ins, outs = own(operation.invars, body.jaxpr.invars), own(operation.outvars, body.jaxpr.outvars)
    carried, kept = sum(outs), sum(ins)  # operands: first those that all turns share, then the carry, then slices
    constants, carry, slices = given[: kept - carried], given[kept - carried : kept], given[kept:]

    def turn(carry: Any, slices: Any) -> tuple[Any, Any]:
        results, marks = _marked(body, [*constants, *carry, *slices])
        return results[:carried], (results[carried:], marks)

    p = operation.params
    carry, (stacked, marks) = jax.lax.scan(turn, carry, slices, length=p["length"], reverse=p["reverse"])
    return [*carry, *stacked], marks


def _first(program: ClosedJaxpr, marks: Marks, kind: int) -> NaNSource | None:
    """Finds the first operation, in the order of time, that made a NaN; or, for `kind` INFINITY, a NaN or infinity."""
    for n, operation in enumerate(program.jaxpr.eqns):
        if marks.made[n] < kind:
            continue
        body = _body(operation)
        if body is None:
            return NaNSource(operation.primitive.name, _where(operation), "")
        inside = marks.inside[n]
        if operation.primitive.name != "scan":
            if found := _first(body, inside, kind):
                return found
            continue  # a constant of the program, such as a NaN in the branch that is not taken
        length = operation.params["length"]
        order = range(length)[::-1] if operation.params["reverse"] else range(length)
        for turn in order:
            at = jax.tree.map(lambda a, turn=turn: a[turn], inside)
            if at.made.size and at.made.max() >= kind and (found := _first(body, at, kind)):
                way = ", backwards" if operation.params["reverse"] else ""
                return found._replace(turns=f", in turn {turn + 1} of {length}{way}{found.turns}")
    return None


def _where(operation: Any) -> str:
    """Returns the innermost line of code outside of libraries, and the operation's scopes."""
    frames = [f for f in operation.source_info.traceback.frames if not _of_library(f.file_name)]
    line = f"{frames[0].file_name}:{frames[0].line_num} ({frames[0].function_name})" if frames else "an unknown line"
    scopes = str(operation.source_info.name_stack)
    return f"{line} [{scopes}]" if scopes else line


def _of_library(name: str) -> bool:
    return name.startswith("<") or any(pathlib.Path(name).is_relative_to(folder) for folder in LIBRARIES)
