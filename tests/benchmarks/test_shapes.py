"""In a few steps of the drawings benchmark, a tiny model learns, answers, and is saved; the figure is drawn."""

import re

import jax
import numpy as np
import PIL.Image
import pytest

import zoo
from benchmarks.shapes import main, read, rows
from train.tiny import shapes


@pytest.mark.thorough
def test_a_tiny_model_learns_from_drawings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shapes, "HELD_OUT", 4)
    shapes.main(tmp_path, drawings=16)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        main(tmp_path, steps=30, batch=8, looks=3, picture=tmp_path / "shapes.png")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * np.log(shapes.CONFIG.vocab_size)  # half the loss of a guess
    with PIL.Image.open(tmp_path / "shapes.png") as picture:
        assert picture.width == 1200
    model, tokenizer = zoo.load(tmp_path / "trained", parts=("vision",)), zoo.tokenizer(tmp_path / "trained")
    (chat,) = read(tmp_path / "data" / "train.jsonl")[:1]
    row = rows(model, tokenizer, [chat])
    learnt = [int(id) for id, here in zip(row.tokens[0], row.learnt[0], strict=True) if here]
    said = [turn["content"] for turn in chat if turn["role"] == "assistant"]
    assert tokenizer.decode(learnt, special=True) == "".join(f"{text}<end_of_turn>" for text in said)
