"""Gemma 2."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp


GEMMA2 = {k: v for k, v in COMMON.items() if k != "tie_word_embeddings"} | dict(
    model_type="gemma2", architectures=["Gemma2ForCausalLM"], rms_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh", attention_bias=False, num_hidden_layers=5, query_pre_attn_scalar=24,
    sliding_window=4, sliding_window_size=4, attn_logit_softcapping=3.0, final_logit_softcapping=8.0,
    cache_implementation="hybrid",
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA2,
    "gemma2-new": {k: v for k, v in GEMMA2.items() if k not in ("rope_theta", "hidden_act", "sliding_window_size")}
    | dict(
        rope_parameters=dict(rope_type="default", rope_theta=5000.0), use_bidirectional_attention=None,
        layer_types=[f"{kind}_attention" for kind in ("full", "full", "sliding", "full", "sliding")],
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True, rms_norm_eps=0.01,
        attention_bias=True,
    ),
}  # fmt: skip
STACK = "gemma2"
PARAMETERS = {"gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320}
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


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
        out |= {f"{layer}.{norm}.weight": (d,) for norm in NORMS}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Norms are stored minus 1."""
    return 0.3 * noise
