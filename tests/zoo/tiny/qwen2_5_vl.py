"""Qwen2.5-VL: its text model, and with its tower, which takes images of any shape."""

import string
from typing import Any, ClassVar

import numpy as np
import PIL.Image

from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, template, text
from tests.zoo.tiny import COMMON, attention, biases, filled, mlp
from zoo.vision.processors.qwen3_vl import Qwen3VL as Processor


QWEN2_5_VL = {k: v for k, v in COMMON.items() if k not in ("torch_dtype", "head_dim", "rope_theta")} | dict(
    model_type="qwen2_5_vl_text", architectures=["Qwen2_5_VLTextModel"], dtype="float32", rms_norm_eps=1e-6,
    num_hidden_layers=2, use_sliding_window=False, sliding_window=None, max_window_layers=2,
    rope_parameters=dict(rope_type="default", rope_theta=1000.0, mrope_section=[1, 1, 2]),
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of transformers 4; the last two layers have windows.
    "qwen2_5_vl-window": {k: v for k, v in QWEN2_5_VL.items() if k != "rope_parameters"}
    | dict(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=6, num_key_value_heads=1, rope_theta=300.0,
        tie_word_embeddings=True, rope_scaling=dict(type="mrope", mrope_section=[2, 1, 1]), rms_norm_eps=0.01,
    ),
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_5_vl-yarn": QWEN2_5_VL
    | dict(
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1000.0,
            mrope_section=[1, 1, 1, 1],
        ),
        layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=40,
    ),
}  # fmt: skip
STACK = "qwen2_5_vl-window"
PARAMETERS: dict[str, int] = {}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    c, d, v = config, config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        own = attention(c, layer)
        out |= own | biases({name: shape for name, shape in own.items() if "o_proj" not in name})
        out |= mlp(f"{layer}.mlp", c["intermediate_size"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return out


# ======================================================================================================================
# With the tower, which attends in part within windows of patches.
# ======================================================================================================================

IMAGE, VIDEO, START, END = 60, 61, 62, 63  # ids
TOWER = dict(  # windows of 4 x 4 patches, but in the second layer
    model_type="qwen2_5_vl", depth=3, hidden_size=16, hidden_act="silu", intermediate_size=24, num_heads=2,
    in_channels=3, patch_size=2, temporal_patch_size=2, spatial_merge_size=2, tokens_per_second=2, window_size=9,
    out_hidden_size=32, fullatt_block_indexes=[1],
)  # fmt: skip
OUTER = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", dtype="float32",
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    vision_token_id=59, transformers_version="4.53.1",
)  # fmt: skip
# Rows and columns of patches. A row without an image, a row with one, and a row with two of other shapes.
GRIDS = np.array([[6, 8], [2, 6], [8, 2]])
PLACES = ((1, 4), (2, 0), (2, 12))  # row of each picture, and position of its START
PICTURES = [
    np.random.RandomState(20 + n).uniform(-1, 1, (rows * columns, 24)).astype(np.float32)
    for n, (rows, columns) in enumerate(GRIDS)
]
PROMPTS = np.random.RandomState(3).randint(0, 59, (3, 24))
for (row, first), count in zip(PLACES, GRIDS.prod(axis=1) // 4, strict=True):
    PROMPTS[row, first : first + count + 2] = [START, *[IMAGE] * count, END]
SHADES = np.random.RandomState(8).randint(0, 256, (12, 30, 3), np.uint8)


class Qwen25VL(Checkpoint):
    parameters: ClassVar[dict[str, int]] = {}
    name, text_names = "qwen2_5_vl", ("qwen2_5_vl_text", "Qwen2_5_VLTextModel")
    prompts, ids = PROMPTS, (IMAGE,)
    pictures, grids, room = PICTURES, GRIDS, 48
    # A document with two images and one of text; one with an image and padding; padding.
    packed = ((2, 0, 18, 1), (0, 0, 6, 2)), ((1, 0, 18, 1), (0, 18, 24, 0)), ((0, 0, 24, 0),)
    lengths, steps = (10, 18, 18), 5
    lags = (0, 12 - 4, (3 - 3) + (4 - 4))
    restated = ("text_config.rope_parameters", "text_config.tie_word_embeddings")
    renamed = ({"visual.": "model.visual.", "model.": "model.language_model."},)
    inward = (".proj", "down_proj", "fc2")
    refused = (
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'silu' is implemented"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(hidden_size=20), "hidden_size=20, which is no multiple of four times num_heads=2"),
        (dict(window_size=3), "window_size=3, which is less than a feature of 2 x 2 patches"),
        (dict(out_hidden_size=16), "out_hidden_size=16, but the text model's hidden_size is 32"),
    )

    def config(self):
        text = {key: value for key, value in QWEN2_5_VL.items() if key != "architectures"}
        return OUTER | dict(text_config=text, vision_config=TOWER, tie_word_embeddings=False)

    def tensors(self):
        random, d, width, merged = np.random.RandomState(5), 16, 24, 64
        maps = {"merger.mlp.0.weight": (merged, merged), "merger.mlp.2.weight": (32, merged)}
        out: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (d, 3, 2, 2, 2), "merger.ln_q.weight": (d,)}
        for n in range(TOWER["depth"]):
            block = f"blocks.{n}"
            maps |= {f"{block}.attn.qkv.weight": (3 * d, d), f"{block}.attn.proj.weight": (d, d)}
            maps |= mlp(f"{block}.mlp", width, d)
            out |= {f"{block}.{norm}.weight": (d,) for norm in ("norm1", "norm2")}
        tower = {f"visual.{name}": shape for name, shape in (out | maps | biases(maps)).items()}
        with_norms = lambda name, noise: 1 + 0.3 * noise if "norm" in name or "ln_q" in name else 0.4 * noise
        return filled(shapes(QWEN2_5_VL), random) | filled(tower, random, with_norms)

    def add_chat(self, folder):
        own = dict(min_pixels=16, max_pixels=96, patch_size=2, merge_size=2, temporal_patch_size=2)
        special = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
        characters = " " + string.ascii_letters + string.digits[:7]
        shown = template("<|vision_start|><|image_pad|><|vision_end|>")
        add_chat(folder, characters, special, shown, preprocessor_config=own)

    def chats(self, folder, tokenizer):
        """Returns a chat with two images of other shapes, the second downscaled."""
        encode, shown = tokenizer.encode, [SHADES[:, :width] for width in (8, 30)]
        first, second = (image(PIL.Image.fromarray(one)) for one in shown)
        processed = [Processor.read(folder)(one) for one in shown]
        inside = [[START, *[IMAGE] * (rows * columns), END] for rows, columns in ((3, 2), (1, 3))]  # features
        ids = [*inside[0], *encode("and"), *inside[1]]
        patches, grids = [one.patches for one in processed], np.array([[6, 4], [2, 6]])
        return [Chat(ask(first, text("and"), second), ids, patches, grids, room=32)]

    def features(self, model, images):
        return dict(features=model.vision(images.patches, images.grids))

    def given(self):
        return dict(
            pixel_values=np.concatenate(PICTURES),
            image_grid_thw=np.insert(GRIDS, 0, 1, axis=1),
            mm_token_type_ids=(PROMPTS == IMAGE).astype(int),
        )

    def their_features(self, model, given):
        return dict(features=model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output)


SEEING = [Qwen25VL()]
