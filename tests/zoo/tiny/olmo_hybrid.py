"""Olmo Hybrid."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp
from tests.zoo.tiny import values as usual


OLMO_HYBRID = {k: v for k, v in COMMON.items() if k not in ("head_dim", "rope_theta")} | dict(
    model_type="olmo_hybrid", architectures=["OlmoHybridForCausalLM"], rms_norm_eps=1e-6, attention_bias=False,
    linear_a_log_max=16.0, linear_a_log_min=0.0, linear_dt_init_floor=0.0001, linear_dt_max=0.1, linear_dt_min=0.001,
    bos_token_id=None, pad_token_id=0,
)  # fmt: skip
SIZES = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)


def layers(kinds: str) -> dict[str, Any]:
    types = ["full_attention" if kind == "f" else "linear_attention" for kind in kinds]
    return dict(layer_types=types, num_hidden_layers=len(types))


CONFIGS: dict[str, dict[str, Any]] = {
    # As the released file: without rotary positions.
    "olmo_hybrid": OLMO_HYBRID
    | layers("lflf")
    | dict(rope_parameters=dict(rope_theta=None), linear_num_value_heads=4, linear_num_key_heads=4)
    | dict(linear_key_head_dim=6, linear_value_head_dim=12, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True),
    # A head, a period of two layers and a tail; key heads that value heads share, and one head of keys in attention.
    "olmo_hybrid-rope": OLMO_HYBRID
    | layers("llflfl")
    | SIZES
    | dict(
        rope_parameters=dict(rope_type="default", rope_theta=5000.0), num_key_value_heads=1, attention_bias=True,
        tie_word_embeddings=True, linear_conv_kernel_dim=3, linear_allow_neg_eigval=True, rms_norm_eps=0.01,
    ),
    # Sizes, kinds of layers and the rotary base follow from what is stated; no state turns around.
    "olmo_hybrid-defaults": {k: v for k, v in OLMO_HYBRID.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    | dict(num_hidden_layers=2, linear_allow_neg_eigval=False),
}  # fmt: skip
STACK = "olmo_hybrid-rope"
PARAMETERS = dict.fromkeys(("olmo-hybrid-7b", "olmo-hybrid-7b-instruct-dpo"), 7_430_870_688)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, heads, count = (config[k] for k in ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers"))
    k_heads, v_heads = (config.get(f"linear_num_{kind}_heads", heads) for kind in ("key", "value"))
    key = config.get("linear_key_head_dim", 3 * d // (4 * k_heads))
    dim = config.get("linear_value_head_dim", 2 * key)
    keys, values, width = k_heads * key, v_heads * dim, config.get("linear_conv_kernel_dim", 4)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    kinds = config.get("layer_types", ["linear_attention"] * (count - 1) + ["full_attention"])
    for n, kind in enumerate(kinds):
        layer = f"model.layers.{n}"
        out |= mlp(f"{layer}.mlp", config["intermediate_size"], d) | {f"{layer}.post_attention_layernorm.weight": (d,)}
        if kind == "full_attention":
            out |= attention(config, layer) | {f"{layer}.post_feedforward_layernorm.weight": (d,)}
            for norm, proj in dict(q_norm="q_proj", k_norm="k_proj").items():
                out[f"{layer}.self_attn.{norm}.weight"] = out[f"{layer}.self_attn.{proj}.weight"][:1]
            continue
        each = dict(q_conv1d=keys, k_conv1d=keys, v_conv1d=values)
        out |= {f"{layer}.linear_attn.{conv}.weight": (channels, 1, width) for conv, channels in each.items()}
        each = dict(q=keys, k=keys, v=values, g=values, a=v_heads, b=v_heads)
        out |= {f"{layer}.linear_attn.{name}_proj.weight": (rows, d) for name, rows in each.items()}
        out |= {f"{layer}.linear_attn.{name}": (v_heads,) for name in ("A_log", "dt_bias")}
        out |= {
            f"{layer}.linear_attn.o_norm.weight": (dim,),
            f"{layer}.linear_attn.o_proj.weight": (d, values),
            f"{layer}.input_layernorm.weight": (d,),
        }
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with states that last few tokens, or many."""
    return noise - 1 if "A_log" in name else usual(name, noise)
