"""Llama 4, the text model."""

import math
import string
from typing import Any

import numpy as np
import PIL.Image

from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, patches, template, text
from tests.zoo.tiny import COMMON, attention, filled, first_layers, mlp
from tests.zoo.tiny import values as usual
from zoo.vision.processors.llama4 import Llama4 as Processor


LLAMA4 = COMMON | dict(
    model_type="llama4_text", architectures=["Llama4ForCausalLM"], rms_norm_eps=1e-5, intermediate_size=24,
    intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1,
    attention_chunk_size=8, attention_bias=False, attn_temperature_tuning=True, attn_scale=0.5, floor_scale=4,
    use_qk_norm=True, router_aux_loss_coef=0.001, router_jitter_noise=0.0, output_router_logits=False, pad_token_id=0,
)  # fmt: skip
# A step without a ramp, as in Scout.
ROPE = dict(
    rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=16
)
CHUNKED, FULL = "chunked_attention", "full_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    "llama4-alternating": LLAMA4
    | dict(num_hidden_layers=8, interleave_moe_layer_step=2, nope_layer_interval=4, use_qk_norm=False),
    "llama4": LLAMA4
    | dict(num_hidden_layers=5, no_rope_layers=[], no_rope_layer_interval=2, rope_scaling=ROPE, num_local_experts=6),
    "llama4-lists-new": {k: v for k, v in LLAMA4.items() if k != "rope_theta"}
    | dict(
        rope_parameters=ROPE | dict(rope_theta=10000.0), num_hidden_layers=6, no_rope_layers=[0, 1, 0, 1, 0, 1],
        layer_types=[CHUNKED, CHUNKED, FULL, CHUNKED, FULL, FULL], moe_layers=[1, 3, 5], num_experts_per_tok=2,
        attn_temperature_tuning=False, attention_bias=True, tie_word_embeddings=True,
    ),
}  # fmt: skip
STACK = "llama4-lists-new"
PARAMETERS = {"llama4-scout": 107_769_861_120, "llama4-maverick": 400_711_848_960}  # without the vision tower


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, width = (config[key] for key in ("hidden_size", "vocab_size", "intermediate_size"))
    layers, step = config["num_hidden_layers"], config["interleave_moe_layer_step"]
    moe_layers = config.get("moe_layers") or range(step - 1, layers, step)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(layers):
        layer = f"model.layers.{n}"
        out |= attention(config, layer)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if n in moe_layers:
            experts = config["num_local_experts"]
            out[f"{layer}.feed_forward.router.weight"] = (experts, d)
            out[f"{layer}.feed_forward.experts.gate_up_proj"] = (experts, d, 2 * width)
            out[f"{layer}.feed_forward.experts.down_proj"] = (experts, width, d)
            out |= mlp(f"{layer}.feed_forward.shared_expert", width, d)
        else:
            out |= mlp(f"{layer}.feed_forward", config["intermediate_size_mlp"], d)
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with queries small enough to see several keys, and small experts, so that bfloat16's changes of
    choice weigh little.
    """
    scale = {"q_proj.weight": 0.1, "experts.down_proj": 0.05}
    return next((scale[end] * noise for end in scale if name.endswith(end)), usual(name, noise))


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters that a checkpoint with this config.json has beside the text model."""
    return sum(math.prod(shape) for shape in vision_shapes(config).values())


def vision_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, for the tensors beside the text model."""
    c = config["vision_config"]
    d, width, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    linear = lambda name, o, i: {f"vision_model.{name}.weight": (o, i), f"vision_model.{name}.bias": (o,)}
    norm = lambda name: {f"vision_model.{name}.{part}": (d,) for part in ("weight", "bias")}
    out: dict[str, tuple[int, ...]] = {
        "vision_model.patch_embedding.linear.weight": (d, c["num_channels"] * patch**2),
        "vision_model.class_embedding": (d,),
        "vision_model.positional_embedding_vlm": ((c["image_size"] // patch) ** 2 + 1, d),
        "vision_model.vision_adapter.mlp.fc1.weight": (c["projector_input_dim"], width),
        "vision_model.vision_adapter.mlp.fc2.weight": (c["projector_output_dim"], c["projector_output_dim"]),
        "multi_modal_projector.linear_1.weight": (config["text_config"]["hidden_size"], c["vision_output_dim"]),
    }
    out |= norm("layernorm_pre") | norm("layernorm_post")
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        for projection in "qkvo":
            out |= linear(f"{layer}.self_attn.{projection}_proj", d, d)
        out |= linear(f"{layer}.mlp.fc1", width, d) | linear(f"{layer}.mlp.fc2", d, width)
        out |= norm(f"{layer}.input_layernorm") | norm(f"{layer}.post_attention_layernorm")
    return out


# ======================================================================================================================
# Llama 4 with its tower, which takes tiles of one shape: an image is one tile, or several and one of the whole.
# ======================================================================================================================

TOWER = dict(
    model_type="llama4_vision_model", hidden_size=24, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, num_channels=3, image_size=12, patch_size=2, pixel_shuffle_ratio=0.5,
    projector_input_dim=40, projector_output_dim=40, vision_output_dim=40, rope_theta=100.0, norm_eps=1e-5,
    hidden_act="gelu", attention_dropout=0.0, projector_dropout=0.0, multi_modal_projector_bias=False,
    vision_feature_layer=-1, vision_feature_select_strategy="default", initializer_range=0.02,
)  # fmt: skip
CONFIG = dict(
    model_type="llama4", architectures=["Llama4ForConditionalGeneration"], boi_token_index=57, eoi_token_index=62,
    image_token_index=61, torch_dtype="float32", vision_config=TOWER,
)  # fmt: skip
START, NEXT, NEW_ROW, WHOLE, PATCH, END = range(57, 63)
SPECIAL = ("image_start", "tile_x_separator", "tile_y_separator", "image", "patch", "image_end")
TILE = [PATCH] * 9
# A row without an image; a row with a small image, whose tile ends the row; and a row with an image of two tiles next
# to each other, and a third one of the whole. A tile is longer than the attention's chunk of 8.
PROMPTS = np.random.RandomState(3).randint(0, 57, (3, 40))
PROMPTS[1, 29:40] = [START, WHOLE, *TILE]
PROMPTS[2, 4:36] = [START, *TILE, NEXT, *TILE, NEW_ROW, WHOLE, *TILE, END]
PIXELS = np.random.RandomState(4).uniform(-1, 1, (4, 3, 12, 12)).astype(np.float32)  # each tile is [3, 12, 12]
# Numbers of parameters.
WITH_TOWER = {"llama4-scout": 108_641_793_536, "llama4-maverick": 401_583_781_376}


def vision_values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values that make features about as large as embeddings, so that the layers' additions to them show."""
    return usual(name, noise) * (0.4 if "adapter" in name or "projector" in name else 1)


class Llama4(Checkpoint):
    prompts, ids = PROMPTS, (PATCH,)
    pictures, grids, room = patches(PIXELS), np.full((4, 2), 6), 36
    # Three documents, of which two have a tile; text with padding; text.
    packed = (
        ((2, 0, 14, 1), (1, 29, 40, 2), (0, 0, 15, 3)),
        ((0, 0, 30, 1), (0, 30, 40, 0)),
        ((0, 0, 20, 1), (0, 20, 40, 2)),
    )
    lengths, steps = (37, 40, 36), 4
    restated = ("text_config.no_rope_layers",)
    text_names = ("llama4_text", "Llama4ForCausalLM")
    inward = ("o_proj", "fc2")
    refused = (
        (dict(hidden_act="silu"), "vision_config says hidden_act='silu', but only 'gelu' is implemented"),
        (dict(norm_eps=1e-6), "vision_config says norm_eps=1e-06, but only 1e-05 is implemented"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(rope_parameters=dict(rope_type="yarn")), "vision_config has the key 'rope_parameters'"),
        (dict(hidden_size=20), r"hidden_size=20, which is no multiple of 4 \* num_attention_heads=2"),
        (dict(patch_size=5), "image_size=12, which is no multiple of patch_size=5"),
        (dict(pixel_shuffle_ratio=0.25), "pixel_shuffle_ratio=0.25, which is not one over a divisor of the 6 patches"),
        (dict(intermediate_size=48), "intermediate_size=48, but its adapter reads 96 features: those of 4 patches"),
        (dict(vision_output_dim=41), r"vision_output_dim \(40, 40, 41\), which must be equal"),
    )
    parameters = WITH_TOWER

    def __init__(self, name: str, layers: int | None = None):
        """Uses this text model of tests/zoo/tiny, or its first layers."""
        self.name, self.layers = name, layers or CONFIGS[name]["num_hidden_layers"]

    def config(self):
        text = {key: value for key, value in CONFIGS[self.name].items() if key != "architectures"}
        return CONFIG | dict(text_config=text | dict(num_hidden_layers=self.layers))

    def tensors(self):
        shapes = vision_shapes(self.config())
        return first_layers(self.name, self.layers) | filled(shapes, np.random.RandomState(5), vision_values)

    def add_chat(self, folder):
        own = dict(size=dict(height=12, width=12), patch_size=2, max_patches=4)
        special = {f"<|{name}|>": id for id, name in enumerate(SPECIAL, START)}
        add_chat(folder, " " + string.ascii_letters, special, template("<|image|>"), preprocessor_config=own)

    def chats(self, folder, tokenizer):
        """Returns a chat with an image of two tiles, and one of a single tile, as in the prompts."""
        wide, small = (PIL.Image.effect_noise(size, 90).convert("RGB") for size in ((24, 12), (12, 12)))
        ids = [*tokenizer.encode("see"), *PROMPTS[2, 4:36].tolist(), *PROMPTS[1, 29:].tolist(), END]
        whole = wide.resize((12, 12), PIL.Image.Resampling.BILINEAR)
        tiles = [wide.crop((0, 0, 12, 12)), wide.crop((12, 0, 24, 12)), whole, small]
        normalize = Processor.read(folder).normalize
        pictures = patches(np.stack([normalize(np.asarray(tile)) for tile in tiles]).transpose(0, 3, 1, 2))
        return [Chat(ask(text("see"), image(wide), image(small)), ids, pictures, np.full((4, 2), 6), room=36)]

    def features(self, model, images):
        tower, features = model.vision.tower(images.patches), model.vision(images.patches, images.grids)
        return dict(tower=tower, features=features)

    def given(self):
        return dict(pixel_values=PIXELS)

    def their_features(self, model, given):
        tower = model.get_image_features(given["pixel_values"], return_dict=True).last_hidden_state
        return dict(tower=tower, features=model.multi_modal_projector(tower))


SEEING = [Llama4("llama4", layers=4)]
