"""Rows of tokens with random access, the order of a run's rows, and its batches by their number.

A row is a dict of int32 arrays [seq]: `tokens`; `targets`, the token that follows each; `loss_mask`, 1 where the target
is to be learnt; `segments`, which number the documents of a row from 1 and are 0 in its padding; and `positions`, from
0 in each document. Rows of preferences have `desirable`, too. Rows with images have the arrays that
`train.data.pictures` needs, rows of texts with scores have `score`, and rows of pairs for a reward model have `margin`;
the last two are of float32.

The n-th row of a run follows from its seed alone: no buffer is shuffled, and nothing depends on the number of
processes. So a resumed run finds batch n at once, and each process makes only the rows of its own devices.
"""

import dataclasses
import fractions
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grain
import numpy as np
import rich
import safetensors.numpy
from jax.sharding import Mesh
from jaxtyping import Int, Shaped

from train.base.share import Share, rows_here


Row = dict[str, Shaped[np.ndarray, "seq ..."]]
BITS = ("loss_mask", "desirable")  # arrays that are 0 or 1
FLOATS = ("score", "margin")  # arrays of float32
ENDLESS = 2**31  # epochs; grain counts rows up to 2**63


# ======================================================================================================================
# A row as bytes, in memory and in files. Arrays that follow from others are left out, so a token takes 2 or 4 bytes.
# ======================================================================================================================


def to_bytes(row: Row) -> bytes:
    """Serializes a row: `tokens`, the `lengths` of its documents, the `last` target of each, and all other arrays.

    The format is safetensors. The length of the row is not stored.
    """
    segments = row["segments"]
    used = int(np.count_nonzero(segments))
    ends = np.flatnonzero(np.diff(segments[:used], append=-1)) + 1
    small = np.uint16 if row["tokens"].max(initial=0) < 2**16 else np.uint32
    arrays: dict[str, np.ndarray] = {
        "tokens": row["tokens"][:used].astype(small),
        "lengths": np.diff(ends, prepend=0).astype(np.uint32),
        "last": row["targets"][ends - 1].astype(np.uint32),
    }
    for name in row.keys() - {"tokens", "targets", "segments", "positions"}:
        arrays[name] = np.packbits(row[name][:used].astype(bool)) if name in BITS else row[name][:used]
    return safetensors.numpy.save(arrays)


def from_bytes(data: bytes, seq_len: int) -> Row:
    """Restores a row from `to_bytes`, filled up to `seq_len` tokens with zeros."""
    arrays = safetensors.numpy.load(data)
    lengths, last = arrays.pop("lengths").astype(np.int32), arrays.pop("last")
    ends = lengths.cumsum(dtype=np.int32)
    starts, used = ends - lengths, int(ends[-1])
    names = ("targets", "segments", "positions", *arrays)
    row = dict(zip(names, np.zeros((len(names), seq_len), np.int32), strict=True))
    row |= {name: np.zeros(seq_len, np.float32) for name in FLOATS if name in arrays}
    row["targets"][: used - 1] = arrays["tokens"][1:]
    row["targets"][ends - 1] = last
    row["segments"][:used] = np.arange(1, len(lengths) + 1).repeat(lengths)
    np.subtract(np.arange(used, dtype=np.int32), starts.repeat(lengths), out=row["positions"][:used])
    for name, array in arrays.items():
        row[name][:used] = np.unpackbits(array, count=used) if name in BITS else array
    return row


def of_bytes(source: Any, seq_len: int) -> grain.MapDataset[Row]:
    """Returns the rows of a random access source of serialized rows (`to_bytes`)."""
    return grain.MapDataset.source(source).map(functools.partial(from_bytes, seq_len=seq_len))


def in_memory(rows: Iterable[Row], seq_len: int, *, limit: int | None = None) -> grain.MapDataset[Row] | None:
    """Makes the first `limit` rows, all by default, and keeps them in memory. Returns None if there are no rows.

    Raises:
        ValueError: the rows take more than half of the machine's memory.
    """
    kept, size = [], 0
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with rich.get_console().status("Tokenizing") as status:
        for row in rows:
            kept.append(to_bytes(row))
            size += sys.getsizeof(kept[-1])
            if size > most:
                raise ValueError(
                    f"{len(kept):,} rows of {seq_len:,} tokens take half of this machine's memory, and there are more: "
                    "prepare the data once by `python -m train.prepare`, and give its folder as --data."
                )
            if len(kept) % 256 == 0:
                status.update(f"Tokenizing: {len(kept):,} rows of {seq_len:,} tokens")
            if len(kept) == limit:
                break
    return of_bytes(kept, seq_len) if kept else None


# ======================================================================================================================
# The order of rows.
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows, and the seed of their order.

    `as_packed` is for rows that were packed in random order: the first epoch does not shuffle them. So a run's first
    rows are the same, however many rows there are.
    """

    rows: grain.MapDataset[Row]
    seed: int
    as_packed: bool = False

    def shuffled(self) -> grain.MapDataset[Row]:
        """Returns the rows of all epochs, one epoch after another, without an end."""
        shuffled = self.rows.shuffle(seed=self.seed)
        return grain.MapDataset.concatenate([self.rows, shuffled.repeat(ENDLESS)]) if self.as_packed else shuffled


@dataclasses.dataclass(frozen=True)
class Order:
    """The rows of a run, one after another: `order[n]` is its n-th row, whatever has been read before.

    Any stretch of consecutive rows has rows of each set in the ratio of the weights, to within one.
    """

    sets: Sequence[Any]  # random access to rows
    weights: Sequence[int]
    begun: Sequence[int]  # number of first rows of each set that are left out
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, n: int) -> Row:
        before, after = self.used(n), self.used(n + 1)
        which = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return self.sets[which][before[which]]

    def used(self, n: int) -> list[int]:
        """Returns, for each set, the number of its next row after `n` rows of the run."""
        found, rest, left = [], sum(self.weights), n
        for weight, begun in zip(self.weights, self.begun, strict=True):
            after = left * (rest - weight) // rest
            found.append(begun + left - after)
            rest, left = rest - weight, after
        return found


def order(
    sets: Sequence[Rows], *, weights: Sequence[float] = (), epochs: int | None = None, begun: Sequence[int] = ()
) -> Order:
    """Shuffles the rows of several sets, anew in each of the `epochs`. With None there is no end.

    Without `weights` an epoch has each row once. With them it has each row at least once: the rows of the set that is
    largest for its weight once, and the rows of the others repeatedly.

    Args:
        begun: the number of rows of each set that have been used before; 0 by default.

    Raises:
        ValueError: `weights` are not one positive number for each set, or too different to count an epoch's rows.
    """
    if weights and (len(weights) != len(sets) or not all(0 < weight < math.inf for weight in weights)):
        raise ValueError(f"{len(sets)} data sets need as many positive weights, not {list(weights)}.")
    shares = [fractions.Fraction(str(weight)) for weight in weights or [len(each.rows) for each in sets]]
    unit = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * unit) for share in shares]
    smallest = math.gcd(*whole)
    whole = [share // smallest for share in whole]
    rounds = max(-(-len(each.rows) // share) for each, share in zip(sets, whole, strict=True))
    if (length := rounds * sum(whole) * (epochs or ENDLESS)) > sys.maxsize:
        raise ValueError(
            f"--weights {' '.join(map(str, weights))}: these are too different, or have too many digits, to count an "
            "epoch's rows; leave out data with nearly no weight."
        )
    return Order([each.shuffled() for each in sets], whole, begun or [0] * len(sets), length)


def held_out(share: float, count: int) -> int:
    """Returns the number of records or rows to hold out: a share of them, rounded up, but never all.

    Raises:
        ValueError: the share is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"--hold-out {share} is no share: give a number from 0 to 1, such as 0.05.")
    return min(math.ceil(share * count), count - 1)


def concatenated(sets: Sequence[grain.MapDataset[Any]]) -> grain.MapDataset[Any]:
    """Concatenates data sets."""
    return grain.MapDataset.concatenate(list(sets)) if len(sets) > 1 else sets[0]


# ======================================================================================================================
# Batches.
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a run by number, as a random access source of grain."""

    rows: Any  # random access to rows
    batch: int
    here: Int[np.ndarray, " here"] | None

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = range(self.batch) if self.here is None else self.here.tolist()
        rows = [self.rows[i] for number in numbers if (i := index * self.batch + number) < len(self.rows)]
        shape = rows[0] if rows else self.rows[0]
        arrays = {name: np.zeros((len(numbers), *array.shape), array.dtype) for name, array in shape.items()}
        for name, array in arrays.items() if rows else ():  # a process may have no rows of the last batch
            np.stack([row[name] for row in rows], out=array[: len(rows)])
        if self.here is None:
            return arrays
        return {name: Share(array, self.here, self.batch) for name, array in arrays.items()}


def batches(
    rows: Order | grain.MapDataset[Row],
    batch: int,
    *,
    mesh: Mesh | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> grain.MapDataset[dict[str, Any]]:
    """Batches rows, `batch` at a time, with random access. The last batch is filled up with padding.

    With a `mesh`, and several processes, the arrays of a batch are `Share`s. `finish` is applied to each batch, such as
    to open its images. With `finish`, every process has all rows, since the shapes of a batch depend on all of them.
    """
    made = grain.MapDataset.source(Batches(rows, batch, None if finish else rows_here(mesh, batch)))
    return made.map(finish) if finish else made


def read_ahead(batches: grain.MapDataset[Any]) -> grain.IterDataset[Any]:
    """Reads up to four batches ahead, in one thread, as two would wait for each other.

    The state of its iterator is the number of the next batch.
    """
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
