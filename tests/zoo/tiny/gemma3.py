"""Gemma 3, the text models."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp


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
    "gemma3-27b": 27_009_346_304,
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
