"""Drawings with questions, and the untrained vision model: `python -m train.tiny.shapes`."""

import json
import random

import numpy as np
import pytest

import zoo
from train.tiny import shapes
from zoo.text.prompts import encode_prompt
from zoo.vision.open import open_image


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    shapes.main(folder, drawings=24)
    return folder


def chats(out, name):
    return [json.loads(line)["messages"] for line in (out / "data" / f"{name}.jsonl").read_text().splitlines()]


def test_answers_are_what_is_drawn():
    """The cross has its colour in its place, and there are as many shapes as places without background."""
    chance = random.Random(0)
    for _ in range(20):
        placed = shapes.arrange(chance)
        image = np.array(shapes.draw(placed, chance)).astype(int)
        height, width, _ = image.shape
        middles = {(row, column): image[int((row + 0.5) * height / 3), int((column + 0.5) * width / 3)]
                   for row in range(3) for column in range(3)}  # fmt: skip
        shown = {place: colour for place, colour in middles.items() if colour.min() < 200}
        answers = dict(shapes.questions(placed, chance))
        assert answers[shapes.COUNT] == shapes.NUMBERS[len(shown) - 1]
        row, column = placed[0].row, placed[0].column
        words = f"{shapes.ROWS[row]} {shapes.COLUMNS[column]}"
        assert answers[shapes.POSITION] == ("centre" if (row, column) == (1, 1) else words)
        near = min(shapes.COLOURS, key=lambda name: np.abs(shown[row, column] - shapes.COLOURS[name]).sum())
        assert answers[shapes.COLOUR] == near


@pytest.mark.thorough
def test_data_is_the_same_every_time_and_none_of_it_held_out(out, tmp_path):
    shapes.write_drawings(tmp_path, "train", 24, random.Random(0), apart=False)
    assert (tmp_path / "train.jsonl").read_bytes() == (out / "data" / "train.jsonl").read_bytes()
    pictures = {name: [file.read_bytes() for file in sorted((out / "data" / "images").glob(f"{name}-*"))]
                for name in ("train", "valid")}  # fmt: skip
    assert pictures["train"] == [file.read_bytes() for file in sorted((tmp_path / "images").iterdir())]
    assert len(set(pictures["train"] + pictures["valid"])) == 24 + shapes.HELD_OUT
    assert len(chats(out, "valid")) == 3 * shapes.HELD_OUT and {len(chat) for chat in chats(out, "valid")} == {2}
    sizes = {open_image(out / "data" / chat[0]["content"][0]["path"]).shape for chat in chats(out, "train")}
    assert len(sizes) > 20


@pytest.mark.thorough
def test_the_model_sees_the_data(out):
    """The checkpoint loads whole. An answer has one token for each word and one for the end of the turn."""
    model, tokenizer = zoo.load(out / "model", parts=("vision",)), zoo.tokenizer(out / "model")
    for question, answer, *_ in chats(out, "train")[:3]:
        image, text = question["content"]
        asked = {**question, "content": [image | {"path": str(out / "data" / image["path"])}, text]}
        ids, images = encode_prompt(model, tokenizer, [asked])
        assert max(ids) < model.config.vocab_size and images.image.max() == 0
        assert (images.image >= 0).sum() == model.config.vision.mm_tokens_per_image
        assert np.abs(np.median(images.patches)) < 0.3  # the background
        assert len(tokenizer.encode(answer["content"], special=False)) == len(answer["content"].split())
