"""Runs of tests/margins.py: which seeds, which environments, and what its table says."""

import jax
import numpy as np
import pytest

from tests import close, margins
from tests.margins import Margin


def test_each_seed_runs_once_unless_asked_otherwise():
    runs = list(margins.seeds_of(margins.ENVIRONMENTS, None))
    assert sorted(seed for _, seed in runs) == list(range(margins.SEEDS)) and runs[0] == ("as it is", 0)
    assert {name for name, _ in runs} == {*margins.ENVIRONMENTS}
    assert list(margins.seeds_of(["a", "b"], 2)) == [("a", 0), ("a", 1), ("b", 2), ("b", 3)]


def test_seeds_of_tests_are_shifted(monkeypatch):
    makers = (np.random, "RandomState"), (np.random, "default_rng"), (jax.random, "key"), (jax.random, "PRNGKey")
    for module, name in makers:
        monkeypatch.setattr(module, name, getattr(module, name))  # so that they are put back
    key, state = jax.random.key(1007), np.random.RandomState(1007).rand()
    generator = np.random.default_rng(1007).random()
    margins.shift_seeds(1000)
    assert jax.random.key(7) == key and np.random.RandomState(7).rand() == state
    assert np.random.default_rng(7).random() == generator
    monkeypatch.setattr(margins, "FIXED", ("tests/test_margins.py",))
    assert np.random.RandomState(1007).rand() == state


def test_a_margins_run_records_and_raises_nothing(monkeypatch):
    found = []
    monkeypatch.setattr(close, "record", lambda *comparison: found.append(comparison))
    close.close(np.float32(1 + 2.0**-20), np.float32(1), terms=16)
    close.close(2.0, 1.0, terms=1)
    close.close(np.nan, 1.0, terms=1)
    assert [ratio for *_, ratio in found] == [0.5, 2.0**23, np.inf]
    assert {file for file, *_ in found} == {__file__} and found[1][1] == found[0][1] + 1


def test_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(margins, "ROOT", tmp_path)
    (tmp_path / "test_a.py").write_text("close(1, 1,\n  terms=1)\nas_exact(1, 1, 1)\nclosed(1)\n")
    found = [
        Margin("test_a.py", 2, f"test_a.py::test_{n}", ratio, "avx2, seed 3") for n, ratio in enumerate((0.1, 0.3))
    ]
    (row,) = made = margins.rows(["test_a.py"], found)
    assert row == ("test_a.py", 2, 1, 2, found[1])
    text = margins.table(made, [found[1]], {"test_a.py::test_b": 2})
    assert "| test_a.py | 2 | 2 | 1 | 0.300 | avx2, seed 3 | line 2, test_1 |" in text
    assert "- test_a.py:2: 0.300 in test_1 (avx2, seed 3)" in text and "- test_a.py::test_b: 2" in text


@pytest.mark.parametrize("name", ["zoo/test_parity.py", "kernels/test_attention.py", "train/test_step.py"])
def test_files_that_compare_are_found(name):
    assert f"tests/{name}" in margins.comparing_files() and margins.places_of(f"tests/{name}")
