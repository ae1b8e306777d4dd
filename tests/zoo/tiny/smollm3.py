"""SmolLM3."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, biases, mlp
from tests.zoo.tiny import values as usual


SMOLLM3 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="smollm3", architectures=["SmolLM3ForCausalLM"], rms_norm_eps=1e-6, hidden_size=64, mlp_bias=False,
    attention_bias=False, tie_word_embeddings=True, use_sliding_window=False, sliding_window=None, pretraining_tp=2,
    pad_token_id=0,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

CONFIGS: dict[str, dict[str, Any]] = {
    "smollm3": SMOLLM3 | dict(num_hidden_layers=7, no_rope_layer_interval=3),  # a period of three twice, and a tail
    "smollm3-window-head": SMOLLM3
    | dict(
        num_hidden_layers=6, no_rope_layers=[1, 1, 0, 1, 0, 1], use_sliding_window=True, sliding_window=4,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
    ),
    "smollm3-lists-new": {k: v for k, v in SMOLLM3.items() if k not in ("rope_theta", "num_key_value_heads")}
    | dict(
        num_hidden_layers=4, no_rope_layers=[0, 1, 0, 1], rope_parameters=YARN | dict(rope_theta=5000.0),
        layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")], use_sliding_window=True,
        sliding_window=6, num_attention_heads=8, head_dim=12, rms_norm_eps=0.01,
    ),
}  # fmt: skip
STACK = "smollm3-window-head"
PARAMETERS = {"smollm3-3b": 3_075_098_624}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    config = dict(num_key_value_heads=4, mlp_bias=False, tie_word_embeddings=True) | config
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        matrices = mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= attention(config, layer) | matrices | (biases(matrices) if config["mlp_bias"] else {})
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with queries so small that they see several keys. With one, logits would keep four digits of
    float32.
    """
    return 0.1 * noise if name.endswith("q_proj.weight") else usual(name, noise)
