"""Tiny random checkpoints of Qwen3-VL and Qwen3.5 with their tower, with prompts, images and a video for them.

python -m tests.zoo.seeing_qwen3_vl writes golden_vision_qwen3_vl.npz: what transformers computes on them.
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy

from tests.zoo import tiny


IMAGE, VIDEO, START, END = 60, 61, 62, 63  # ids
TOWER = dict(
    depth=5, hidden_size=16, intermediate_size=24, num_heads=2, in_channels=3, patch_size=2, temporal_patch_size=2,
    spatial_merge_size=2, out_hidden_size=32, num_position_embeddings=9, hidden_act="gelu_pytorch_tanh",
    initializer_range=0.02,
)  # fmt: skip
OUTER = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    transformers_version="4.57.0.dev0",
)  # fmt: skip
# Checkpoint of tiny/ -> what transformers calls it with a tower, the layers whose outputs DeepStack takes, and changes
# of its config.json. The text of the first has two layers beyond those that DeepStack adds something to.
CHECKPOINTS = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", [0, 3], dict(num_hidden_layers=4)),
    "qwen3_vl-moe": ("Qwen3VLMoeForConditionalGeneration", [1], {}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", [], {}),
}

# A row without an image, one with one, one with two of other shapes, and one with a video of two pictures and an image.
# The rows and columns of each picture's patches, in their order; a video's pictures have one shape.
GRIDS = np.array([[4, 6], [2, 8], [6, 4], [4, 4], [4, 4], [2, 2]])
IN_VIDEO = np.array([False, False, False, True, True, False])
PICTURES = [
    np.random.RandomState(20 + n).uniform(-1, 1, (rows * columns, 24)).astype(np.float32)
    for n, (rows, columns) in enumerate(GRIDS)
]
PROMPTS = np.random.RandomState(3).randint(0, 60, (4, 40))
PLACES = {0: (1, 5), 1: (2, 0), 2: (2, 17), 3: (3, 8), 4: (3, 17), 5: (3, 30)}  # row and first token


def picture_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Which picture each token of PROMPTS belongs to, -1: none; and which of its features it is. Writes PROMPTS."""
    image, feature = np.full(PROMPTS.shape, -1), np.zeros(PROMPTS.shape, int)
    for n, (row, first) in PLACES.items():
        count = GRIDS[n].prod() // 4
        PROMPTS[row, first] = START
        PROMPTS[row, first + 1 : first + 1 + count] = VIDEO if IN_VIDEO[n] else IMAGE
        PROMPTS[row, first + 1 + count] = END
        image[row, first + 1 : first + 1 + count] = n
        feature[row, first + 1 : first + 1 + count] = np.arange(count)
    return image, feature


BELONGS, FEATURE = picture_tokens()


def patches() -> np.ndarray:
    """Of all pictures, filled up to the largest, with numbers that no other patch may see."""
    out = np.full((len(GRIDS), 24, 24), 7.0, np.float32)
    for n, picture in enumerate(PICTURES):
        out[n, : len(picture)] = picture
    return out


def text_config(name: str) -> dict:
    """That of the checkpoint `name` of tiny/."""
    return tiny.CONFIGS[name] | CHECKPOINTS[name][2]


def rope(config: dict) -> dict:
    """What a text_config says of rotary positions, in either form."""
    return config.get("rope_scaling") or config["rope_parameters"]


def config(name: str, **changes) -> dict:
    """The config.json, as on the Hub."""
    text, (architecture, deep, _) = text_config(name), CHECKPOINTS[name]
    kind = text["model_type"].removesuffix("_text")
    text = {key: value for key, value in text.items() if key != "architectures"}
    tower = TOWER | dict(model_type=kind, deepstack_visual_indexes=deep)
    tied = text["tie_word_embeddings"]
    whole = dict(architectures=[architecture], model_type=kind, text_config=text, vision_config=tower)
    return OUTER | whole | dict(tie_word_embeddings=tied) | changes


def tensors(name: str) -> dict[str, np.ndarray]:
    """Those of the checkpoint, as on the Hub."""
    module, random = tiny.MODULES[tiny.FAMILIES[name]], np.random.RandomState(5)
    make = getattr(module, "values", tiny.values)
    out = {}
    for tensor, shape in sorted(module.shapes(text_config(name)).items()):
        value = make(tensor, random.standard_normal(shape)).astype(np.float32)
        start = "model." if tensor.startswith("model.") else ""
        out["model.language_model." * bool(start) + tensor.removeprefix(start)] = value
    for tensor, shape in sorted(module.vision_shapes(config(name)).items()):
        out[tensor] = tiny.values(tensor, random.standard_normal(shape)).astype(np.float32)
    return out


def write(folder: pathlib.Path, name: str, **changes) -> pathlib.Path:
    """The checkpoint, in the layout of the Hub; `changes` overwrite keys of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name, **changes)))
    safetensors.numpy.save_file(tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def theirs(folder: pathlib.Path, dtype: str = "float32"):
    """transformers' model, with its eager attention."""
    import transformers

    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def logits_of(model):
    """What transformers' model makes of the prompts, images and the video, as a torch tensor with its gradient."""
    import torch

    tokens = torch.tensor(PROMPTS)
    of = lambda chosen: torch.tensor(np.concatenate([PICTURES[n] for n in np.flatnonzero(chosen)])).to(model.dtype)
    grids = np.concatenate([np.ones((len(GRIDS), 1), int), GRIDS], axis=1)
    return model(
        input_ids=tokens,
        pixel_values=of(~IN_VIDEO),
        pixel_values_videos=of(IN_VIDEO),
        image_grid_thw=torch.tensor(grids[~IN_VIDEO]),
        video_grid_thw=torch.tensor([[2, 4, 4]]),
        mm_token_type_ids=(tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
    ).logits


def computed(model) -> dict[str, np.ndarray]:
    """What transformers' model makes of them: logits, and each picture's features, DeepStack's after them."""
    import torch

    with torch.no_grad():
        out = {"logits": logits_of(model)}
        grids = torch.tensor(np.concatenate([np.ones((len(GRIDS), 1), int), GRIDS], axis=1))
        seen = model.model.visual(torch.tensor(np.concatenate(PICTURES)).to(model.dtype), grid_thw=grids)
        deep = getattr(seen, "deepstack_features", None) or []
        out |= {f"features {n}": x for n, x in enumerate([seen.pooler_output, *deep])}
        return {name: value.float().numpy() for name, value in out.items()}


GOLDEN = pathlib.Path(__file__).parent / "golden_vision_qwen3_vl.npz"


if __name__ == "__main__":
    golden = {}
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as scratch:
            values = computed(theirs(write(pathlib.Path(scratch), name)))
        golden |= {f"{name} {key}": value for key, value in values.items()}
    np.savez_compressed(GOLDEN, **golden)
    for key, array in golden.items():
        print(f"{key:28s} {array.shape}, largest {np.abs(array).max():.2f}")
