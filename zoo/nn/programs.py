"""Runs a function as several compiled programs, so that what it calls many times is compiled once.

XLA compiles a function anew for each call of it in a program: 30 layers take 30 times as long as one. `own_program`
marks such a function. `Programs` cuts a traced function before and after each call of a marked one. The host then calls
one program after the other, which takes some 40 microseconds each, and runs the loops that have marked calls in them.
"""

import collections
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from kernels import dispatch


T = TypeVar("T")
MOST = 64  # functions that are kept, of all shapes of their arguments
MARK = "own_program_"  # the beginning of the names of marked functions


def own_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function of trees of arrays as a program of its own. Outside of `Programs` it is called as any other."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = MARK + function.__name__
    return jax.jit(call)


def in_programs(function: Callable[..., T], free: int | None) -> Callable[..., T]:
    """Compiles a function like `jax.jit(function, static_argnums=0)`, but cut into programs.

    Args:
        function: takes something that can be hashed, and trees of arrays, of which the first lies on the device that
            runs the programs; returns a tree of arrays.
        free: the number of the tree whose memory may be reused, from 0 on; None: there is none.
    """

    @functools.lru_cache(maxsize=MOST)
    def cut(static: Hashable, trees: Any, types: tuple[Any, ...], device: Any, _: Hashable) -> tuple[Programs, Any]:
        shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
        arguments = jax.tree.unflatten(trees, shapes)
        traced = jax.jit(function, static_argnums=0).trace(static, *arguments)
        may = [n == free for n, tree in enumerate(arguments) for _ in jax.tree.leaves(tree)]
        return Programs(traced.jaxpr, may, device), jax.tree.structure(traced.out_info)

    @functools.wraps(function)
    def call(static: Hashable, *arguments: Any) -> T:
        arrays, trees = jax.tree.flatten(arguments)
        (on,) = arrays[0].devices()
        programs, result = cut(static, trees, tuple(map(jax.typeof, arrays)), on, dispatch.context())
        return jax.tree.unflatten(result, programs(arrays))

    return call


class Programs:
    """A traced function as programs, each of which is compiled when it is first called."""

    def __init__(self, traced: Any, free: Sequence[bool], device: Any):
        """
        Args:
            traced: the function, as `jax.jit(function).trace(...).jaxpr` has it.
            free: for each argument whether its memory may be reused.
            device: where the programs run.
        """
        jaxpr, pieces = traced.jaxpr, list(_pieces(traced.jaxpr))
        original: dict[Any, Any] = {}  # variable that a piece returns as it came -> what has the array already
        resolved = lambda atoms: [v if isinstance(v, Literal) else original.get(v, v) for v in atoms]
        inputs = []
        for piece in pieces:
            inputs.append(resolved(piece.inputs))
            original |= {piece.results[result]: inputs[-1][n] for result, n in piece.unchanged.items()}
        returned = resolved(jaxpr.outvars)

        last = {v: n for n, taken in enumerate([*inputs, returned]) for v in _variables(taken)}
        owned = {v for v, is_free in zip(jaxpr.invars, free, strict=True) if is_free}
        owned.update(v for piece in pieces for v in piece.outputs)
        ends = lambda v, n: not isinstance(v, Literal) and v in owned and last[v] == n
        # Calls of one function share a program, which may reuse only what each of them may.
        reused: dict[int, list[bool]] = {}
        for n, (piece, taken) in enumerate(zip(pieces, inputs, strict=True)):
            may = [ends(v, n) and _variables(taken).count(v) == 1 for v in taken]
            others = reused.setdefault(id(piece.traced), may)
            reused[id(piece.traced)] = [a and b for a, b in zip(may, others, strict=True)]
        distinct = {id(piece.traced): piece for piece in pieces}
        compiled = {key: piece.compiled(reused[key], device) for key, piece in distinct.items()}

        # Arrays lie in a list, in which each variable and each literal has a place.
        self._held: list[Any] = []
        places: dict[Any, int] = {}

        def place(atom: Any, value: Any = None) -> int:
            literal, aval = isinstance(atom, Literal), atom.aval
            if not literal and atom in places:
                return places[atom]
            self._held.append(jnp.asarray(atom.val, aval.dtype) if literal else value)
            if not literal:
                places[atom] = len(self._held) - 1
            return len(self._held) - 1

        for v, value in zip(jaxpr.constvars, traced.consts, strict=True):
            place(v, value)
        self._arguments = list(map(place, jaxpr.invars))
        self._steps = [
            (
                compiled[id(piece.traced)],
                list(map(place, taken)),
                [place(v) for v in _variables(taken) if last[v] == n],
                list(map(place, piece.outputs)),
            )
            for n, (piece, taken) in enumerate(zip(pieces, inputs, strict=True))
        ]
        self._returned = list(map(place, returned))
        kept = {*map(id, jaxpr.constvars)}
        self._copied = [isinstance(v, Literal) or id(v) in kept for v in returned]  # whose memory a caller may reuse

    def __call__(self, arrays: Iterable[Any]) -> list[Array]:
        """Computes the function's results, in order. Like its arguments they are the leaves of trees."""
        held = self._held.copy()
        for at, array in zip(self._arguments, arrays, strict=True):
            held[at] = array
        for compute, inputs, ended, outputs in self._steps:
            results = compute(*[held[at] for at in inputs])
            for at in ended:  # so that memory is free as early as it may be
                held[at] = None
            for at, array in zip(outputs, results, strict=True):
                held[at] = array
        pairs = zip(self._returned, self._copied, strict=True)
        return [jnp.array(held[at]) if copied else held[at] for at, copied in pairs]


class _Piece(NamedTuple):
    """Equations of a traced function that run as one program, or a loop of several programs."""

    traced: Any  # the equations; of a loop, those of its body
    inputs: Sequence[Any]
    results: Sequence[Any]
    loop: Any = None  # the equation of the loop, if it is one

    @property
    def unchanged(self) -> dict[int, int]:
        """Maps the numbers of results that are inputs as they came to the inputs'. The program does not return them."""
        jaxpr = self.traced.jaxpr
        if self.loop is not None:
            first, start = self.loop.params["body_nconsts"], len(self.inputs) - len(self.results)
            return {n: start + n for n, v in enumerate(jaxpr.outvars) if v is jaxpr.invars[first + n]}
        numbers = {v: n for n, v in enumerate(jaxpr.invars)}
        return {n: numbers[v] for n, v in enumerate(jaxpr.outvars) if not isinstance(v, Literal) and v in numbers}

    @property
    def outputs(self) -> list[Any]:
        """The variables of the results that the program returns."""
        unchanged = self.unchanged
        return [v for n, v in enumerate(self.results) if n not in unchanged]

    def compiled(self, may: Sequence[bool], device: Any) -> Callable[..., Sequence[Array]]:
        """Returns the program, which may reuse the memory of some inputs: of those like which it has an output."""
        if self.loop is not None:
            return _loop(self.loop, may, device)
        unchanged = self.unchanged
        returned = tuple(n for n in range(len(self.results)) if n not in unchanged)
        return _compiled(self.traced, returned, tuple(may), device)


@functools.lru_cache(maxsize=MOST)
def _compiled(traced: Any, returned: Sequence[int], may: Sequence[bool], device: Any) -> Callable[..., Sequence[Array]]:
    """Returns the program of a traced function. Functions that call the same marked one share its program."""
    jaxpr = traced.jaxpr
    outvars = [jaxpr.outvars[n] for n in returned]
    kinds = collections.Counter((v.aval.shape, v.aval.dtype) for v in outvars)
    donated = []
    for n, v in enumerate(jaxpr.invars):
        if may[n] and kinds[kind := (v.aval.shape, v.aval.dtype)]:
            kinds[kind] -= 1
            donated.append(n)
    compute = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(outvars=outvars), traced.consts))
    # Its place is said, since arrays that nobody has placed would otherwise have a program of their own.
    return jax.jit(compute, donate_argnums=donated, in_shardings=SingleDeviceSharding(device))


def _loop(eqn: Any, may: Sequence[bool], device: Any) -> Callable[..., Sequence[Array]]:
    """Returns a function that runs a `while_loop` whose body is cut."""
    params, body = eqn.params, eqn.params["body_jaxpr"]
    ask = jax.jit(jaxpr_as_fun(params["cond_jaxpr"]), in_shardings=SingleDeviceSharding(device))
    consts, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    # What the body returns as it came, or twice, is not its own. The caller gets copies of it, if it gets it at all.
    results, passed = body.jaxpr.outvars, body.jaxpr.invars[params["body_nconsts"] :]
    own = [not isinstance(v, Literal) and v not in body.jaxpr.invars and results.count(v) == 1 for v in results]
    programs = Programs(body, [False] * params["body_nconsts"] + own, device)

    def run(*arrays: Array) -> Sequence[Array]:
        given, carry = arrays[consts:start], arrays[start:]
        carry = [
            jnp.array(x) if is_own and not free else x for x, is_own, free in zip(carry, own, may[start:], strict=True)
        ]
        while ask(*arrays[:consts], *carry)[0]:
            carry = programs([*given, *carry])
        found = zip(carry, own, results, passed, strict=True)
        return [x if is_own else jnp.array(x) for x, is_own, v, came in found if v is not came]

    return run


def _pieces(jaxpr: Any) -> Iterator[_Piece]:
    """Cuts a function into pieces, in the order in which they run. An equation is in the first one that it can be."""
    cuts: list[Any] = []
    between: list[list[Any]] = [[]]
    made_by: dict[Any, int] = {}  # the number of cuts after which a variable is there
    for eqn in jaxpr.eqns:
        if _is_marked(eqn) or _is_cut_loop(eqn):
            cuts.append(eqn)
            between.append([])
            at = len(cuts)
        else:
            at = max((made_by.get(v, 0) for v in _variables(eqn.invars)), default=0)
            between[at].append(eqn)
        made_by |= dict.fromkeys(eqn.outvars, at)

    wanted, found = set(_variables(jaxpr.outvars)), []
    for eqns in reversed([each for n in range(len(between)) for each in (between[n], cuts[n : n + 1]) if each]):
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        inputs = [v for v in dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars)) if v not in made]
        found.append((eqns, inputs, [v for v in made if v in wanted]))
        wanted.update(inputs)
    for eqns, inputs, outputs in reversed(found):
        (first, *_) = eqns
        if _is_marked(first):
            yield _Piece(first.params["jaxpr"], first.invars, first.outvars)
        elif _is_cut_loop(first):
            yield _Piece(first.params["body_jaxpr"], first.invars, first.outvars, first)
        else:
            own = Jaxpr((), inputs, outputs, eqns, debug_info=jaxpr.debug_info.with_unknown_names())
            yield _Piece(ClosedJaxpr(own, ()), inputs, outputs)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _is_marked(eqn: Any) -> bool:
    return str(eqn.params.get("name", "")).startswith(MARK)


def _is_cut_loop(eqn: Any) -> bool:
    if eqn.primitive.name != "while":
        return False
    return any(_is_marked(each) or _is_cut_loop(each) for each in eqn.params["body_jaxpr"].jaxpr.eqns)
