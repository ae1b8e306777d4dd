"""Llama 4, the text model."""

import math
from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp
from tests.zoo.tiny import values as usual


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
