"""A tiny random Llama 4 that sees, with prompts and tiles for it, as `tests.zoo.seeing` has for Gemma 3.

python -m tests.zoo.seeing_llama4 writes golden_vision_llama4.npz: what transformers computes on them.
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy

from tests.zoo import tiny
from tests.zoo.seeing import theirs


TEXT = "llama4"
CONFIG = dict(
    model_type="llama4", architectures=["Llama4ForConditionalGeneration"], boi_token_index=57, eoi_token_index=62,
    image_token_index=61, torch_dtype="float32",
    vision_config=dict(
        model_type="llama4_vision_model", hidden_size=24, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_channels=3, image_size=12, patch_size=2, pixel_shuffle_ratio=0.5,
        projector_input_dim=40, projector_output_dim=40, vision_output_dim=40, rope_theta=100.0, norm_eps=1e-5,
        hidden_act="gelu", attention_dropout=0.0, projector_dropout=0.0, multi_modal_projector_bias=False,
        vision_feature_layer=-1, vision_feature_select_strategy="default", initializer_range=0.02,
    ),
)  # fmt: skip
START, NEXT, NEW_ROW, WHOLE, PATCH, END = range(57, 63)
TILE = [PATCH] * 9
# A row without an image; one with a small image, whose tile ends the row; and one with an image of two tiles next to
# each other, which is a third as a whole. A tile is longer than the attention's chunk of 8.
PROMPTS = np.random.RandomState(3).randint(0, 57, (3, 40))
PROMPTS[1, 29:40] = [START, WHOLE, *TILE]
PROMPTS[2, 4:36] = [START, *TILE, NEXT, *TILE, NEW_ROW, WHOLE, *TILE, END]
PIXELS = np.random.RandomState(4).uniform(-1, 1, (4, 3, 12, 12)).astype(np.float32)  # of each tile [3, 12, 12]


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Features about as large as embeddings, so that what layers add to them shows."""
    return tiny.values(name, noise) * (0.4 if "adapter" in name or "projector" in name else 1)


def write(folder: pathlib.Path, text: str = TEXT, layers: int | None = None, **changes) -> pathlib.Path:
    """The checkpoint with this text model, or the first layers of it, in the layout of the Hub."""
    own = {key: value for key, value in tiny.CONFIGS[text].items() if key != "architectures"}
    own["num_hidden_layers"] = layers = layers or own["num_hidden_layers"]
    config = CONFIG | dict(text_config=own) | changes
    random = np.random.RandomState(5)
    beyond = tuple(f"model.layers.{n}." for n in range(layers, tiny.CONFIGS[text]["num_hidden_layers"]))
    tensors = {f"language_model.{k}": v for k, v in tiny.tensors(text).items() if not k.startswith(beyond)}
    tensors |= {
        name: values(name, random.standard_normal(shape)).astype(np.float32)
        for name, shape in sorted(tiny.MODULES["llama4"].vision_shapes(config).items())
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def computed(model) -> dict[str, np.ndarray]:
    """What transformers' model makes of the prompts and tiles: logits, and features of each tile."""
    import torch

    tokens, pixels = torch.tensor(PROMPTS), torch.tensor(PIXELS).to(model.dtype)
    with torch.no_grad():
        logits = model(input_ids=tokens, pixel_values=pixels).logits
        tower = model.get_image_features(pixels, return_dict=True).last_hidden_state
        result = dict(logits=logits, tower=tower, features=model.multi_modal_projector(tower))
        return {name: value.float().numpy() for name, value in result.items()}


GOLDEN = pathlib.Path(__file__).parent / "golden_vision_llama4.npz"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        golden = computed(theirs(write(pathlib.Path(scratch), layers=4)))
    np.savez_compressed(GOLDEN, **golden)
    for key, array in golden.items():
        print(f"{key:10s} {array.shape}, largest {np.abs(array).max():.2f}, deviation {array.std():.2f}")
