"""Offloading of the optimizer's arrays and the float32 weights to the memory of the devices' host: --offload optimizer.

A step moves these arrays to its devices and back one after another (`train.step.step`), so that a device holds few of
them at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core
from jax.sharding import Sharding

from train.base.places import HostPlace


T = TypeVar("T")
HOST = "pinned_host"  # memory of the host that devices read and write
Space = jax.memory.Space


def host(place: Sharding) -> Sharding:
    """Returns the same sharding in the memory of the devices' host.

    Raises:
        ValueError: the devices cannot use their host's memory.
    """
    device = next(iter(place.device_set))
    kinds = [memory.kind for memory in device.addressable_memories()]
    if not kinds and isinstance(place, jax.NamedSharding):  # a GPU that is not here
        return HostPlace(place.mesh, place.spec)
    if HOST not in kinds:
        raise ValueError(f"--offload optimizer: {device.device_kind} can't use its host's memory. Leave it out.")
    return place.with_memory_kind(HOST)


def is_on_host(array: Any) -> bool:
    """Whether an array, or a shape with a sharding, is in the memory of the host."""
    return array.sharding.memory_kind == HOST


def is_moved(array: Any) -> bool:
    """Whether an array is in the memory of the host, by its type: works in a function that is traced."""
    return isinstance(array, jax.Array) and jax.typeof(array).memory_space == Space.Host


def to_device(tree: T) -> T:
    """Moves the arrays of a tree that are in the memory of the host to their devices."""
    return jax.tree.map(lambda a: jax.device_put(a, Space.Device) if is_moved(a) else a, tree)


def to_host(tree: T) -> T:
    """Moves the arrays of a tree to the memory of their devices' host, in a function that is traced."""
    return jax.device_put(tree, Space.Host)


def one_by_one(function: Callable[[Any], T], trees: Iterable[Any]) -> list[T]:
    """Computes `function` of each tree on the devices. A tree is moved there when the result of the last is done."""
    done = []
    for tree in trees:
        tree, _ = jax.lax.optimization_barrier((tree, done[-1:]))
        done.append(function(to_device(tree)))
    return done


def streamed_update(function: Callable[[T], T], tree: T, choose: Callable[[Any, Any], Any], kept: T, after: Any) -> T:
    """Computes `jax.tree.map(choose, function(tree), kept)` for arrays on the host, few of them on devices at a time.

    The operations are those of `function`, in another order: its results are computed one after another, and each
    result goes back to the host as soon as it is known. An argument is moved to the devices when it is first needed,
    but not before `after` and the last results are computed. (Calling `function` with one array at a time would give
    other bits: XLA rounds quotients differently if several arrays are divided by the same number.)

    Args:
        function: maps a tree to a tree of the same structure. It is traced.
        kept: a tree like `tree`, with the same arrays on the host.
    """
    leaves, structure = jax.tree.flatten(tree)
    others = jax.tree.leaves(kept)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    program = jax.make_jaxpr(lambda *flat: jax.tree.leaves(function(structure.unflatten(flat))))(*shapes)
    arguments = {object(): n for n in range(len(leaves))}
    operations, results = _flat(program.jaxpr, [*map(_Value, program.consts), *arguments])
    names, values, found = [*arguments], {}, {}

    def value(name: Any) -> Any:
        if isinstance(name, _Value):
            return name.value
        if name not in values and name in arguments:
            array = leaves[arguments[name]]
            values[name] = to_device(jax.lax.optimization_barrier((array, after))[0]) if is_moved(array) else array
        elif name not in values:
            operation, inputs, outputs = operations[name]
            given = [value(each) for each in inputs]
            with operation.ctx.manager:
                made = operation.primitive.bind(*given, **operation.primitive.get_bind_params(operation.params))
            values.update(zip(outputs, made if operation.primitive.multiple_results else [made], strict=True))
        return values[name]

    for result in results:
        value(result)
        ready = [n for n, name in enumerate(results) if n not in found and (isinstance(name, _Value) or name in values)]
        # The barrier keeps XLA from fusing these results with `choose`, which would round them differently.
        new = jax.lax.optimization_barrier([value(results[n]) for n in ready])
        for n, array in zip(ready, new, strict=True):
            away = is_moved(leaves[n])
            found[n] = to_host(choose(array, value(names[n]))) if away else choose(array, others[n])
        after = [found[n] for n in ready if is_moved(leaves[n])] or after
    return structure.unflatten(found[n] for n in range(len(results)))


class _Value(NamedTuple):
    """Wraps a literal, so that it can be told from a variable's name."""

    value: Any


def _flat(jaxpr: Any, inputs: Sequence[Any]) -> tuple[dict[Any, tuple[Any, list[Any], list[Any]]], list[Any]]:
    """Flattens a program: replaces its calls by the operations of the called programs.

    Returns name of a result -> (its operation, names that the operation reads, names of its results), and the names of
    the program's results.
    """
    names = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    read = lambda atom: _Value(atom.val) if isinstance(atom, core.Literal) else names[atom]
    found = {}
    for operation in jaxpr.eqns:
        given = [read(atom) for atom in operation.invars]
        if operation.primitive.name in ("jit", "pjit"):
            inner = operation.params["jaxpr"]
            inside, made = _flat(inner.jaxpr, [*map(_Value, inner.consts), *given])
            found |= inside
        else:
            made = [object() for _ in operation.outvars]
            found |= dict.fromkeys(made, (operation, given, made))
        names |= zip(operation.outvars, made, strict=True)
    return found, [read(atom) for atom in jaxpr.outvars]
