"""Phi-3.5 and Phi-4."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON
from tests.zoo.tiny import values as usual


PHI3 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="phi3", architectures=["Phi3ForCausalLM"], rms_norm_eps=1e-5, hidden_size=64, embd_pdrop=0.0,
    resid_pdrop=0.0, attention_bias=False, rope_scaling=None, original_max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5, 2.8], [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 20.0, 30.0]

CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": PHI3 | dict(sliding_window=4, partial_rotary_factor=0.5, tie_word_embeddings=True),
    # Sequences are longer than the original context, and in the next one shorter.
    "phi3-long": PHI3
    | dict(
        num_hidden_layers=2, num_key_value_heads=1, original_max_position_embeddings=16, partial_rotary_factor=0.75,
        rope_scaling=dict(type="longrope", short_factor=SHORT[:6], long_factor=LONG[:6]), sliding_window=64,
        full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False, tie_word_embeddings=True,
    ),
    "phi3-short-new": {k: v for k, v in PHI3.items() if k not in ("rope_theta", "rope_scaling", "num_key_value_heads")}
    | dict(
        num_hidden_layers=2, original_max_position_embeddings=48, rms_norm_eps=0.01,
        rope_parameters=dict(
            rope_type="longrope", short_factor=SHORT, long_factor=LONG, rope_theta=5000.0, partial_rotary_factor=1.0
        ),
    ),
}  # fmt: skip
STACK = "phi3"
PARAMETERS = {"phi3.5-mini": 3_821_079_552, "phi4-14b": 14_659_507_200, "phi4-mini": 3_836_021_760}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, heads, width = (
        config[key] for key in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    )
    head, kv = config.get("head_dim") or d // heads, config.get("num_key_value_heads") or heads
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {
            f"{layer}.self_attn.qkv_proj.weight": ((heads + 2 * kv) * head, d),
            f"{layer}.self_attn.o_proj.weight": (d, heads * head),
            f"{layer}.mlp.gate_up_proj.weight": (2 * width, d),
            f"{layer}.mlp.down_proj.weight": (d, width),
        }
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with queries and keys so small that attention is not sharp enough to magnify rounding."""
    return 0.2 * noise if name.endswith("qkv_proj.weight") else usual(name, noise)
