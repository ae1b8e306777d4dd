"""LFM2-8B-A1B and LFM2.5-8B-A1B."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, lfm2
from tests.zoo.tiny import values as usual
from tests.zoo.tiny.lfm2 import layers


LFM2_MOE = {k: v for k, v in COMMON.items() if k not in ("head_dim", "hidden_act", "rope_theta")} | dict(
    model_type="lfm2_moe", architectures=["Lfm2MoeForCausalLM"], conv_L_cache=3, conv_bias=False, norm_eps=1e-5,
    pad_token_id=0, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, use_expert_bias=True,
    tie_word_embeddings=True,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of LFM2.5's file: a head of dense layers, a period of two twice, and a tail.
    "lfm2_moe": LFM2_MOE
    | layers("ccfcfcf")
    | dict(
        num_dense_layers=2, norm_topk_prob=True, routed_scaling_factor=1.0,
        rope_parameters=dict(rope_theta=10000, rope_type="default"),
    ),
    # What no released model has.
    "lfm2_moe-sparse": LFM2_MOE
    | layers("fccf")
    | dict(
        num_dense_layers=0, norm_topk_prob=False, routed_scaling_factor=2.5, num_key_value_heads=1, conv_bias=True,
        conv_L_cache=2, norm_eps=0.01, tie_word_embeddings=False, head_dim=16, full_attn_idxs=None, rope_theta=5000.0,
        rope_scaling=dict(
            rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
}  # fmt: skip
STACK = "lfm2_moe"
PARAMETERS = {"lfm2-8b-a1b": 8_339_930_560, "lfm2.5-8b-a1b": 8_467_856_832}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub: LFM2's, with experts in place of MLPs."""
    out = lfm2.shapes(config | dict(block_auto_adjust_ff_dim=False))
    d, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    for n in range(config["num_dense_layers"], config["num_hidden_layers"]):
        path = f"model.layers.{n}.feed_forward"
        for w, shape in dict(w1=(width, d), w2=(d, width), w3=(width, d)).items():
            del out[f"{path}.{w}.weight"]
            out |= {f"{path}.experts.{m}.{w}.weight": shape for m in range(experts)}
        out |= {f"{path}.gate.weight": (experts, d), f"{path}.expert_bias": (experts,)}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values for which a router's bias changes some of the choices."""
    return 0.1 * noise if "expert_bias" in name else usual(name, noise)
