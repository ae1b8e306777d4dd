"""Rows as bytes; the order in which a run reads rows, however it is split; batches by their number."""

import collections
import itertools
import json

import grain
import jax
import numpy as np
import pytest

from train.base.share import Share, rows_here
from train.data import rows
from train.data.rows import Order, Rows, from_bytes, order, to_bytes
from train.state.mesh import put_batch
from zoo.mesh import make_mesh


def numbered(count: int, first: int = 0) -> grain.MapDataset:
    """Returns rows whose first token is their number."""
    one = np.ones(4, np.int32)
    names = ("tokens", "targets", "loss_mask", "segments", "positions")
    return grain.MapDataset.source([{name: (first + n) * one for name in names} for n in range(count)])


def names_of(order: Order, start: int, stop: int) -> list[int]:
    return [int(order[n]["tokens"][0]) for n in range(start, stop)]


@pytest.mark.parametrize("vocab", [100, 2**16, 200_000])
def test_bytes_are_the_row(vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(40):
        seq, lengths = 64, []
        while sum(lengths) < rng.integers(1, 65):
            lengths.append(int(rng.integers(1, 20)))
        while sum(lengths) > seq:
            lengths.pop()
        row = {name: np.zeros(seq, np.int32) for name in ("tokens", "targets", "loss_mask", "segments", "positions")}
        row |= {name: np.zeros(seq, np.int32) for name in ("desirable", "picture")}
        at = 0
        for number, length in enumerate(lengths, 1):
            here, ids = slice(at, at + length), rng.integers(0, vocab, length + 1)
            row["tokens"][here], row["targets"][here], row["segments"][here] = ids[:-1], ids[1:], number
            row["positions"][here] = np.arange(length)
            row["loss_mask"][here], row["desirable"][here] = rng.integers(0, 2, (2, length))
            row["picture"][here] = rng.integers(-1, 5, length)
            at += length
        data = to_bytes(row)
        np.testing.assert_equal(from_bytes(data, seq), row)
        assert data == to_bytes(from_bytes(data, seq))


def test_an_epoch_has_each_row_once():
    for sizes in ((7,), (2, 6), (5, 3, 11)):
        sets = [Rows(numbered(size, 100 * i), seed=3 + i, as_packed=i == 0) for i, size in enumerate(sizes)]
        every = sorted(itertools.chain(*(range(100 * i, 100 * i + size) for i, size in enumerate(sizes))))
        made = order(sets, epochs=2)
        assert len(made) == 2 * len(every)
        first, second = names_of(made, 0, len(every)), names_of(made, len(every), len(made))
        assert sorted(first) == sorted(second) == every and first != second
        assert [n for n in first if n < 100] == list(range(sizes[0]))  # in packed order
        assert first == names_of(order(sets), 0, len(every))  # without an end, too


@pytest.mark.parametrize(
    "sizes, weights, length",
    [
        ((2, 6), (1.0, 1.0), 12),
        ((10, 10), (0.7, 0.3), 40),
        ((5, 3), (1.0, 3.0), 20),
        ((1, 1, 4), (2.0, 1.0, 1.0), 16),
        ((7,), (0.1,), 7),
    ],
)
def test_shares(sizes, weights, length):
    """In any span of rows each set has its share, to within one row. Each set's rows come equally often."""
    sets = [Rows(numbered(size, 100 * i), seed=i) for i, size in enumerate(sizes)]
    made = order(sets, weights=weights, epochs=1)
    found = names_of(made, 0, len(made))
    assert len(made) == length
    for i, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = [n // 100 == i for n in found]
        for start, stop in itertools.combinations(range(len(found) + 1), 2):
            assert abs(sum(own[start:stop]) - (stop - start) * weight / sum(weights)) < 2
        times = collections.Counter(n for n in found if n // 100 == i)
        assert len(times) == size and max(times.values()) - min(times.values()) <= 1


def test_other_weights_go_on_with_the_rows_that_are_left():
    """Each set continues where it was, whatever the weights were before. Its next epoch follows its last row."""
    rng = np.random.default_rng(0)
    sets, begun, found = [Rows(numbered(50), 1), Rows(numbered(20, 100), 2)], [0, 0], []
    for _ in range(8):
        steps = int(rng.integers(5, 15))
        made = order(sets, weights=tuple(rng.integers(1, 9, 2).astype(float)), begun=begun)
        found += names_of(made, 0, steps)
        begun = made.used(steps)
    for i, size in enumerate((50, 20)):
        own = [n for n in found if n // 100 == i]
        assert begun[i] == len(own)
        for at in range(0, len(own) - size + 1, size):
            assert len(set(own[at : at + size])) == size


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -2.0), (1.0, np.nan), (1.0, np.inf)])
def test_weights_that_fit_no_sets(weights):
    with pytest.raises(ValueError, match="2 data sets need as many positive weights, not"):
        order([Rows(numbered(2), 0), Rows(numbered(3), 0)], weights=weights)


def test_weights_that_are_too_different():
    with pytest.raises(ValueError, match=r"--weights 1e-300 1.0: these are too different, or have too many digits"):
        order([Rows(numbered(2), 0), Rows(numbered(3), 0)], weights=(1e-300, 1.0))


@pytest.mark.parametrize("processes", [1, 2, 8, 128])
def test_processes_share_every_batch(processes):
    """Whatever their number, the processes together read each row of an epoch once, and the same batches."""
    batch, made = 128, order([Rows(numbered(512), 5)], epochs=1)
    whole = rows.Batches(made, batch, None)
    parts = [rows.Batches(made, batch, here) for here in np.array_split(np.arange(batch), processes)]
    read = collections.Counter()
    for n in range(len(whole)) if processes < 128 else (0, 3):
        expected = whole[n]["tokens"][:, 0]
        shares = [part[n]["tokens"] for part in parts]
        np.testing.assert_equal(np.concatenate([share.array[:, 0] for share in shares]), expected)
        assert all(share.shape == (batch, 4) and share.array.shape[0] == batch // processes for share in shares)
        read.update(expected.tolist())
    assert set(read.values()) == {1} and len(read) == (512 if processes < 128 else 256)


def test_a_process_may_have_no_row_of_the_last_batch():
    last = rows.Batches(order([Rows(numbered(5), 0)], epochs=1), 4, np.array([2, 3]))[1]
    assert last["tokens"].array.shape == (2, 4) and not last["segments"].array.any()


def test_a_share_is_put_like_the_whole():
    mesh = make_mesh("fsdp=4,context=2")
    whole = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    names = ("tokens", "segments")
    expected = put_batch(dict.fromkeys(names, whole), mesh)
    share = Share(whole, np.arange(8), 8)
    for name, array in put_batch(dict.fromkeys(names, share), mesh).items():
        np.testing.assert_equal(np.asarray(array), np.asarray(expected[name]))
    half = Share(whole[4:], np.arange(4, 8), 8)
    np.testing.assert_equal(half[slice(5, 7)], whole[5:7])
    with pytest.raises(IndexError, match=r"Rows \[3 4\] of a batch are not this process's"):
        half[slice(3, 5)]
    assert rows_here(mesh, 8) is None and jax.process_count() == 1


def test_the_number_of_a_step_is_all_that_a_run_needs():
    data = rows.read_ahead(rows.batches(order([Rows(numbered(10), 1)], epochs=3), 4))
    iterator, expected = iter(data), list(data)
    assert [len(batch["tokens"]) for batch in expected] == [4] * 8 and not expected[-1]["segments"][2:].any()
    for n in range(8):
        assert json.loads(json.dumps(iterator.get_state())) == {"next_index": n}
        next(iterator)
    for n in (5, 2, 7):
        iterator.set_state({"next_index": n})
        np.testing.assert_equal(list(iterator), expected[n:])


def test_too_many_rows_for_memory(monkeypatch):
    monkeypatch.setattr(rows.os, "sysconf", lambda name: 32)
    with pytest.raises(ValueError, match=r"2 rows of 4 tokens take half of this machine's memory.*train.prepare"):
        rows.in_memory(iter(numbered(5)), 4)
    assert rows.in_memory(iter([]), 4) is None
