"""Mistral 7B."""

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
}  # fmt: skip
STACK = "mistral"
PARAMETERS = {
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.2": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
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


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, so small that attention is not sharp enough to magnify rounding."""
    return 1 + 0.3 * noise if "norm" in name else 0.3 * noise
