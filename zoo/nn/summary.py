"""A model in a table of a few lines: `print(model)`."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax

from zoo.nn.block import AbstractBlock
from zoo.nn.stack import Stack


def summary(model: eqx.Module) -> str:
    """Describes a model in a line for each of its parts, and for each kind of layer and each part of such a layer.

    Parameters and bytes are those of the arrays as they are stored, in all layers of the kind. So scales of quantised
    weights count, too, and a byte that holds two weights of four bits counts as one. Settings of a module, such as the
    window of an attention, are in parentheses.
    """
    rows = [("", "", "parameters", "bytes", "dtype")]
    for name, part in _parts(model):
        if not isinstance(part, Stack):
            rows.append(_row(name, [part]))
            continue
        for layers, blocks in _kinds(part):
            rows.append(_row(f"{name} {_ranges(layers)}", blocks))
            for field, _ in _parts(blocks[0]):
                rows.append(_row(f"  {field}", [getattr(block, field) for block in blocks]))
    rows.append(_row("all", [model]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = lambda row: [
        cell.rjust(width) if n in (2, 3) else cell.ljust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "\n".join("  ".join(aligned(row)).rstrip() for row in rows)


def _parts(module: eqx.Module) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each field of a module that holds arrays."""
    for field in dataclasses.fields(module):
        if not field.metadata.get("static") and jax.tree.leaves(value := getattr(module, field.name)):
            yield field.name, value


def _kinds(stack: Stack) -> list[tuple[list[int], list[AbstractBlock]]]:
    """Returns, for each kind of layer, the numbers of its layers and the blocks that hold them."""
    kinds: dict[Hashable, tuple[list[int], list[AbstractBlock]]] = {}
    for n in range(len(stack)):
        block, index = stack.place(n)
        arrays, structure = jax.tree.flatten(block)
        shapes = tuple((a.shape[index is not None :], a.dtype) for a in arrays)
        layers, blocks = kinds.setdefault((structure, shapes), ([], []))
        layers.append(n)
        if not any(block is other for other in blocks):
            blocks.append(block)
    return list(kinds.values())


def _ranges(numbers: Sequence[int]) -> str:
    """Writes 0, 1, 2, 5 as "0-2, 5", and where there are more than four such ranges only some of them."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(ranges if len(ranges) <= 4 else [*ranges[:2], "...", ranges[-1]]) + f" ({len(numbers)})"


def _row(name: str, parts: Sequence[Any]) -> tuple[str, str, str, str, str]:
    """Writes the cells of a line, about parts of one type."""
    arrays = jax.tree.leaves(parts)
    dtypes = dict.fromkeys(str(a.dtype) for a in arrays)
    size = sum(a.size * a.dtype.itemsize for a in arrays)
    return name, _kind(parts[0]), f"{sum(a.size for a in arrays):,}", _bytes(size), ", ".join(dtypes)


def _kind(part: Any) -> str:
    """Writes a module's type, with those of its static fields that are numbers, but 0."""
    if not isinstance(part, eqx.Module):
        return type(part).__name__
    static = [field.name for field in dataclasses.fields(part) if field.metadata.get("static")]
    plain = {name: value for name in static if isinstance(value := getattr(part, name), int | float) and value}
    settings = ", ".join(f"{name}={value:.4g}" for name, value in plain.items())
    return type(part).__name__ + f"({settings})" * bool(settings)


def _bytes(size: int) -> str:
    """Writes a number of bytes with three digits or so."""
    power = min(len(f"{size:.0f}") - 1, 12) // 3
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
