"""Kimi Linear."""

from typing import Any

import numpy as np

from tests.zoo import tiny
from tests.zoo.tiny import COMMON, deepseek2, mlp


OTHERS = ("head_dim", "max_position_embeddings", "rope_theta")
KIMI_LINEAR = {k: v for k, v in COMMON.items() if k not in OTHERS} | dict(
    model_type="kimi_linear", architectures=["KimiLinearForCausalLM"], rms_norm_eps=1e-5, num_key_value_heads=4,
    q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12, mla_use_nope=True,
    model_max_length=64, moe_intermediate_size=16, num_experts=12, num_shared_experts=1, num_experts_per_token=3,
    first_k_dense_replace=1, moe_layer_freq=1, num_expert_group=1, topk_group=1, use_grouped_topk=True,
    routed_scaling_factor=2.5, moe_renormalize=True, moe_router_activation_func="sigmoid", num_nextn_predict_layers=0,
    pad_token_id=0,
)  # fmt: skip
LINEAR = dict(head_dim=8, num_heads=4, short_conv_kernel_size=4)

CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_linear": KIMI_LINEAR  # a dense layer, a period of two twice, and a tail
    | dict(
        num_hidden_layers=6, linear_attn_config=LINEAR | dict(kda_layers=[1, 2, 4], full_attn_layers=[3, 5, 6]),
        head_dim=8, rope_theta=10000.0,
    ),
    "kimi_linear-groups-new": KIMI_LINEAR  # in transformers' form
    | dict(
        num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_layer_types=["dense", "dense", "sparse"], linear_head_dim=10, linear_num_heads=2, linear_conv_kernel_dim=3,
        first_k_dense_replace=2, num_expert_group=3, topk_group=2, moe_renormalize=False, num_shared_experts=2,
        routed_scaling_factor=0.5, head_dim=8, qk_head_dim=18, rope_parameters=None, attention_bias=False,
    ),
}  # fmt: skip
STACK = "kimi_linear"
PARAMETERS = {"kimi-linear-48b-a3b": 49_122_681_728}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, width, experts = (config[k] for k in ("hidden_size", "vocab_size", "moe_intermediate_size", "num_experts"))
    linear = config.get("linear_attn_config") or dict(
        head_dim=config["linear_head_dim"], num_heads=config["linear_num_heads"],
        short_conv_kernel_size=config["linear_conv_kernel_dim"],
        kda_layers=[n for n, kind in enumerate(config["layer_types"], 1) if kind == "linear_attention"],
    )  # fmt: skip
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (v, d),
    }
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= delta_attention(linear, d, layer) if n + 1 in linear["kda_layers"] else latent_attention(config, layer)
        if n < config["first_k_dense_replace"]:
            out |= mlp(f"{layer}.mlp", config["intermediate_size"], d)
            continue
        moe = f"{layer}.block_sparse_moe"
        out |= {f"{moe}.gate.weight": (experts, d), f"{moe}.gate.e_score_correction_bias": (experts,)}
        for m in range(experts):
            matrices = dict(w1=(width, d), w2=(d, width), w3=(width, d))
            out |= {f"{moe}.experts.{m}.{w}.weight": shape for w, shape in matrices.items()}
        out |= mlp(f"{moe}.shared_experts", width * config["num_shared_experts"], d)
    return out


def latent_attention(config: dict[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer with latent attention: DeepSeek's without ranks of queries."""
    return deepseek2.latent_attention(config | dict(q_lora_rank=None), layer)


def delta_attention(linear: dict[str, Any], hidden: int, layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer with Kimi Delta Attention."""
    heads, dim, width = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    channels = heads * dim
    out: dict[str, tuple[int, ...]] = {"A_log": (1, 1, heads, 1), "dt_bias": (channels,)}
    for name in "qkv":
        out |= {f"{name}_proj.weight": (channels, hidden), f"{name}_conv1d.weight": (channels, 1, width)}
    for name in "fg":
        out |= {f"{name}_a_proj.weight": (dim, hidden), f"{name}_b_proj.weight": (channels, dim)}
    out |= {"b_proj.weight": (heads, hidden), "o_norm.weight": (dim,), "o_proj.weight": (hidden, channels)}
    return {f"{layer}.self_attn.{name}": shape for name, shape in out.items()}


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values for which a router's bias changes some of the choices, some decays last for many tokens and, as in
    SmolLM3's, queries see more than one key.
    """
    if name.endswith(("e_score_correction_bias", "q_proj.weight")):
        return 0.1 * noise
    return noise - 2 if name.endswith("dt_bias") else tiny.values(name, noise)
