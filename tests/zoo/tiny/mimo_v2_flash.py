"""MiMo V2 Flash."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, biases, deepseek3, mlp


MIMO = COMMON | dict(
    model_type="mimo_v2_flash", architectures=["MiMoV2FlashForCausalLM"], head_dim=24, v_head_dim=16,
    moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=3, attention_bias=False,
)  # fmt: skip
ROPES = dict(
    full_attention=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.5),
    sliding_attention=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
)
KINDS = dict(f="full_attention", s="sliding_attention", d="dense", e="sparse")


def kinds(words: str) -> list[str]:
    return [KINDS[word] for word in words]


CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of the released file, of which transformers takes some keys to have the released values.
    "mimo_v2_flash": MIMO
    | dict(
        swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=24, swa_v_head_dim=16, rope_theta=5000000,
        swa_rope_theta=10000, partial_rotary_factor=0.334, hybrid_layer_pattern=[0, 1, 1], moe_layer_freq=[0, 1, 1],
        sliding_window=5, sliding_window_size=5, attention_chunk_size=5, n_shared_experts=None, norm_topk_prob=True,
        scoring_func="sigmoid", n_group=1, topk_group=1, topk_method="noaux_tc", routed_scaling_factor=None,
        layernorm_epsilon=1e-5, attention_value_scale=0.707, add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    ),
    # In the form of transformers 5, with a head, a period and a tail, and what the released model does not have.
    "mimo_v2_flash-new": {k: v for k, v in MIMO.items() if k != "rope_theta"}
    | dict(
        layer_types=kinds("fsfsfs"), mlp_layer_types=kinds("deeeee"), num_hidden_layers=6, num_key_value_heads=1,
        rope_parameters=ROPES, sliding_window=4, rms_norm_eps=0.01, attention_value_scale=1.25, attention_bias=True,
        n_routed_experts=12, n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=1.5,
        tie_word_embeddings=True, output_router_logits=False,
    ),
}  # fmt: skip
STACK = "mimo_v2_flash-new"
PARAMETERS = {"mimo-v2-flash": 308_778_780_864}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub, without the modules for further tokens."""
    d, v, heads, experts = (config[k] for k in ("hidden_size", "vocab_size", "num_attention_heads", "n_routed_experts"))
    slides = config.get("hybrid_layer_pattern") or [kind == KINDS["s"] for kind in config["layer_types"]]
    sparse = config.get("moe_layer_freq") or [kind == KINDS["e"] for kind in config["mlp_layer_types"]]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        kv = config["num_key_value_heads"] * (2 if slides[n] else 1)
        rows = dict(q=heads * config["head_dim"], k=kv * config["head_dim"], v=kv * config["v_head_dim"])
        matrices = {f"{layer}.self_attn.{name}_proj.weight": (size, d) for name, size in rows.items()}
        out |= matrices | (biases(matrices) if config["attention_bias"] else {})
        out[f"{layer}.self_attn.o_proj.weight"] = (d, heads * config["v_head_dim"])
        if slides[n]:
            out[f"{layer}.self_attn.attention_sink_bias"] = (heads,)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if not sparse[n]:
            out |= mlp(f"{layer}.mlp", config["intermediate_size"], d)
            continue
        out |= {f"{layer}.mlp.gate.weight": (experts, d), f"{layer}.mlp.gate.e_score_correction_bias": (experts,)}
        for m in range(experts):
            out |= mlp(f"{layer}.mlp.experts.{m}", config["moe_intermediate_size"], d)
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns DeepSeek V3's values, with sinks that take a good part of the softmax."""
    return 1 + noise if "sink" in name else deepseek3.values(name, noise)
