"""Laguna XS.2 and XS-2.1."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, deepseek3, mlp


LAGUNA = {k: v for k, v in COMMON.items() if k != "rope_theta"} | dict(
    model_type="laguna", architectures=["LagunaForCausalLM"], rms_norm_eps=1e-6, moe_intermediate_size=16,
    shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=3, attention_bias=False,
    moe_apply_router_weight_on_input=False, router_aux_loss_coef=0.0, pad_token_id=0,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=5000.0, partial_rotary_factor=0.5, factor=4.0, original_max_position_embeddings=16,
    beta_fast=4.0, beta_slow=0.5, attention_factor=1.25,
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0)
KINDS = dict(f="full_attention", s="sliding_attention")


def layers(kinds: str, full: int, sliding: int) -> dict[str, Any]:
    return dict(
        layer_types=[KINDS[kind] for kind in kinds], num_hidden_layers=len(kinds),
        num_attention_heads_per_layer=[full if kind == "f" else sliding for kind in kinds],
        mlp_layer_types=["dense"] + ["sparse"] * (len(kinds) - 1),
    )  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of XS.2's file, with keys of XS-2.1's.
    "laguna": LAGUNA
    | layers("fss", full=4, sliding=6)
    | dict(
        rope_parameters=dict(full_attention=YARN, sliding_attention=ROPE, original_max_position_embeddings=16),
        gating=True, partial_rotary_factor=0.5, moe_routed_scaling_factor=2.5, sliding_window=6, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[0], gating_types=["per_head"] * 3,
    ),
    # A head, a period and a tail, and what no released model has: gates of each feature, capped logits of the router,
    # biases, YaRN in sliding layers.
    "laguna-elements": LAGUNA
    | layers("fsfsfs", full=4, sliding=2)
    | dict(
        rope_parameters=dict(
            full_attention=ROPE | dict(partial_rotary_factor=0.75),
            sliding_attention=YARN | dict(attention_factor=None),
        ),
        gating="per-element", moe_router_logit_softcapping=0.75, sliding_window=4, num_key_value_heads=1,
        attention_bias=True, rms_norm_eps=0.01, tie_word_embeddings=True, num_experts=6,
    ),
    # Kinds of layers, heads and ropes are not stated.
    "laguna-defaults": LAGUNA | dict(num_hidden_layers=2),
}  # fmt: skip
STACK = "laguna-elements"
PARAMETERS = dict.fromkeys(("laguna-xs-2", "laguna-xs-2.1"), 33_442_617_088)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, head, experts = (config[k] for k in ("hidden_size", "vocab_size", "head_dim", "num_experts"))
    count = config["num_hidden_layers"]
    each = config.get("num_attention_heads_per_layer", [config["num_attention_heads"]] * count)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n, heads in enumerate(each):
        layer = f"model.layers.{n}"
        out |= attention(config | dict(num_attention_heads=heads), layer)
        gates = heads * (head if config.get("gating") == "per-element" else 1)
        out[f"{layer}.self_attn.g_proj.weight"] = (gates, d)
        out |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if n == 0:
            out |= mlp(f"{layer}.mlp", config["intermediate_size"], d)
            continue
        out[f"{layer}.mlp.gate.weight"] = (experts, d)
        out[f"{layer}.mlp.experts.e_score_correction_bias"] = (experts,)
        for m in range(experts):
            out |= mlp(f"{layer}.mlp.experts.{m}", config["moe_intermediate_size"], d)
        out |= mlp(f"{layer}.mlp.shared_expert", config["shared_expert_intermediate_size"], d)
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns DeepSeek V3's values."""
    return deepseek3.values(name, noise)
