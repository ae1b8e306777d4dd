"""A tiny random checkpoint of Mistral Small 3.1's form, with prompts, and images of several shapes.

python -m tests.zoo.seeing_mistral writes golden_mistral.npz: what transformers computes on them.
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy

from tests.zoo import tiny


TEXT = tiny.CONFIGS["mistral"] | dict(sliding_window=None, head_dim=12)
BESIDE = ("architectures", "torch_dtype", "tie_word_embeddings")  # as released, nothing says that these are not tied
CONFIG = dict(
    architectures=["Mistral3ForConditionalGeneration"], image_token_index=10, model_type="mistral3",
    multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, torch_dtype="float32",
    vision_feature_layer=-1, transformers_version="4.50.0.dev0",
    text_config={key: value for key, value in TEXT.items() if key not in BESIDE},
    vision_config=dict(
        attention_dropout=0.0, head_dim=8, hidden_act="silu", hidden_size=16, image_size=32, initializer_range=0.02,
        intermediate_size=40, model_type="pixtral", num_attention_heads=2, num_channels=3, num_hidden_layers=2,
        patch_size=2, rope_theta=100.0,
    ),
)  # fmt: skip
IMAGE, BREAK, END = 10, 12, 13
GRIDS = np.array([[4, 6], [6, 2], [2, 8]])  # rows and columns of patches; four of them are a token
# A row without an image, one that ends with one, and one with two, right after one another, and text around them.
PROMPTS = np.random.RandomState(3).randint(14, 64, (3, 24))
WIDE, TALL, LOW = [([IMAGE] * (c // 2) + [BREAK]) * (r // 2 - 1) + [IMAGE] * (c // 2) + [END] for r, c in GRIDS]
PROMPTS[1, 16:] = WIDE
PROMPTS[2, 2:13] = TALL + LOW
LEVELS = [np.random.RandomState(n).randint(0, 256, (*2 * grid, 3)).astype(np.uint8) for n, grid in enumerate(GRIDS)]
MEAN, STD = 0.5, 0.25
PIXELS = [((image.transpose(2, 0, 1) / 255 - MEAN) / STD).astype(np.float32) for image in LEVELS]


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors beside the text model's, as stored on the Hub: name -> shape."""
    c, embed = CONFIG["vision_config"], TEXT["hidden_size"]
    d, width, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    out = {"vision_tower.patch_conv.weight": (d, 3, patch, patch), "vision_tower.ln_pre.weight": (d,)}
    for n in range(c["num_hidden_layers"]):
        layer = f"vision_tower.transformer.layers.{n}"
        out |= {f"{layer}.attention.{name}_proj.weight": (d, d) for name in "qkvo"}
        out |= {f"{layer}.feed_forward.{name}_proj.weight": (width, d) for name in ("gate", "up")}
        out |= {f"{layer}.feed_forward.down_proj.weight": (d, width)}
        out |= {f"{layer}.{norm}_norm.weight": (d,) for norm in ("attention", "ffn")}
    projector = {"norm": (d,), "patch_merger.merging_layer": (d, 4 * d), "linear_1": (embed, d)}
    projector |= {"linear_2": (embed, embed)}
    return out | {f"multi_modal_projector.{name}.weight": shape for name, shape in projector.items()}


def write(folder: pathlib.Path, **changes) -> pathlib.Path:
    """The checkpoint, in the layout of the Hub."""
    random, module = np.random.RandomState(5), tiny.MODULES["mistral"]
    both = {f"language_model.{name}": shape for name, shape in module.shapes(TEXT).items()} | shapes()
    tensors = {
        name: tiny.values(name.replace("ln_pre", "norm"), random.standard_normal(shape)).astype(np.float32)
        for name, shape in sorted(both.items())
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def theirs(folder: pathlib.Path, dtype: str = "float32"):
    """transformers' model, with its eager attention."""
    import transformers

    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True, tie_word_embeddings=False
    )
    assert not any(info.values()), info
    return model.eval()


def computed(model) -> dict[str, np.ndarray]:
    """What transformers' model makes of the prompts and images: logits, and features of the images in a row, of each
    patch by the tower and of each token by the projector."""
    import torch

    pixels = np.zeros((3, 3, *2 * GRIDS.max(axis=0)), np.float32)
    for canvas, image in zip(pixels, PIXELS, strict=True):
        canvas[:, : image.shape[1], : image.shape[2]] = image
    images = dict(pixel_values=torch.tensor(pixels).to(model.dtype), image_sizes=torch.tensor(2 * GRIDS))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(PROMPTS), **images).logits
        seen = model.model.get_image_features(**images, return_dict=True)
        result = dict(logits=logits, tower=seen.last_hidden_state[0], features=torch.cat(seen.pooler_output))
        return {name: value.float().numpy() for name, value in result.items()}


GOLDEN = pathlib.Path(__file__).parent / "golden_mistral.npz"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        golden = computed(theirs(write(pathlib.Path(scratch))))
    np.savez_compressed(GOLDEN, **golden)
    for key, array in golden.items():
        print(f"{key:10s} {array.shape}, largest {np.abs(array).max():.2f}")
