"""Parsing of XLA's dump of a compiled program: the traffic between devices, and the activations that are saved.

`compiled.as_text()` would be the same text, but fails for TPUs with jaxlib 0.10.2.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zoo.nn.moe import SCOPE


RINGS = ("all-gather", "all-reduce", "reduce-scatter")  # each device passes on to the next one
KINDS = (*RINGS, "all-to-all", "collective-permute")
COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
# TPU7x's SparseCores run collectives: these are then in a computation that a custom call calls.
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|(?:branch|called)_computations=\{([^}]*)\}"
)
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)")
# Instructions whose result has the operand's values. Fusions of one operand count, too, such as a conversion.
ALIASES = ("bitcast", "convert", "copy", "copy-start", "copy-done", "fusion", "get-tuple-element", "reshape")


class Collective(NamedTuple):
    """One collective operation of the program."""

    kind: str
    sent: float  # bytes that each device of the group sends, by the algorithm that sends the fewest
    group: tuple[int, ...]  # the devices of the first group, numbered in the order of the mesh
    times: int  # number of runs in a step


def collectives(text: str, devices: int) -> list[Collective]:
    """Lists the collectives in the text of an optimized module. In loops of unknown length a collective counts once."""
    computations = dict(parse(text))
    entry = next(name for name in computations if name.startswith("ENTRY "))
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in computations[name]:
            for one, several in CALLED.findall(line):
                for called in [one] if one else re.findall(r"[\w.-]+", several):
                    if called in computations and " async-done(" not in line and " async-update(" not in line:
                        visit(called, count * trips(line, computations) if f"body=%{called}" in line else count)

    visit(entry, 1)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if times[name] and (match := COLLECTIVE.search(line)):
                result, kind, start = match.groups()
                # A TPU's reduce-scatter is an all-reduce in a fusion that uses only a part of the result.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
                group = _group(line, devices)
                size = _bytes(result, bool(start))
                found.append(Collective(kind, _sent(kind, size, len(group), name), group, times[name]))
    return found


def by_axis(found: list[Collective], shape: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Sums the bytes that a device sends in a step, by kind and by the axes of a mesh of this shape, such as "fsdp"."""
    total: dict[tuple[str, str], float] = {}
    for each in found:
        places = np.array(np.unravel_index(each.group, tuple(shape.values())))
        axes = [axis for axis, at in zip(shape, places, strict=True) if len(set(at.tolist())) > 1]
        if axes:
            key = each.kind, ",".join(axes)
            total[key] = total.get(key, 0) + each.sent * each.times
    return total


def activations(text: str) -> float:
    """Returns the bytes of a device that one loop writes and a later loop reads: activations for the backward pass.

    Values that a loop only passes on, such as weights, and values in the host's memory do not count. If several
    computations run one after another, such as microbatches, the largest counts.
    """
    computations = {name.removeprefix("ENTRY "): lines for name, lines in parse(text)}
    return max(_between_loops(lines, computations) for lines in computations.values())


def _between_loops(lines: list[str], computations: Mapping[str, list[str]]) -> float:
    sizes: dict[str, float] = {}  # name of an element that a loop writes -> its bytes
    aliases: dict[str, str] = {}  # other name of an element -> its name
    tuples: dict[str, list[str]] = {}
    read: set[str] = set()
    for line in lines:
        if match := INSTRUCTION.match(line):
            name, result, kind, operands = match.groups()
            values = [aliases.get(operand, operand) for operand in names(operands)]
            if kind == "while":
                read.update(tuples.get(values[0], []))
                elements = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", result)
                written = _written(computations[re.findall(r"body=%?([\w.-]+)", line)[0]])
                on_device = {i for i, element in enumerate(elements) if "S(5)" not in element}
                sizes |= {f"{name}#{i}": _bytes(elements[i], False) for i in written & on_device}
            elif kind == "tuple":
                tuples[name] = values
            elif kind in ALIASES and len(values) == 1:
                index = re.search(r"index=(\d+)", line) if kind == "get-tuple-element" else None
                aliases[name] = f"{values[0]}#{index[1]}" if index else values[0]
    return sum((size for name, size in sizes.items() if name in read), 0.0)


def _written(body: list[str]) -> set[int]:
    """Returns the indices of the elements of a loop's tuple that its body changes, and not only passes on."""
    elements = _elements(body)
    return {i for i, name in enumerate(_results(body)) if elements.get(name) != i}


def _elements(loop: list[str]) -> dict[str, int]:
    """Maps names in a loop's body, or condition, to the indices of the tuple's elements that the names stand for."""
    given = next(match[1] for line in loop if (match := INSTRUCTION.match(line)) and match[3] == "parameter")
    found = {f"{given}#{index}": int(index) for index in re.findall(rf"%{re.escape(given)}#(\d+)", "\n".join(loop))}
    for line in loop:
        if (match := INSTRUCTION.match(line)) and match[3] == "get-tuple-element" and names(match[4]) == [given]:
            found[match[1]] = int(re.findall(r"index=(\d+)", line)[0])
    return found


def _results(body: list[str]) -> list[str]:
    """Returns the names of the values that a loop's body returns, or [] if the body does not make the tuple itself."""
    (root,) = (line for line in body if line.lstrip().startswith("ROOT "))
    found = re.search(r" tuple\(([^)]*)\)", root)
    return names(found[1]) if found else []


def names(operands: str) -> list[str]:
    return re.findall(r"[\w.-]+(?:#\d+)?(?=,|$)", operands)


def parse(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields name and instructions of each computation; "ENTRY " comes before the name of the entry computation."""
    name, lines = "", []
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name, lines = (match[1] or "") + match[2], []
        elif line.startswith("}") and name:
            yield name, lines
            name = ""
        elif name:
            lines.append(line)


def trips(line: str, computations: Mapping[str, list[str]]) -> int:
    """Returns the number of turns of a loop: XLA's count or, for TPUs, which have none, from the loop's counter.

    The counter starts at zero. A loop of unknown length counts as one turn; that of the rows that do not fit the
    buffers for experts as none, since there are none if routers choose all experts equally often.
    """
    if f"/{SCOPE}/" in line:
        return 0
    if known := re.search(r"known_trip_count[^\d]*(\d+)", line):
        return int(known[1])
    condition, body = (computations[re.findall(rf"{word}=%?([\w.-]+)", line)[0]] for word in ("condition", "body"))
    bounds = [int(n) for each in condition for n in re.findall(r"constant\((\d+)\)", each)]
    if len(bounds) != 1 or not any("direction=LT" in each for each in condition):
        return 1
    return -(-bounds[0] // _step(condition, body))


def _step(condition: list[str], body: list[str]) -> int:
    """Returns the increment of a loop's counter: 2 in loops that pass data round the devices, which XLA unrolls."""
    named = {match[1]: match for line in body if (match := INSTRUCTION.match(line))}
    given, results = _elements(condition), _results(body)
    for compared in re.findall(r" compare\(%([\w.#-]+)", "\n".join(condition)):
        counter = named.get(results[given[compared]]) if results and compared in given else None
        for operand in names(counter[4]) if counter and counter[3] == "add" else ():
            if operand in named and named[operand][3] == "constant":
                return int(named[operand][4])
    return 1


def _group(line: str, devices: int) -> tuple[int, ...]:
    """Returns the first group of devices that exchange data, from any of XLA's notations. A permutation has pairs."""
    if pair := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return int(pair[1]), int(pair[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, listed[1].split(",")))
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, reshaped = ([int(n) for n in tiled[i].split(",")] for i in (1, 2))
        order = [int(n) for n in tiled[3].split(",")] if tiled[3] else range(len(reshaped))
        ids = np.arange(devices).reshape(reshaped).transpose(order).reshape(shape)
        return tuple(ids[0].tolist())
    ordered = r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|[\d,]*)\))?"  # else in the order of their numbers
    if named := re.search(rf"replica_groups=mesh\[([^]]*)\]{ordered} \{{([^}}]*)\}}", line):
        axes, reshaped, order, taken = named.groups()
        shape = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", axes)}
        ids = np.arange(devices)
        if reshaped:
            ids = ids.reshape([int(n) for n in reshaped.split(",")])
            ids = ids.transpose([int(n) for n in order.split(",")] if order else range(ids.ndim))
        ids = ids.reshape(tuple(shape.values()))
        # An axis may be given in part: 'x':(2)4 is its part of size 4 that follows a part of size 2. A group has the 4
        # positions of the part.
        parts = {axis: (before, size) for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", taken)}
        for n, axis in enumerate(shape):
            if axis not in parts:
                ids = ids.take([0], axis=n)
            elif parts[axis][1]:
                before, size = map(int, parts[axis])
                ids = ids.take(np.arange(size) * (shape[axis] // (before * size)), axis=n)
        return tuple(ids.ravel().tolist())
    return tuple(range(devices))


def bytes_of(shapes: str) -> float:
    """Returns the bytes of all arrays in a text, such as "(bf16[8,128]{1,0}, pred[8])"."""
    size = lambda dtype: 1.0 if dtype == "pred" else int(bits[0]) / 8 if (bits := re.search(r"\d+", dtype)) else 0.0
    found = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    return sum((size(dtype) * math.prod(int(n) for n in sizes.split(",") if n) for dtype, sizes in found), 0.0)


def _bytes(result: str, start: bool) -> float:
    """Returns the bytes of a result. The result of an asynchronous start counts without the operands in it."""
    shapes = re.findall(r"\w+\[[\d,]*\]", result)
    if start and result.startswith("(("):
        shapes = shapes[len(shapes) // 2 :]
    elif start and len(shapes) > 1:  # (operand, result, and maybe two words of context)
        shapes = shapes[1:2]
    return bytes_of(" ".join(shapes))


def _sent(kind: str, size: float, devices: int, computation: str) -> float:
    """Returns the fewest bytes that a device sends, from the bytes of its result and the number of devices."""
    match kind:
        case "collective-permute":
            return size
        case "all-reduce":
            return 2 * size * (devices - 1) / devices
        case "reduce-scatter" if not computation.startswith("all-reduce-scatter"):
            return size * (devices - 1)
    return size * (devices - 1) / devices
