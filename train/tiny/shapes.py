"""A script that makes drawings with questions, and an untrained vision model: `python -m train.tiny.shapes OUT`.

A drawing has a cross and up to four circles, of six colours and in nine places. The questions are how many shapes there
are, which colour the cross has, and where the cross is. Drawings have all sizes and proportions between `SIDES`. The
model is a Gemma 3 with SigLIP's tower and random weights, small enough to learn the answers in minutes on a CPU.
"""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import tyro
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import zoo
from zoo.models import gemma3
from zoo.nn.layers import Linear
from zoo.nn.model import AbstractModel
from zoo.vision.towers import siglip


COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (235, 200, 30),
    "purple": (150, 50, 180), "black": (25, 25, 25),
}  # fmt: skip
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
NUMBERS = ("one", "two", "three", "four", "five")
SIDES = (48, 80)  # pixels: the least and the largest width and height of a drawing
HELD_OUT = 200  # number of drawings that are held out
SHARP = 4  # factor by which shapes are drawn larger, and then scaled down, so that their edges are smooth


COUNT, COLOUR, POSITION = "How many shapes are there?", "What colour is the cross?", "Where is the cross?"

PLACES_OF_IMAGES = {
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "image_token_index": "<image_soft_token>",
}
SPECIAL = ["<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>", *PLACES_OF_IMAGES.values()]

# Gemma's template. A generation block has the text that the assistant learns to write: its words, and its turn's end.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<end_of_turn>' }}{% endgeneration %}
{%- else %}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<start_of_image>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<end_of_turn>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""

# An image is 48 x 48 pixels, in 36 patches. Each square of four patches becomes a token.
CONFIG = gemma3.Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    query_pre_attn_scalar=16,
    max_position_embeddings=512,
    sliding_window=512,
    layer_types=("full_attention",) * 2,
    rope_theta=10_000.0,
    vision=gemma3.VisionConfig(siglip.Config(64, 128, 2, 4, image_size=48, patch_size=8), mm_tokens_per_image=9),
)


class Shape(NamedTuple):
    kind: str
    colour: str
    row: int
    column: int


def arrange(chance: random.Random) -> list[Shape]:
    """Chooses the shapes of a drawing: a cross, and up to four circles, each in a place of its own."""
    cells = chance.sample(range(9), chance.randint(1, len(NUMBERS)))
    kind = lambda n: "circle" if n else "cross"
    return [Shape(kind(n), chance.choice(list(COLOURS)), *divmod(cell, 3)) for n, cell in enumerate(cells)]


def draw(shapes: list[Shape], chance: random.Random) -> Image.Image:
    """Draws shapes on a light ground, each with a size, a shade and a place of its own within its cell."""
    width, height = (chance.randint(*SIDES) for _ in range(2))
    ground = tuple(chance.randint(225, 255) for _ in range(3))
    image = Image.new("RGB", (width * SHARP, height * SHARP), ground)
    canvas, cell = ImageDraw.Draw(image), min(width, height) * SHARP / 3
    for kind, colour, row, column in shapes:
        radius = chance.uniform(0.3, 0.42) * cell
        x = (column + 0.5) * width * SHARP / 3 + chance.uniform(-0.08, 0.08) * cell
        y = (row + 0.5) * height * SHARP / 3 + chance.uniform(-0.08, 0.08) * cell
        fill = tuple(min(255, max(0, value + chance.randint(-20, 20))) for value in COLOURS[colour])
        match kind:
            case "circle":
                canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
            case "cross":
                thick = 0.3 * radius
                canvas.rectangle((x - radius, y - thick, x + radius, y + thick), fill)
                canvas.rectangle((x - thick, y - radius, x + thick, y + radius), fill)
    return image.resize((width, height), Image.Resampling.BOX)


def questions(shapes: list[Shape], chance: random.Random) -> list[tuple[str, str]]:
    """Returns the questions about a drawing and their answers, in random order."""
    cross, *_ = shapes
    place = "centre" if cross.row == cross.column == 1 else f"{ROWS[cross.row]} {COLUMNS[cross.column]}"
    asked = [(COUNT, NUMBERS[len(shapes) - 1]), (COLOUR, cross.colour), (POSITION, place)]
    return chance.sample(asked, len(asked))


def conversation(image: str, asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Makes the messages of a chat that begins with an image."""
    messages: list[dict[str, Any]] = []
    for question, answer in asked:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages[0]["content"] = [{"type": "image", "path": image}, {"type": "text", "text": asked[0][0]}]
    return messages


def write_drawings(folder: Path, name: str, number: int, chance: random.Random, *, apart: bool) -> None:
    """Writes `name`.jsonl, and its drawings into images/.

    All questions about a drawing are in one chat; with `apart`, each question has its own chat.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.jsonl", "w") as file:
        for n in range(number):
            shapes = arrange(chance)
            image = f"images/{name}-{n:05}.png"
            draw(shapes, chance).save(folder / image)
            asked = questions(shapes, chance)
            for chat in [[one] for one in asked] if apart else [asked]:
                file.write(json.dumps({"messages": conversation(image, chat)}) + "\n")


def make_tokenizer() -> Tokenizer:
    """Trains byte-level BPE, with a token for each word of the questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    places = [f"{row} {column}" for row in ROWS for column in COLUMNS]
    tokenizer.train_from_iterator(
        [*("user\n", "model\n", "\n\n", COUNT, COLOUR, POSITION), *NUMBERS, *COLOURS, *places, "centre"],
        trainers.BpeTrainer(
            vocab_size=CONFIG.vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def write_model(folder: Path) -> None:
    """Writes a folder in Hub layout, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vision = CONFIG.vision
    assert vision is not None
    side = vision.tower.image_size
    files = {
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id("<end_of_turn>")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<end_of_turn>",
            "pad_token": "<pad>",
            "chat_template": CHAT_TEMPLATE,
        },
        # A light ground becomes about 0, so that the tower sees mainly the shapes.
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
            "patch_size": vision.tower.patch_size,
            "image_seq_length": vision.mm_tokens_per_image,
            "image_mean": [0.94] * 3,
            "image_std": [0.3] * 3,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    ids = {key: tokenizer.token_to_id(token) for key, token in PLACES_OF_IMAGES.items()}
    config = dataclasses.replace(CONFIG, source=folder, vision=dataclasses.replace(vision, **ids))

    @jax.jit
    def make() -> AbstractModel:
        model = gemma3.FAMILY.init_model(config, key=jax.random.key(0), parts=("vision",))
        return jax.tree.map(_widened, model, is_leaf=lambda m: isinstance(m, Linear))

    zoo.save(make(), folder)


def _widened(module: Any) -> Any:
    """Scales the weights of a linear map to a variance of 1 / inputs, so that its output is as large as its input.

    With the standard deviation of large models, 0.02, a map with so few inputs would make everything small.
    """
    if not isinstance(module, Linear):
        return module
    return eqx.tree_at(lambda m: m.weight, module, module.weight * module.shape[-1] ** -0.5 / 0.02)


def main(out: tyro.conf.Positional[Path], drawings: int = 8000) -> None:
    """Makes drawings, in OUT/data, and the untrained model, in OUT/model.

    Args:
        out: folder for all files.
        drawings: number of drawings to learn from; 200 more are held out.
    """
    chance = random.Random(0)
    write_drawings(out / "data", "train", drawings, chance, apart=False)
    write_drawings(out / "data", "valid", HELD_OUT, chance, apart=True)
    write_model(out / "model")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.tiny.shapes")
