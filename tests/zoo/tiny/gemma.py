"""Gemma."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp


# A released file: the activation "gelu" is tanh's approximation, and tied embeddings are not stated.
GEMMA = {k: v for k, v in COMMON.items() if k != "tie_word_embeddings"} | dict(
    model_type="gemma", architectures=["GemmaForCausalLM"], rms_norm_eps=1e-6, hidden_act="gelu",
    hidden_activation=None, attention_bias=False, num_key_value_heads=1, rope_scaling=None,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma": GEMMA,
    "gemma-new": {k: v for k, v in GEMMA.items() if k not in ("hidden_activation", "rope_theta", "rope_scaling")}
    | dict(
        rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=2.0), rms_norm_eps=0.01,
        hidden_act="gelu_pytorch_tanh", num_key_value_heads=4, tie_word_embeddings=False, attention_bias=True,
        use_bidirectional_attention=None,
    ),
}  # fmt: skip
STACK = "gemma"
PARAMETERS = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
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
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Norms are stored minus 1."""
    return 0.3 * noise
