"""Mistral Small 3, Ministral 3 and Devstral Small 2: their text models, whose tensors are Mistral's."""

import string
from typing import Any

import jax.numpy as jnp
import numpy as np
import PIL.Image

from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, template, text
from tests.zoo.tiny import filled, mistral
from tests.zoo.tiny import values as usual
from zoo.vision.processors.base import patchify
from zoo.vision.towers.pixtral import places


CONFIGS: dict[str, dict[str, Any]] = {
    "ministral3": {k: v for k, v in mistral.MISTRAL.items() if k != "rope_theta"}
    | dict(
        model_type="ministral3", architectures=["Ministral3ForCausalLM"], sliding_window=None, head_dim=12,
        rope_parameters=dict(
            rope_type="yarn", type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=8,
            beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
        ),
    ),
}  # fmt: skip
STACK = "ministral3"
PARAMETERS = {
    "mistral-small-3.1-24b": 23_572_403_200, "mistral-small-3.2-24b": 23_572_403_200,
    "ministral3-3b": 3_429_006_336, "ministral3-8b": 8_489_553_920, "ministral3-14b": 13_506_073_600,
    "devstral-small-2-24b": 23_572_403_200,
}  # fmt: skip
shapes, values = mistral.shapes, mistral.values


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters beside the text model: Pixtral's tower, and the projection of its output."""
    if "vision_config" not in config:
        return 0
    c, embed = config["vision_config"], config["text_config"]["hidden_size"]
    d, width = c["hidden_size"], c["intermediate_size"]
    tower = (
        c["num_channels"] * c["patch_size"] ** 2 * d + d + c["num_hidden_layers"] * (4 * d * d + 3 * d * width + 2 * d)
    )
    return tower + d + config["spatial_merge_size"] ** 2 * d * d + d * embed + embed * embed


# ======================================================================================================================
# Mistral Small 3.1 and Ministral 3 with Pixtral's tower, which takes images of any shape.
# ======================================================================================================================

BESIDE = ("architectures", "torch_dtype", "tie_word_embeddings")  # as released: no key states untied embeddings
IMAGE, BREAK, END = 10, 12, 13
TOWER = dict(
    attention_dropout=0.0, head_dim=8, hidden_act="silu", hidden_size=16, image_size=32, initializer_range=0.02,
    intermediate_size=40, model_type="pixtral", num_attention_heads=2, num_channels=3, num_hidden_layers=2,
    patch_size=2, rope_theta=100.0,
)  # fmt: skip
CONFIG = dict(
    architectures=["Mistral3ForConditionalGeneration"], image_token_index=IMAGE, model_type="mistral3",
    multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, torch_dtype="float32",
    vision_feature_layer=-1, transformers_version="4.50.0.dev0", vision_config=TOWER,
)  # fmt: skip
GRIDS = np.array([[4, 6], [6, 2], [2, 8]])  # rows and columns of patches
# A row without an image, a row that ends with one, and a row with two, one right after the other, between text.
PROMPTS = np.random.RandomState(3).randint(14, 64, (3, 24))
WIDE, TALL, LOW = [([IMAGE] * (c // 2) + [BREAK]) * (r // 2 - 1) + [IMAGE] * (c // 2) + [END] for r, c in GRIDS]
PROMPTS[1, 16:] = WIDE
PROMPTS[2, 2:13] = TALL + LOW
LEVELS = [np.random.RandomState(n).randint(0, 256, (*2 * grid, 3)).astype(np.uint8) for n, grid in enumerate(GRIDS)]
MEAN, STD = 0.5, 0.25
PIXELS = [((levels / 255 - MEAN) / STD).astype(np.float32) for levels in LEVELS]  # [height, width, 3]
ROOM = 32
# In row order, where the patches of a feature are neighbours.
BY_ROWS = np.tile(np.arange(ROOM), (3, 1))
for index, (rows, columns) in zip(BY_ROWS, GRIDS, strict=True):
    blocks = np.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 2)
    index[: rows * columns] = np.argsort(blocks.ravel())
OPTIONS = dict(tie_word_embeddings=False)


class Mistral3(Checkpoint):
    prompts, ids = PROMPTS, (IMAGE,)
    pictures, grids, room = [patchify(one[None], 2, merge_size=2) for one in PIXELS], GRIDS, ROOM
    # Two documents with images; text with padding; padding.
    packed = ((2, 0, 14, 1), (1, 14, 24, 2)), ((0, 0, 20, 1), (0, 20, 24, 0)), ((0, 0, 24, 0),)
    lengths, steps = (10, 24, 13), 11
    renamed = (  # since 4.52 all names begin with `model.`; before, only the head's does not
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    )
    inward = ("o_proj", "down_proj", "linear_2")
    refused = (
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'silu' is implemented"),
        (dict(hidden_act=None), "hidden_act"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(head_dim=4), r"hidden_size=16, which is not num_attention_heads=2 times a head_dim that .* \(4\)"),
        (dict(head_dim=None, num_attention_heads=8), r"num_attention_heads=8 times .* multiple of 4 \(2\)"),
        (dict(rope_parameters=dict(rope_theta=1e4, rope_type="yarn")), "only a rope_theta is implemented"),
    )
    options = OPTIONS

    def __init__(self, name, *, text_names, parameters, restated=(), **changes):
        """Uses the text model of this name with these changes."""
        self.name, self.text_names, self.parameters, self.restated = name, text_names, parameters, restated
        self.text = (CONFIGS | mistral.CONFIGS)[name] | changes

    def config(self):
        return CONFIG | dict(text_config={key: value for key, value in self.text.items() if key not in BESIDE})

    def tensors(self):
        d, width, embed = TOWER["hidden_size"], TOWER["intermediate_size"], self.text["hidden_size"]
        out = {"vision_tower.patch_conv.weight": (d, 3, 2, 2), "vision_tower.ln_pre.weight": (d,)}
        for n in range(TOWER["num_hidden_layers"]):
            layer = f"vision_tower.transformer.layers.{n}"
            out |= {f"{layer}.attention.{name}_proj.weight": (d, d) for name in "qkvo"}
            out |= {f"{layer}.feed_forward.{name}_proj.weight": (width, d) for name in ("gate", "up")}
            out |= {f"{layer}.feed_forward.down_proj.weight": (d, width)}
            out |= {f"{layer}.{norm}_norm.weight": (d,) for norm in ("attention", "ffn")}
        projector = {"norm": (d,), "patch_merger.merging_layer": (d, 4 * d), "linear_1": (embed, d)}
        projector |= {"linear_2": (embed, embed)}
        out |= {f"multi_modal_projector.{name}.weight": shape for name, shape in projector.items()}
        out |= {f"language_model.{name}": shape for name, shape in shapes(self.text).items()}
        return filled(out, np.random.RandomState(5), lambda name, noise: usual(name.replace("ln_pre", "norm"), noise))

    def add_chat(self, folder):
        own = dict(size=dict(longest_edge=32), patch_size=2, image_mean=[MEAN] * 3, image_std=[STD] * 3)
        outer = dict(patch_size=2, spatial_merge_size=2)
        special = {"[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END}
        files = dict(preprocessor_config=own, processor_config=outer)
        add_chat(folder, string.ascii_letters + string.digits[:9], special, template("[IMG]"), **files)

    def chats(self, folder, tokenizer):
        """Returns the third prompt with its pictures."""
        prompt = PROMPTS[2].tolist()
        shown = [image(PIL.Image.fromarray(levels)) for levels in LEVELS[1:]]
        messages = ask(text(tokenizer.decode(prompt[:2])), *shown, text(tokenizer.decode(prompt[13:])))
        return [Chat(messages, prompt, self.pictures[1:], GRIDS[1:], room=16, within=1e-6)]

    def features(self, model, images):
        tower = model.vision.tower(images.patches, places(images.grids, ROOM, 2))
        features = model.vision(images.patches, images.grids)
        return dict(
            tower=jnp.take_along_axis(tower, np.resize(BY_ROWS, (len(tower), ROOM))[..., None], axis=1),
            features=features,
        )

    def given(self):
        pixels = np.zeros((3, 3, *2 * GRIDS.max(axis=0)), np.float32)
        for canvas, one in zip(pixels, PIXELS, strict=True):
            canvas[:, : one.shape[0], : one.shape[1]] = one.transpose(2, 0, 1)
        return dict(pixel_values=pixels, image_sizes=2 * GRIDS)

    def their_features(self, model, given):
        import torch

        out = model.model.get_image_features(**given, return_dict=True)
        return dict(tower=out.last_hidden_state[0], features=torch.cat(out.pooler_output))


SEEING = [
    Mistral3(
        "ministral3", text_names=("ministral3", "Ministral3ForCausalLM"), restated=("text_config.rope_parameters",),
        parameters={
            "ministral3-3b-instruct": 3_849_090_048, "ministral3-8b-instruct": 8_918_026_240,
            "ministral3-14b-instruct": 13_945_031_680, "devstral-small-2-24b": 24_011_361_280,
        },
    ),
    Mistral3(
        "mistral", text_names=("mistral", "MistralForCausalLM"), sliding_window=None, head_dim=12,
        parameters={"mistral-small-3.1-24b": 24_011_361_280},
    ),
]  # fmt: skip
