"""Muse Glimmer: its text model, and with its tower, which takes images of any shape."""

import math
import string
from typing import Any, ClassVar

import numpy as np
import PIL.Image

from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, template, text
from tests.zoo.tiny import COMMON, attention, biases, filled, gemma2, mlp
from tests.zoo.tiny import values as usual
from zoo.vision.processors.muse_glimmer import MuseGlimmer as Processor


MUSE_GLIMMER = {k: v for k, v in COMMON.items() if k not in ("torch_dtype", "hidden_act", "rope_theta")} | dict(
    model_type="muse_glimmer_text", architectures=["MuseGlimmerTextModel"], dtype="float32", hidden_activation="silu",
    rms_norm_eps=1e-5, post_norm_eps=1e-8, attention_bias=False, sliding_window=4, qk_scale_factor=3.87,
    output_multiplier=3.0, final_logit_softcapping=20.0, rope_parameters=dict(rope_type="default", rope_theta=5000.0),
    pad_token_id=None,
)  # fmt: skip


def layers(*kinds: str, theta: float) -> dict[str, Any]:
    """Returns the keys of layers, each "sliding" or "full", with "+" if it has rotary positions."""
    types = [f"{kind.removesuffix('+')}_attention" for kind in kinds]
    thetas = [theta if kind.endswith("+") else 0 for kind in kinds]
    return dict(num_hidden_layers=len(kinds), layer_types=types, layer_rope_theta=thetas)


CONFIGS: dict[str, dict[str, Any]] = {
    "muse_glimmer": MUSE_GLIMMER | dict(num_hidden_layers=8),  # a period of four twice
    # A head, a period of two twice and a tail, in which windows and positions are apart; one head of keys.
    "muse_glimmer-lists": {k: v for k, v in MUSE_GLIMMER.items() if k != "rope_parameters"}
    | layers("full+", "sliding+", "full", "sliding+", "full", "sliding", theta=300.0)
    | dict(
        rope_theta=300.0, rope_scaling=dict(rope_type="linear", factor=2.0), num_key_value_heads=1, head_dim=12,
        attention_bias=True, tie_word_embeddings=True, rms_norm_eps=0.01, post_norm_eps=0.5, sliding_window=40,
        qk_scale_factor=2.0,
    ),
    # What is absent is transformers' default; the full layers are the first and the last.
    "muse_glimmer-defaults": {
        k: v for k, v in MUSE_GLIMMER.items() if k not in ("rope_parameters", "num_key_value_heads", "post_norm_eps")
    }
    | dict(num_hidden_layers=5, sliding_window=50),
}  # fmt: skip
STACK = "muse_glimmer-lists"
PARAMETERS = {"muse-glimmer-30b": 27_854_780_928}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub (there with `language_model.` after `model.`)."""
    c = dict(num_key_value_heads=2) | config
    d, v = c["hidden_size"], c["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(c, layer) | mlp(f"{layer}.mlp", c["intermediate_size"], d)
        out[f"{layer}.self_attn.gate_proj.weight"] = (c["num_attention_heads"] * c["head_dim"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in gemma2.NORMS}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Norms of layers are stored minus 1."""
    return (1 if name == "model.norm.weight" else 0) + 0.3 * noise


def vision_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape of the tower, its adapter and the projection."""
    c, width = config["vision_config"], config["projector_hidden_size"]
    d, patch = c["hidden_size"], 3 * c["patch_temporal"] * c["patch_size"] ** 2
    out: dict[str, tuple[int, ...]] = {
        "patch_embedder.patch_embedding.weight": (d, patch),
        "patch_embedder.position_embedding_table.weight": (c["pos_emb_height"] * c["pos_emb_width"], d),
    }
    norms = ["ln_pre", "ln_post"]
    for n in range(c["num_hidden_layers"]):
        maps = {f"attn.{name}.weight": (d, d) for name in ("q_proj", "k_proj", "v_proj", "proj")}
        maps |= {"mlp.fc1.weight": (c["intermediate_size"], d), "mlp.fc2.weight": (d, c["intermediate_size"])}
        out |= {f"layers.{n}.{name}": shape for name, shape in (maps | biases(maps)).items()}
        norms += [f"layers.{n}.norm1", f"layers.{n}.norm2"]
    out |= {f"{norm}.{kind}": (d,) for norm in norms for kind in ("weight", "bias")}
    return {f"model.vision_tower.{name}": shape for name, shape in out.items()} | {
        "model.vision_adapter.fc1.weight": (width, config["out_hidden_size"]),
        "model.vision_adapter.fc2.weight": (width, width),
        "model.vision_projection.weight": (config["text_config"]["hidden_size"], width),
    }


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters that a checkpoint with this config.json has beside the text model."""
    return sum(math.prod(shape) for shape in vision_shapes(config).values())


# ======================================================================================================================
# With the tower, which attends in part within windows of patches.
# ======================================================================================================================

IMAGE, VIDEO, START, END = 60, 61, 62, 63  # ids
TOWER = dict(  # windows of 4 x 4 patches in every other layer
    model_type="muse_glimmer_vision", hidden_act="gelu", hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=2, patch_size=2, patch_temporal=2, merge_size=2, pos_emb_height=4, pos_emb_width=4,
    layer_norm_eps=0.01, max_position_embeddings=16, rope_parameters=dict(rope_type="default", rope_theta=100.0),
    layer_types=["window_attention", "full_attention"] * 2,
)  # fmt: skip
TEXT = CONFIGS["muse_glimmer"] | dict(num_hidden_layers=2)  # one with a window, one without
CONFIG = dict(
    architectures=["MuseGlimmerForConditionalGeneration"], model_type="muse_glimmer", dtype="float32",
    image_token_id=IMAGE, video_token_id=VIDEO, out_hidden_size=64, projector_hidden_act="gelu",
    projector_hidden_size=24, transformers_version="5.15.0.dev0", vision_config=TOWER,
)  # fmt: skip
# Rows and columns of patches. A row without an image, a row with one, and a row with two of other shapes.
GRIDS = np.array([[6, 8], [2, 6], [8, 2]])
PLACES = ((1, 4), (2, 0), (2, 12))  # row of each picture, and position of its START
PICTURES = [
    np.random.RandomState(20 + n).uniform(-1, 1, (rows * columns, 24)).astype(np.float32)
    for n, (rows, columns) in enumerate(GRIDS)
]
PROMPTS = np.random.RandomState(3).randint(0, 60, (3, 24))
for (row, first), count in zip(PLACES, GRIDS.prod(axis=1) // 4, strict=True):
    PROMPTS[row, first : first + count + 2] = [START, *[IMAGE] * count, END]
SHADES = np.random.RandomState(8).randint(0, 256, (12, 30, 3), np.uint8)
ROOM = 48


class MuseGlimmer(Checkpoint):
    parameters: ClassVar = {"muse-glimmer-30b": 29_776_626_688}
    name, text_names = "muse_glimmer", ("muse_glimmer_text", "MuseGlimmerTextModel")
    prompts, ids = PROMPTS, (IMAGE,)
    pictures, grids, room = PICTURES, GRIDS, ROOM
    # A document with two images and one of text; one with an image and padding; padding.
    packed = ((2, 0, 18, 1), (0, 0, 6, 2)), ((1, 0, 18, 1), (0, 18, 24, 0)), ((0, 0, 24, 0),)
    lengths, steps = (10, 18, 18), 5
    restated = ("text_config.rope_parameters", "text_config.tie_word_embeddings")
    inward = (".proj", "fc2")
    refused = (
        (dict(hidden_act="silu"), "vision_config says hidden_act='silu', but only 'gelu' is implemented"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(hidden_size=20), "hidden_size=20, which is no multiple of four times num_attention_heads=2"),
        (dict(layer_types=["full_attention"]), "layer_types with 1 entries, but num_hidden_layers is 4"),
        (dict(pos_emb_width=6), "pos_emb_height=4 and pos_emb_width=6; only equal multiples of merge_size=2"),
        (dict(merge_size=4), "out_hidden_size=64, but the tower's features have 256"),
    )

    def config(self):
        text = {key: value for key, value in TEXT.items() if key != "architectures"}
        return CONFIG | dict(text_config=text)

    def tensors(self):
        random = np.random.RandomState(5)
        text = filled(shapes(TEXT), random, values)
        text = {name.replace("model.", "model.language_model."): value for name, value in text.items()}
        with_norms = lambda name, noise: usual(name.replace("ln_", "norm_"), noise)
        return text | filled(vision_shapes(self.config()), random, with_norms)

    def add_chat(self, folder):
        own = dict(patch_size=2, merge_size=2, temporal_patch_size=2, max_image_tokens=8, resample=3)
        special = {"<|patch|>": IMAGE, "<|video|>": VIDEO, "<|image_start|>": START, "<|image_end|>": END}
        characters = " " + string.ascii_letters + string.digits[:7]
        add_chat(folder, characters, special, template("<|patch|>"), preprocessor_config=own)

    def chats(self, folder, tokenizer):
        """Returns a chat with two images of other shapes, the second downscaled."""
        encode, shown = tokenizer.encode, [SHADES[:, :width] for width in (8, 30)]
        first, second = (image(PIL.Image.fromarray(one)) for one in shown)
        processed = [Processor.read(folder)(one) for one in shown]
        inside = [[START, *[IMAGE] * (rows * columns), END] for rows, columns in ((3, 2), (2, 4))]  # features
        ids = [*inside[0], *encode("and"), *inside[1]]
        patches, grids = [one.patches for one in processed], np.array([[6, 4], [4, 8]])
        return [Chat(ask(first, text("and"), second), ids, patches, grids, room=32)]

    def features(self, model, images):
        return dict(features=model.vision(images.patches, images.grids))

    def given(self):
        return dict(pixel_values=np.concatenate(list(in_rows(PICTURES))), image_grid_thw=np.insert(GRIDS, 0, 1, axis=1))

    def their_features(self, model, given):
        out = model.model.vision_tower(given["pixel_values"], grid_thw=given["image_grid_thw"]).last_hidden_state
        return dict(features=model.model.vision_projection(model.model.vision_adapter(out)))


def in_rows(pictures):
    """Returns the patches of all pictures row by row, where neighbours that become a feature are apart."""
    for patches, (rows, columns) in zip(pictures, GRIDS, strict=True):
        squares = patches.reshape(rows // 2, columns // 2, 2, 2, -1)
        yield squares.swapaxes(1, 2).reshape(rows * columns, -1)


SEEING = [MuseGlimmer()]
