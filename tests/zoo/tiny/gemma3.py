"""Gemma 3, the text models."""

import base64
import io
import string
from typing import Any

import numpy as np
import PIL.Image

from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, patches, text
from tests.zoo.tiny import COMMON, attention, biases, filled, first_layers, mlp


GEMMA3 = {k: v for k, v in COMMON.items() if k not in ("tie_word_embeddings", "hidden_act")} | dict(
    model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], rms_norm_eps=1e-6, attention_bias=False,
    hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
    query_pre_attn_scalar=24, sliding_window=4, cache_implementation="hybrid",
)  # fmt: skip
SCALING = dict(rope_type="linear", factor=8.0)

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3-pattern": GEMMA3
    | dict(num_hidden_layers=5, sliding_window_pattern=2, rope_scaling=SCALING, rope_local_base_freq=100),
    "gemma3": GEMMA3 | dict(num_hidden_layers=7, rope_local_base_freq=100, rope_scaling=None),
    "gemma3-new": {k: v for k, v in GEMMA3.items() if k != "rope_theta"}
    | dict(
        rope_parameters=dict(
            full_attention=SCALING | dict(rope_theta=5000.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
        layer_types=[f"{kind}_attention" for kind in ("full", "full", "sliding", "full", "sliding")],
        num_hidden_layers=5, _sliding_window_pattern=6, tie_word_embeddings=False, rms_norm_eps=0.01,
        use_bidirectional_attention=False, attention_bias=True,
    ),
}  # fmt: skip
STACK = "gemma3-pattern"
PARAMETERS = {  # without the vision tower
    "gemma3-270m": 268_098_176, "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304, "embeddinggemma-300m": 302_863_104,
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub by the text-only models."""
    d = config["hidden_size"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not config.get("tie_word_embeddings", True):
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(config, layer) | mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in NORMS}
        out |= {f"{layer}.self_attn.{norm}.weight": (config["head_dim"],) for norm in ("q_norm", "k_norm")}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Norms are stored minus 1."""
    return 0.3 * noise


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters beside the text model: SigLIP's tower, and the projection of its output."""
    if "vision_config" not in config:
        return 0
    c = config["vision_config"]
    d, width, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    patches = (c["image_size"] // patch) ** 2
    linear = lambda inputs, outputs: inputs * outputs + outputs
    norm = 2 * d
    layer = 4 * linear(d, d) + linear(d, width) + linear(width, d) + 2 * norm
    embeddings = linear(c.get("num_channels", 3) * patch**2, d) + patches * d
    projector = d + d * config["text_config"]["hidden_size"]
    return embeddings + c["num_hidden_layers"] * layer + norm + projector


# ======================================================================================================================
# Gemma 3 with SigLIP's tower: it takes images of one shape, and an image's tokens see each other both ways.
# ======================================================================================================================

START, END, IMAGE = 61, 62, 63
LAYERS = 4  # text layers: sliding ones and full ones, twice
TOWER = dict(
    model_type="siglip_vision_model", hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=2, image_size=12, patch_size=2, num_channels=3, layer_norm_eps=1e-3,
    hidden_act="gelu_pytorch_tanh", attention_dropout=0.0, vision_use_head=False,
)  # fmt: skip
CONFIG = dict(
    model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], boi_token_index=START, eoi_token_index=END,
    image_token_index=IMAGE, mm_tokens_per_image=9, eos_token_id=[1, 9], torch_dtype="float32", initializer_range=0.02,
    vision_config=TOWER,
)  # fmt: skip
BESIDE = ("architectures", "torch_dtype", "eos_token_id", "tie_word_embeddings")
# A row without an image, a row with one, and a row with two next to each other except for the tokens around them. An
# image is longer than the window of 4, and one ends the row.
PROMPTS = np.random.RandomState(3).randint(0, 60, (3, 40))
PROMPTS[1, 30:40] = [START] + [IMAGE] * 9
PROMPTS[2, 5:27] = ([START] + [IMAGE] * 9 + [END]) * 2
PIXELS = np.random.RandomState(4).uniform(-1, 1, (3, 3, 12, 12)).astype(np.float32)  # each image is [3, 12, 12]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
WITH_TOWER = {
    "gemma3-4b": 4_300_079_472,
    "gemma3-12b": 12_187_325_040,
    "gemma3-27b": 27_432_406_640,
}  # numbers of parameters


def url(shown: PIL.Image.Image) -> dict:
    """Returns an image part of a message as OpenAI's clients send it."""
    shown.save(file := io.BytesIO(), "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


class Gemma3(Checkpoint):
    name = "gemma3-pattern"
    prompts, ids = PROMPTS, (IMAGE,)
    pictures, grids, room = patches(PIXELS), np.full((3, 2), 6), 36
    # Two documents with images, the second cut off; text with padding; text.
    packed = ((2, 0, 27, 1), (1, 27, 40, 2)), ((0, 0, 30, 1), (0, 30, 40, 0)), ((0, 0, 20, 1), (0, 20, 40, 2))
    lengths, steps = (17, 40, 30), 10
    renamed = (  # since 4.52 all begin with `model.`; 5.23 writes the tower without `vision_model.`, too
        {"vision_tower.vision_model.": "vision_tower."},
        {
            "vision_tower.vision_model.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
            "language_model.model.": "model.language_model.",
        },
    )
    restated = ("text_config.sliding_window_pattern",)
    text_names = ("gemma3_text", "Gemma3ForCausalLM")
    inward = ("out_proj", "fc2")
    refused = (
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'gelu_pytorch_tanh' is implemented"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(hidden_size=25), "hidden_size=25, which is no multiple of num_attention_heads=2"),
        (dict(patch_size=5), "image_size=12, which is no multiple of patch_size=5"),
        (dict(image_size=8), "mm_tokens_per_image=9 is not the square of a divisor of 4, the number of patches"),
        (dict(image_size="big"), "vision_config says image_size='big'; it needs int"),
    )
    parameters = WITH_TOWER

    def config(self):
        text = {key: value for key, value in CONFIGS[self.name].items() if key not in BESIDE}
        return CONFIG | dict(text_config=text | dict(num_hidden_layers=LAYERS))

    def tensors(self):
        d, width, patch, tower = TOWER["hidden_size"], TOWER["intermediate_size"], 2, "vision_tower.vision_model"
        matrices = {f"{tower}.embeddings.patch_embedding.weight": (d, 3, patch, patch)}
        norms = {f"{tower}.post_layernorm.weight": (d,)}
        for n in range(TOWER["num_hidden_layers"]):
            layer = f"{tower}.encoder.layers.{n}"
            matrices |= {f"{layer}.self_attn.{name}_proj.weight": (d, d) for name in ("q", "k", "v", "out")}
            matrices |= {f"{layer}.mlp.fc1.weight": (width, d), f"{layer}.mlp.fc2.weight": (d, width)}
            norms |= {f"{layer}.layer_norm{i}.weight": (d,) for i in (1, 2)}
        shapes = matrices | norms | biases(matrices | norms) | {
            f"{tower}.embeddings.position_embedding.weight": ((TOWER["image_size"] // patch) ** 2, d),
            "multi_modal_projector.mm_input_projection_weight": (d, CONFIGS[self.name]["hidden_size"]),
            "multi_modal_projector.mm_soft_emb_norm.weight": (d,),
        }  # fmt: skip
        return first_layers(self.name, LAYERS) | filled(shapes, np.random.RandomState(5))

    def add_chat(self, folder):
        own = dict(size=dict(height=12, width=12), image_seq_length=9, image_mean=[0.5] * 3)
        special = {"<start_of_image>": START, "<end_of_image>": END, "<image_soft_token>": IMAGE}
        characters = " " + string.ascii_letters + string.digits[:7] + "\n"
        add_chat(folder, characters, special, TEMPLATE, preprocessor_config=own)

    def chats(self, folder, tokenizer):
        """Returns a chat with two images, by Pillow and as a data URL; a user's letters of a control token are text."""
        levels = ((PIXELS[:2] + 1) * 127.5).astype(np.uint8).transpose(0, 2, 3, 1)
        shown = [PIL.Image.fromarray(one) for one in levels]
        messages = ask(text("see<start_of_image>"), image(shown[0]), url(shown[1]), text("what is it"))
        letters = [id for letter in "see<start_of_image>" for id in tokenizer.encode(letter)]
        inside = [60, 60, START, *[IMAGE] * 9, END, 60, 60]
        ids = [*letters, *inside, *inside, *tokenizer.encode("what is it")]
        pictures = patches((levels / 127.5 - 1).astype(np.float32).transpose(0, 3, 1, 2))
        return [Chat(messages, ids, pictures, np.full((2, 2), 6), room=36, within=1e-6)]

    def features(self, model, images):
        tower, features = model.vision.tower(images.patches), model.vision(images.patches, images.grids)
        return dict(tower=tower, features=features)

    def given(self):
        return dict(pixel_values=PIXELS, token_type_ids=(PROMPTS == IMAGE).astype(int))

    def their_features(self, model, given):
        out = model.model.get_image_features(given["pixel_values"], return_dict=True)
        return dict(tower=out.last_hidden_state, features=out.pooler_output)


SEEING = [Gemma3()]
