"""Tests of benchmarks.largest: the models compiled for a card, the recorded rows, the table of docs/plan.md."""

import json

import jax
import pytest

from benchmarks import largest
from train.base.chips import CHIPS


def test_the_table_is_of_the_recorded_programs():
    rows = json.loads((largest.RESULTS / "largest.json").read_text())["rows"]
    assert largest.table(rows) == largest.DOCS.read_text().split(largest.BEGIN)[1].split(largest.END)[0]
    cases = [tuple(row["case"]) for row in rows]
    assert len(set(cases)) == len(cases)
    for row in rows:
        card, method, model = row["case"]
        share = largest.SHARE if ":" in card else 1.0
        assert card in largest.CARDS and method in largest.METHODS and model in largest.MODELS
        assert row["fits"] == (row["needs, GB"] <= share * row["of, GB"]) and row["sampling, GB"] <= row["needs, GB"]


def test_the_largest_that_fits_is_compiled_and_the_next_if_it_does_not(tmp_path, monkeypatch):
    """A model needs as much on an A100 as on an H100, but not on a TPU. Each row is written before the next starts."""
    compiled, docs = [], tmp_path / "plan.md"
    needs = dict(zip(largest.MODELS, (300, 160, 110, 90, 60, 50, 35, 34, 20, 15, 9, 8, 4), strict=True))
    docs.write_text(f"before\n{largest.BEGIN}{largest.END}after\n")
    record = lambda: json.loads((tmp_path / "largest.json").read_text())["rows"]

    def measure(o, chip, devices):
        assert not compiled or len(record()) == len(compiled)
        compiled.append((o.topology, o.model))
        size = 1.4 * needs[o.model]
        return {"needs, GB": size, "sampling, GB": 0.0, "fits": size <= largest.available(chip) / 1e9}

    monkeypatch.setattr(largest, "RESULTS", tmp_path)
    monkeypatch.setattr(largest, "DOCS", docs)
    monkeypatch.setattr(largest, "measure", measure)
    monkeypatch.setattr(largest, "estimate", lambda o, devices: 1e9 * needs[o.model])
    monkeypatch.setattr(largest, "fleet", lambda card: (CHIPS[card.partition(":")[0].partition("-")[0]], None))
    largest.main(cards=("h100:1", "a100:1", "v6e-1"), columns=("full",))
    largest.main(cards=("h100:1", "a100:1", "v6e-1"), columns=("full",))  # computes nothing again
    tried = [("h100:1", model) for model in largest.MODELS[4:6]] + [("a100:1", "gemma3-12b")]
    assert compiled == [*tried, ("v6e-1", "qwen3-8b"), ("v6e-1", "llama3.1-8b"), ("v6e-1", "qwen3-4b")]
    lines = docs.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    of_cards = [line for line in lines if line.startswith(("| A100", "| H100", "| TPU"))]
    assert [line.split(" | ")[2] for line in of_cards] == ["gemma3-12b, 70.0", "gemma3-12b, 70.0", "qwen3-4b, 28.0"]


@pytest.mark.thorough
def test_estimates():
    """By a step's estimated bytes, a larger model needs more, and adapters over four bits need the least."""
    devices = jax.devices()[:1]
    sizes = {
        (method, model): largest.estimate(largest.options("h100:1", method, model), devices)
        for method in ("full", "lora", "nf4")
        for model in ("qwen3-0.6b", "llama3.2-1b")
    }
    for model in ("qwen3-0.6b", "llama3.2-1b"):
        assert sizes["full", model] > sizes["lora", model] > sizes["nf4", model]
    assert sizes["lora", "llama3.2-1b"] > sizes["lora", "qwen3-0.6b"] > 2 * 0.6e9


def test_a_tpu_is_no_gpu():
    assert largest.available(CHIPS["l4"]) == pytest.approx(0.95 * 23583784960)
    assert largest.available(CHIPS["v5e"]) == 16 * 2**30
