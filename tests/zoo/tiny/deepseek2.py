"""DeepSeek V2 and V2-Lite."""

from typing import Any

import numpy as np

from tests.zoo import tiny
from tests.zoo.tiny import COMMON, mlp


DEEPSEEK2 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], rms_norm_eps=1e-5, num_key_value_heads=4,
    q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12, moe_intermediate_size=16,
    n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1, moe_layer_freq=1,
    topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=4.0, norm_topk_prob=False,
    scoring_func="softmax", attention_bias=False, aux_loss_alpha=0.001, seq_aux=True, pretraining_tp=1,
)  # fmt: skip
YARN = dict(type="yarn", factor=4, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=1.2)

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek2": DEEPSEEK2 | dict(rope_scaling=YARN | dict(original_max_position_embeddings=16)),
    "deepseek2-lite-new": {k: v for k, v in DEEPSEEK2.items() if k != "rope_theta"}
    | dict(
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), q_lora_rank=None, topk_method="greedy",
        n_group=None, topk_group=None, head_dim=8, qk_head_dim=18, mlp_bias=False, first_k_dense_replace=2,
        num_hidden_layers=5,
    ),
}  # fmt: skip
STACK = "deepseek2"
PARAMETERS = {"deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, width = config["hidden_size"], config["vocab_size"], config["moe_intermediate_size"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (v, d),
    }
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= latent_attention(config, layer)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if n < config["first_k_dense_replace"]:
            out |= mlp(f"{layer}.mlp", config["intermediate_size"], d)
            continue
        out[f"{layer}.mlp.gate.weight"] = (config["n_routed_experts"], d)
        for m in range(config["n_routed_experts"]):
            out |= mlp(f"{layer}.mlp.experts.{m}", width, d)
        out |= mlp(f"{layer}.mlp.shared_experts", width * config["n_shared_experts"], d)
    return out


def latent_attention(config: dict[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer's attention: name -> shape."""
    d, heads, latent, rank = (config[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    out: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (latent + rope, d),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (d, heads * value),
    }
    if rank is None:
        out["q_proj"] = (heads * (nope + rope), d)
    else:
        out |= {"q_a_proj": (rank, d), "q_a_layernorm": (rank,), "q_b_proj": (heads * (nope + rope), rank)}
    return {f"{layer}.self_attn.{name}.weight": shape for name, shape in out.items()}


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values that are smaller for experts, because experts' outputs are scaled up."""
    return tiny.values(name, noise) * (0.4 if "expert" in name else 1.0)
