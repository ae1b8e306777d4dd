"""Mistral."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp


MISTRAL = COMMON | dict(
    model_type="mistral", architectures=["MistralForCausalLM"], rms_norm_eps=1e-5, sliding_window=4,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": MISTRAL | dict(head_dim=None),
    "mistral-new": {k: v for k, v in MISTRAL.items() if k != "rope_theta"}
    | dict(
        rope_parameters=dict(rope_type="default", rope_theta=5000.0), sliding_window=None, tie_word_embeddings=True,
        rms_norm_eps=0.01,
    ),
    "ministral3": {k: v for k, v in MISTRAL.items() if k != "rope_theta"}
    | dict(
        model_type="ministral3", architectures=["Ministral3ForCausalLM"], sliding_window=None, head_dim=12,
        rope_parameters=dict(
            rope_type="yarn", type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=8,
            beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
        ),
    ),
}  # fmt: skip
STACK = "mistral"
PARAMETERS = {
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.2": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-3.1-24b": 23_572_403_200, "mistral-small-3.2-24b": 23_572_403_200,
    "ministral3-3b": 3_429_006_336, "ministral3-8b": 8_489_553_920, "ministral3-14b": 13_506_073_600,
    "devstral-small-2-24b": 23_572_403_200,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(config, layer) | mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return out


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


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, so small that attention is not sharp enough to magnify rounding."""
    return 1 + 0.3 * noise if "norm" in name else 0.3 * noise
