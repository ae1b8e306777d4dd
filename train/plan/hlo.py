"""What a compiled program sends between devices and keeps between its loops, read from the text that XLA dumps of it.

`compiled.as_text()` would be the same text, but fails for TPUs with jaxlib 0.10.2.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
# TPU7x's SparseCores run collectives, which are then in a computation that a custom call has.
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)|(?:branch|called)_computations=\{([^}]*)\}")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)")
# What has its operand's values; so do fusions of one operand, such as of a conversion.
ALIASES = ("bitcast", "convert", "copy", "copy-start", "copy-done", "fusion", "get-tuple-element", "reshape")


class Collective(NamedTuple):
    """One collective operation of the program."""

    kind: str
    sent: float  # bytes that each device of its group sends, by the algorithm that sends the fewest
    group: tuple[int, ...]  # devices, numbered in the order of the mesh, that this one works with
    times: int  # that a step runs it
    even: float = 0.0  # bytes sent by a ragged exchange, if routers choose all experts equally often


def collectives(text: str, devices: int) -> list[Collective]:
    """All of them, of the text of an optimized module. What is in a loop whose length is not known counts once."""
    computations = dict(_computations(text))
    entry = next(name for name in computations if name.startswith("ENTRY "))
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in computations[name]:
            for one, several in CALLED.findall(line):
                for called in [one] if one else re.findall(r"[\w.-]+", several):
                    if called in computations and " async-done(" not in line and " async-update(" not in line:
                        visit(called, count * _trips(line, computations) if f"body=%{called}" in line else count)

    visit(entry, 1)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if times[name] and (match := COLLECTIVE.search(line)):
                result, kind, start = match.groups()
                # A TPU's reduce-scatter is an all-reduce in a fusion that goes on with a part of the result.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
                group = _group(line, devices)
                size = _bytes(result, bool(start))
                even = _even(line, size, lines, len(group)) if kind == "ragged-all-to-all" else 0.0
                found.append(Collective(kind, _sent(kind, size, len(group), name), group, times[name], even))
    return found


def by_axis(found: list[Collective], shape: Mapping[str, int], *, even: bool = False) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, by kind and by the axes of a mesh of this shape, such as "fsdp".

    They are the least that it sends, or with `even` those of ragged exchanges whose rows are spread evenly.
    """
    total: dict[tuple[str, str], float] = {}
    for each in found:
        places = np.array(np.unravel_index(each.group, tuple(shape.values())))
        axes = [axis for axis, at in zip(shape, places, strict=True) if len(set(at.tolist())) > 1]
        if axes:
            key = each.kind, ",".join(axes)
            total[key] = total.get(key, 0) + (each.even if even else each.sent) * each.times
    return total


def activations(text: str) -> float:
    """Bytes of a device that one loop writes and a later one reads: what the layers keep for the backward pass.

    What a loop only passes on, such as weights, and what lies in the host's memory do not count. Of computations which
    run one after another, such as microbatches, the one that keeps the most does.
    """
    computations = {name.removeprefix("ENTRY "): lines for name, lines in _computations(text)}
    return max(_between_loops(lines, computations) for lines in computations.values())


def _between_loops(lines: list[str], computations: Mapping[str, list[str]]) -> float:
    sizes: dict[str, float] = {}  # of each element that a loop writes, by its name
    aliases: dict[str, str] = {}  # other names of these
    tuples: dict[str, list[str]] = {}
    read: set[str] = set()
    for line in lines:
        if match := INSTRUCTION.match(line):
            name, result, kind, operands = match.groups()
            values = [aliases.get(operand, operand) for operand in _names(operands)]
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
    """Which elements of its tuple a loop's body does not only pass on."""
    elements = _elements(body)
    return {i for i, name in enumerate(_results(body)) if elements.get(name) != i}


def _elements(loop: list[str]) -> dict[str, int]:
    """The names in a loop's body, or condition, of the elements of the tuple that it is given."""
    given = next(match[1] for line in loop if (match := INSTRUCTION.match(line)) and match[3] == "parameter")
    found = {f"{given}#{index}": int(index) for index in re.findall(rf"%{re.escape(given)}#(\d+)", "\n".join(loop))}
    for line in loop:
        if (match := INSTRUCTION.match(line)) and match[3] == "get-tuple-element" and _names(match[4]) == [given]:
            found[match[1]] = int(re.findall(r"index=(\d+)", line)[0])
    return found


def _results(body: list[str]) -> list[str]:
    """The names of the values that a loop's body returns, or nothing, if it does not put them together itself."""
    (root,) = (line for line in body if line.lstrip().startswith("ROOT "))
    found = re.search(r" tuple\(([^)]*)\)", root)
    return _names(found[1]) if found else []


def _names(operands: str) -> list[str]:
    return re.findall(r"[\w.-]+(?:#\d+)?(?=,|$)", operands)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and instructions of each computation; the name of the one that is run has "ENTRY " before it."""
    name, lines = "", []
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name, lines = (match[1] or "") + match[2], []
        elif line.startswith("}") and name:
            yield name, lines
            name = ""
        elif name:
            lines.append(line)


def _trips(line: str, computations: Mapping[str, list[str]]) -> int:
    """How often a loop runs: as XLA says, or, as it does not for TPUs, by its counter, which begins with zero."""
    if known := re.search(r"known_trip_count[^\d]*(\d+)", line):
        return int(known[1])
    condition, body = (computations[re.findall(rf"{word}=%?([\w.-]+)", line)[0]] for word in ("condition", "body"))
    bounds = [int(n) for each in condition for n in re.findall(r"constant\((\d+)\)", each)]
    if len(bounds) != 1 or not any("direction=LT" in each for each in condition):
        return 1
    return -(-bounds[0] // _step(condition, body))


def _step(condition: list[str], body: list[str]) -> int:
    """By how much a loop's counter grows: 2 where devices pass something round, as such loops are unrolled."""
    named = {match[1]: match for line in body if (match := INSTRUCTION.match(line))}
    given, results = _elements(condition), _results(body)
    for compared in re.findall(r" compare\(%([\w.#-]+)", "\n".join(condition)):
        counter = named.get(results[given[compared]]) if results and compared in given else None
        for operand in _names(counter[4]) if counter and counter[3] == "add" else ():
            if operand in named and named[operand][3] == "constant":
                return int(named[operand][4])
    return 1


def _group(line: str, devices: int) -> tuple[int, ...]:
    """The first of the groups that exchange data, in any of the three notations of XLA; of a permutation, a pair."""
    if pair := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return int(pair[1]), int(pair[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(map(int, listed[1].split(",")))
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, reshaped = ([int(n) for n in tiled[i].split(",")] for i in (1, 2))
        order = [int(n) for n in tiled[3].split(",")] if tiled[3] else range(len(reshaped))
        ids = np.arange(devices).reshape(reshaped).transpose(order).reshape(shape)
        return tuple(ids[0].tolist())
    if named := re.search(r"replica_groups=mesh\[([^]]*)\](?:, device_ids=\([^)]*\))? \{([^}]*)\}", line):
        shape = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        ids = np.arange(devices).reshape(tuple(shape.values()))
        # An axis may be given in part, as 'x':(2)4: four positions, each of two of which stands for a group of its own.
        parts = {axis: (before, size) for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[2])}
        for n, axis in enumerate(shape):
            if axis not in parts:
                ids = ids.take([0], axis=n)
            elif parts[axis][1]:
                before, size = map(int, parts[axis])
                ids = ids.take(np.arange(size) * (shape[axis] // (before * size)), axis=n)
        return tuple(ids.ravel().tolist())
    return tuple(range(devices))


def _bytes(result: str, start: bool) -> float:
    """Of a result, "bf16[8,128]{1,0}" or a tuple of such; of an asynchronous one without its operands."""
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
    if start and result.startswith("(("):
        shapes = shapes[len(shapes) // 2 :]
    elif start and len(shapes) > 1:  # (operand, result, and maybe two words of context)
        shapes = shapes[1:2]
    size = lambda dtype: 1.0 if dtype == "pred" else int(bits[0]) / 8 if (bits := re.search(r"\d+", dtype)) else 0.0
    return sum((size(dtype) * math.prod(int(n) for n in sizes.split(",") if n) for dtype, sizes in shapes), 0.0)


def _sent(kind: str, size: float, devices: int, computation: str) -> float:
    """Bytes that a device sends at the least, given those of its result and the size of the group."""
    match kind:
        case "collective-permute":
            return size
        case "ragged-all-to-all":  # as many of the rows as routers choose, which may be none
            return 0.0
        case "all-reduce":
            return 2 * size * (devices - 1) / devices
        case "reduce-scatter" if not computation.startswith("all-reduce-scatter"):
            return size * (devices - 1)
    return size * (devices - 1) / devices


def _even(line: str, size: float, lines: list[str], devices: int) -> float:
    """Bytes that a device sends by a ragged exchange if each gets as many of its rows.

    One of the two arrays has room for its own rows, and the other for those that all devices might send it.
    """
    named = {match[1]: match[2] for each in lines if (match := INSTRUCTION.match(each))}
    match = INSTRUCTION.match(line)
    rows = named.get(_names(match[4])[0]) if match else None
    return min(size, _bytes(rows, False) if rows else size) * (devices - 1) / devices
