"""Qwen3-VL without its tower: dense models, and mixtures."""

import math
import string
from typing import Any

import numpy as np
import PIL.Image

from tests.zoo import tiny
from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, text
from tests.zoo.tiny import COMMON, attention, filled, mlp
from zoo.vision.processors.qwen3_vl import Qwen3VL as Processor
from zoo.vision.processors.qwen3_vl import Qwen3VLVideo as VideoProcessor


QWEN3_VL = {k: v for k, v in COMMON.items() if k not in ("torch_dtype", "head_dim")} | dict(
    dtype="float32", rms_norm_eps=1e-6
)
AXES = dict(mrope_interleaved=True, mrope_section=[4, 2, 2])  # for text, without effect

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of transformers 5. Layers 3 and 5 have experts: there is a head, a period and a tail.
    "qwen3_vl-moe": {k: v for k, v in QWEN3_VL.items() if k != "rope_theta"}
    | dict(
        model_type="qwen3_vl_moe_text", architectures=["Qwen3VLMoeTextModel"], head_dim=8, attention_bias=True,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, num_hidden_layers=7, decoder_sparse_step=2,
        mlp_only_layers=[1], rope_parameters=AXES | dict(rope_type="default", rope_theta=1000.0),
    ),
    "qwen3_vl": QWEN3_VL
    | dict(
        model_type="qwen3_vl_text", architectures=["Qwen3VLTextModel"], head_dim=16, tie_word_embeddings=True,
        rope_scaling=AXES | dict(rope_type="default"),
    ),
}  # fmt: skip
STACK = "qwen3_vl-moe"
PARAMETERS = {
    "qwen3-vl-2b": 1_720_574_976, "qwen3-vl-4b": 4_022_468_096, "qwen3-vl-8b": 8_190_735_360,
    "qwen3-vl-32b": 32_762_123_264, "qwen3-vl-30b-a3b": 30_532_122_624, "qwen3-vl-235b-a22b": 235_093_634_560,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub (there with `language_model.` after `model.`)."""
    c, d, v = config, config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        layer, experts, width = f"model.layers.{n}", c.get("num_experts"), c.get("moe_intermediate_size")
        out |= attention(c, layer)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{layer}.self_attn.{norm}.weight": (c["head_dim"],) for norm in ("q_norm", "k_norm")}
        if not experts or n in c["mlp_only_layers"] or (n + 1) % c["decoder_sparse_step"]:
            out |= mlp(f"{layer}.mlp", c["intermediate_size"], d)
        else:
            out[f"{layer}.mlp.gate.weight"] = (experts, d)
            out[f"{layer}.mlp.experts.gate_up_proj"] = (experts, d, 2 * width)
            out[f"{layer}.mlp.experts.down_proj"] = (experts, width, d)
    return out


def vision_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape for the checkpoint's tower. Qwen3.5's has no DeepStack."""
    c = config["vision_config"]
    d, width, patch, wide = c["hidden_size"], c["intermediate_size"], c["patch_size"], c["out_hidden_size"]
    merged = c["spatial_merge_size"] ** 2 * d
    linear = lambda name, o, *i: {f"model.visual.{name}.weight": (o, *i), f"model.visual.{name}.bias": (o,)}
    out = linear("patch_embed.proj", d, c["in_channels"], c["temporal_patch_size"], patch, patch)
    out |= {"model.visual.pos_embed.weight": (c["num_position_embeddings"], d)}
    for n in range(c["depth"]):
        block = f"blocks.{n}"
        out |= linear(f"{block}.norm1", d) | linear(f"{block}.norm2", d)
        out |= linear(f"{block}.attn.qkv", 3 * d, d) | linear(f"{block}.attn.proj", d, d)
        out |= linear(f"{block}.mlp.linear_fc1", width, d) | linear(f"{block}.mlp.linear_fc2", d, width)
    deep = [f"deepstack_merger_list.{n}" for n in range(len(c["deepstack_visual_indexes"]))]
    for merger in ("merger", *deep):
        out |= linear(f"{merger}.norm", merged if merger in deep else d)
        out |= linear(f"{merger}.linear_fc1", merged, merged) | linear(f"{merger}.linear_fc2", wide, merged)
    return out


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters that a checkpoint with this config.json has beside the text model."""
    return sum(math.prod(shape) for shape in vision_shapes(config).values())


# ======================================================================================================================
# Qwen3-VL with its tower, which takes images and videos of any shape: a dense model, and a mixture of experts.
# ======================================================================================================================

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
# Rows and columns of patches. A row without an image, a row with one, a row with two of other shapes, and a row with a
# video of two pictures, which have one shape, and an image.
GRIDS = np.array([[4, 6], [2, 8], [6, 4], [4, 4], [4, 4], [2, 2]])
IN_VIDEO = np.array([False, False, False, True, True, False])
PLACES = ((1, 5), (2, 0), (2, 17), (3, 8), (3, 17), (3, 30))  # row of each picture, and position of its START
PICTURES = [
    np.random.RandomState(20 + n).uniform(-1, 1, (rows * columns, 24)).astype(np.float32)
    for n, (rows, columns) in enumerate(GRIDS)
]
PROMPTS = np.random.RandomState(3).randint(0, 60, (4, 40))
for (row, first), count, is_video in zip(PLACES, GRIDS.prod(axis=1) // 4, IN_VIDEO, strict=True):
    PROMPTS[row, first : first + count + 2] = [START, *[VIDEO if is_video else IMAGE] * count, END]
SPECIAL = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
TEMPLATE = (  # as Qwen3-VL's writes images and videos
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' or 'image' in p or 'image_url' in p %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif p.type == 'video' or 'video' in p %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant {% endif %}"
)
SHADES = np.random.RandomState(8).randint(0, 256, (12, 30, 3), np.uint8)
FRAMES = [PIL.Image.fromarray(SHADES[n : n + 8, :8]) for n in range(3)]
FILM = {"type": "video", "video": FRAMES, "fps": 2}


class Qwen3VL(Checkpoint):
    prompts, ids = PROMPTS, (IMAGE, VIDEO)
    pictures, grids, room = PICTURES, GRIDS, 32
    # Two documents with three images; text with padding; a video cut off before text; and a row as it is.
    packed = (
        ((1, 0, 13, 1), (2, 0, 27, 2)),
        ((0, 0, 30, 1), (0, 30, 40, 0)),
        ((3, 0, 24, 1), (0, 0, 16, 2)),
        ((3, 0, 40, 1),),
    )
    lengths, steps = (17, 13, 27, 38), 5
    lags = (0, 6 - 3, (4 - 4) + (6 - 3), 2 * (4 - 2) + (1 - 1))
    renamed = ({"model.visual.": "visual."},)
    inward = ("proj", "linear_fc2")
    refused = (
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'gelu_pytorch_tanh' is implemented"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(hidden_size=20), "hidden_size=20, which is no multiple of four times num_heads=2"),
        (dict(num_position_embeddings=8), "num_position_embeddings=8, no square"),
        (
            dict(deepstack_visual_indexes=[3, 5]),
            r"deepstack_visual_indexes=\[3, 5\], which do not rise from 0 to depth=5",
        ),
        (dict(out_hidden_size=16), "out_hidden_size=16, but the text model's hidden_size is 32"),
    )

    def __init__(self, name, *, architecture, text_names, deep, restated, parameters, **changes):
        """Uses DeepStack from these layers of the tower, and changes of the text model of tests/zoo/tiny."""
        self.name, self.architecture, self.text_names, self.deep = name, architecture, text_names, deep
        self.restated = [f"text_config.{key}" for key in ("tie_word_embeddings", *restated)]
        self.parameters, self.changes = parameters, changes

    @property
    def text(self):
        """The text model's config.json."""
        return tiny.CONFIGS[self.name] | self.changes

    def config(self):
        text = {key: value for key, value in self.text.items() if key != "architectures"}
        kind, tied = text["model_type"].removesuffix("_text"), text["tie_word_embeddings"]
        tower = TOWER | dict(model_type=kind, deepstack_visual_indexes=self.deep)
        names = dict(architectures=[self.architecture], model_type=kind)
        return OUTER | names | dict(text_config=text, vision_config=tower, tie_word_embeddings=tied)

    def tensors(self):
        module, random = tiny.MODULES[tiny.FAMILIES[self.name]], np.random.RandomState(5)
        text = filled(module.shapes(self.text), random, getattr(module, "values", tiny.values))
        start = lambda name: "model.language_model." if name.startswith("model.") else ""
        text = {start(name) + name.removeprefix("model."): value for name, value in text.items()}
        return text | filled(vision_shapes(self.config()), random)

    def add_chat(self, folder):
        own = dict(size=dict(shortest_edge=16, longest_edge=96), patch_size=2, merge_size=2, temporal_patch_size=2)
        characters = " <>." + string.ascii_letters[:46] + string.digits
        files = dict(preprocessor_config=own, video_preprocessor_config=own)
        add_chat(folder, characters, SPECIAL, TEMPLATE, **files)

    def chats(self, folder, tokenizer):
        """Returns a chat with two images of other shapes, the second downscaled, and one with an image and a video."""
        encode, shown = tokenizer.encode, [SHADES[:, :width] for width in (8, 30)]
        first, second = (image(PIL.Image.fromarray(one)) for one in shown)
        processed = [Processor.read(folder)(one) for one in shown]
        start, end = encode("user "), encode(" assistant ")
        inside = [[START, *[IMAGE] * (rows * columns), END] for rows, columns in ((3, 2), (1, 3))]  # features
        two = Chat(
            ask(first, text("and"), second),
            [*start, *inside[0], *encode("and"), *inside[1], *end],
            [one.patches for one in processed],
            np.array([[6, 4], [2, 6]]),
            room=32,
        )
        film = VideoProcessor.read(folder)([np.asarray(frame) for frame in FRAMES], [0.0, 0.5, 1.0])
        (pairs, rows, columns), count = film.grids[0], int(film.grids[0].prod()) // 8
        assert pairs == 2
        times = (encode("<0.2 seconds>"), encode("<1.0 seconds>"))
        stamped = [id for time in times for id in (*time, START, *[VIDEO] * count, END)]
        with_film = Chat(
            ask(first, FILM),
            [*start, *inside[0], START, *stamped, END, *end],
            [processed[0].patches, *np.split(film.patches, 2)],
            np.array([[6, 4], [rows, columns], [rows, columns]]),
            room=32,
        )
        return [two, with_film]

    def features(self, model, images):
        return {f"features {n}": level for n, level in enumerate(model.vision.levels(images.patches, images.grids))}

    def given(self):
        of = lambda chosen: np.concatenate([PICTURES[n] for n in np.flatnonzero(chosen)])
        return dict(
            pixel_values=of(~IN_VIDEO),
            pixel_values_videos=of(IN_VIDEO),
            image_grid_thw=np.insert(GRIDS[~IN_VIDEO], 0, 1, axis=1),
            video_grid_thw=np.array([[2, 4, 4]]),
            mm_token_type_ids=(PROMPTS == IMAGE) + 2 * (PROMPTS == VIDEO),
        )

    def their_features(self, model, given):
        import torch

        pixels, grids = np.concatenate(PICTURES), np.insert(GRIDS, 0, 1, axis=1)
        out = model.model.visual(torch.tensor(pixels).to(model.dtype), grid_thw=torch.tensor(grids))
        deep = getattr(out, "deepstack_features", None) or []
        return {f"features {n}": level for n, level in enumerate([out.pooler_output, *deep])}


SEEING = [
    Qwen3VL(  # the text model has two layers beyond those with DeepStack
        "qwen3_vl", architecture="Qwen3VLForConditionalGeneration", text_names=("qwen3_vl_text", "Qwen3VLTextModel"),
        deep=[0, 3], num_hidden_layers=4, restated=(),
        parameters={
            "qwen3-vl-2b": 2_127_532_032, "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696,
            "qwen3-vl-32b": 33_357_390_064,
        },
    ),
    Qwen3VL(
        "qwen3_vl-moe", architecture="Qwen3VLMoeForConditionalGeneration",
        text_names=("qwen3_vl_moe_text", "Qwen3VLMoeTextModel"), deep=[1], restated=("rope_parameters",),
        parameters={"qwen3-vl-30b-a3b": 31_070_754_032, "qwen3-vl-235b-a22b": 235_670_022_896},
    ),
]  # fmt: skip
