"""Trains the tiny vision model of `train.tiny.shapes` on its drawings, and counts exact answers.

    python -m train.tiny.shapes runs/drawings
    python -m benchmarks.shapes runs/drawings

The loop is a plain one; each row has one drawing with its chat. `zoo.generate` answers questions about held-out
drawings, and an answer counts only if it is the expected text. Writes the trained model to OUT/trained. Draws
docs/shapes.png: questions with answers, and the share of exact answers during training.
"""

import collections
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import rich.table
import tyro
from PIL import Image, ImageDraw, ImageFont

import zoo
from train.watch.plot import Curve, draw
from zoo.generation.generate import Encoded, encode
from zoo.nn.model import AbstractModel, Images
from zoo.text.prompts import encode_prompt
from zoo.text.tokenizer import Tokenizer


PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "shapes.png"
COLUMNS, CELL = 4, (300, 260)  # of the picture; pixels
RIGHT, WRONG = "#228833", "#cc3311"
LOOKED_AT = 150  # held-out questions that are evaluated during training


class Rows(NamedTuple):
    tokens: np.ndarray  # [rows, seq]
    learnt: np.ndarray  # 1: a token that the assistant writes
    image: np.ndarray  # [rows, seq]; 0: a token of the row's only image; -1: text
    feature: np.ndarray  # [rows, seq]
    patches: np.ndarray  # [rows, patches, pixels]
    grids: np.ndarray  # [rows, 2]

    def images(self) -> Images:
        number = jnp.arange(len(self.tokens))[:, None]
        return Images(self.patches, self.grids, jnp.where(self.image < 0, -1, number), self.feature)


def read(file: pathlib.Path) -> list[list[dict[str, Any]]]:
    """Returns the chats of a file, with their image paths resolved relative to it."""
    chats = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    for question, *_ in chats:
        question["content"][0]["path"] = str(file.parent / question["content"][0]["path"])
    return chats


def rows(model: AbstractModel, tokenizer: Tokenizer, chats: Sequence[Any]) -> Rows:
    """Encodes one row for each chat."""
    encoded = [encode_prompt(model, tokenizer, chat, add_generation_prompt=False) for chat in chats]
    header, (end,) = tokenizer.encode("<start_of_turn>model\n"), tokenizer.encode("<end_of_turn>")
    shape = len(encoded), max(len(ids) for ids, _ in encoded)
    tokens, learnt, feature = (np.zeros(shape, np.int32) for _ in range(3))
    image = np.full(shape, -1, np.int32)
    for row, (ids, images) in enumerate(encoded):
        tokens[row, : len(ids)] = ids
        image[row, : len(ids)], feature[row, : len(ids)] = images.image[0], images.feature[0]
        starts = [n for n in range(len(ids)) if ids[n - len(header) : n] == header]
        for start in starts:
            learnt[row, start : ids.index(end, start) + 1] = 1
    patches, grids = (np.concatenate([getattr(images, name) for _, images in encoded]) for name in ("patches", "grids"))
    return Rows(tokens, learnt, image, feature, patches, grids)


def loss(parameters: AbstractModel, fixed: AbstractModel, batch: Rows) -> jax.Array:
    model = eqx.combine(parameters, fixed)
    x, _, _ = model.hidden(batch.tokens, images=batch.images())
    losses = optax.softmax_cross_entropy_with_integer_labels(model.unembed(x[:, :-1]), batch.tokens[:, 1:])
    return jnp.sum(losses * batch.learnt[:, 1:]) / jnp.sum(batch.learnt[:, 1:])


def answers(model: AbstractModel, tokenizer: Tokenizer, prompts: Sequence[Encoded]) -> list[str]:
    return zoo.generate(model, tokenizer, prompts, max_new_tokens=4)


def main(
    out: tyro.conf.Positional[pathlib.Path],
    steps: int = 1400,
    batch: int = 32,
    lr: float = 4e-3,
    looks: int = 14,
    picture: pathlib.Path = PICTURE,
) -> None:
    """Trains a tiny model on drawings, and asks it about others.

    Args:
        out: the folder that `train.tiny.shapes` has written.
        steps: number of updates.
        batch: drawings of an update.
        lr: the highest learning rate, from which it falls along half a cosine.
        looks: number of evaluations on held-out questions during training.
        picture: file to draw.
    """
    model, tokenizer = zoo.load(out / "model", parts=("vision",)), zoo.tokenizer(out / "model")
    data = rows(model, tokenizer, read(out / "data" / "train.jsonl"))
    chats = read(out / "data" / "valid.jsonl")
    prompts, expected = [encode(model, tokenizer, chat[:1]) for chat in chats], [chat[1]["content"] for chat in chats]

    schedule = optax.warmup_cosine_decay_schedule(0, lr, max(1, steps // 30), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.05))
    parameters, fixed = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(parameters: Any, state: Any, batch: Rows) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, fixed, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state, random, order, curve = optimizer.init(parameters), np.random.RandomState(0), np.array([], int), []
    started, every = time.process_time(), max(1, steps // looks)
    for n in range(1, steps + 1):
        if len(order) < batch:
            order = np.concatenate([order, random.permutation(len(data.tokens))])
        chosen, order = order[:batch], order[batch:]
        parameters, state, value = step(parameters, state, Rows(*(array[chosen] for array in data)))
        if n % every == 0:
            found = answers(eqx.combine(parameters, fixed), tokenizer, prompts[:LOOKED_AT])
            share = float(np.mean([a == b for a, b in zip(found, expected, strict=False)]))
            curve.append((n, share))
            seconds = time.process_time() - started
            rich.print(f"step {n:,}, {seconds:,.0f} CPU seconds: loss {float(value):.3f}, {share:.1%} exact")
    model = eqx.combine(parameters, fixed)
    zoo.save(model, out / "trained")

    found = answers(model, tokenizer, prompts)
    asked, right = collections.Counter(), collections.Counter()
    for (question, _), answer, wanted in zip(chats, found, expected, strict=True):
        for kind in (question["content"][1]["text"], "all"):
            asked[kind] += 1
            right[kind] += answer == wanted
    table = rich.table.Table("question", "asked", "exactly right")
    for kind in sorted(asked, key=asked.__getitem__):
        table.add_row(kind, str(asked[kind]), f"{right[kind] / asked[kind]:.1%}")
    rich.print(table)

    label = f"{right['all'] / asked['all']:.1%} of all {asked['all']} at last"
    draw([Curve(label, "#4477aa", curve, dots=curve)], "share of exact answers", "step", picture)
    with Image.open(picture) as lower:
        lower = lower.convert("RGB")
    upper = grid(list(zip(chats, found, strict=True)))
    both = Image.new("RGB", (max(upper.width, lower.width), upper.height + lower.height), "white")
    both.paste(upper, (0, 0))
    both.paste(lower, (0, upper.height))
    both.save(picture, optimize=True)


def grid(answered: list[tuple[Any, str]], drawings: int = 12) -> Image.Image:
    """Draws the first drawings, each with its questions and the model's answers beneath."""
    each = collections.defaultdict(list)
    for (question, wanted), answer in answered:
        image, text = question["content"]
        each[image["path"]].append((text["text"], answer, wanted["content"]))
    shown = list(each.items())[:drawings]
    width, height = CELL
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(shown) // COLUMNS) * height), "white")
    canvas, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for n, (path, lines) in enumerate(shown):
        left, top = n % COLUMNS * width, n // COLUMNS * height
        with Image.open(path) as image:
            image = image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST)
        x, y = left + (width - image.width) // 2, top + 172 - image.height
        sheet.paste(image, (x, y))
        canvas.rectangle((x - 1, y - 1, x + image.width, y + image.height), outline="#999999")
        for row, (question, answer, wanted) in enumerate(lines):
            at = left + 12, top + 182 + 22 * row
            canvas.text(at, question, "#333333", font)
            words, color = (answer, RIGHT) if answer == wanted else (f"{answer}, not {wanted}", WRONG)
            canvas.text((at[0] + font.getlength(f"{question} "), at[1]), words, color, font)
    return sheet


if __name__ == "__main__":
    tyro.cli(main)
