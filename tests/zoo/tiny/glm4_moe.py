"""GLM-4.5 to 4.7."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, deepseek3, mlp


GLM = COMMON | dict(
    model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], rms_norm_eps=1e-5, moe_intermediate_size=16,
    n_shared_experts=1, num_nextn_predict_layers=1, pad_token_id=0,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of GLM-4.5's file.
    "glm4_moe": GLM
    | dict(
        attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, rope_scaling=None, n_routed_experts=8,
        num_experts_per_tok=3, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        first_k_dense_replace=1,
    ),
    # Air's attention, in the form of transformers 5, with what no released model has.
    "glm4_moe-air-new": {k: v for k, v in GLM.items() if k not in ("rope_theta", "head_dim")}
    | dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, partial_rotary_factor=0.75, factor=4.0,
            original_max_position_embeddings=16,
        ),
        num_key_value_heads=1, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2,
        norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=2, num_hidden_layers=5,
        tie_word_embeddings=True, attention_bias=False, use_qk_norm=False, num_nextn_predict_layers=0,
        routed_scaling_factor=1.0, output_router_logits=False,
    ),
}  # fmt: skip
STACK = "glm4_moe"
PARAMETERS = {
    "glm4.5": 352_797_829_024, "glm4.5-air": 106_852_251_264, "glm4.6": 352_797_829_024, "glm4.7": 352_797_829_024,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub, without the MTP module."""
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        out |= layer(config, f"model.layers.{n}", sparse=n >= config["first_k_dense_replace"])
    return out


def layer(config: dict[str, Any], path: str, sparse: bool) -> dict[str, tuple[int, ...]]:
    d, head = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    out = attention(config, path)
    out.pop(f"{path}.self_attn.o_proj.bias", None)
    out |= {f"{path}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if config["use_qk_norm"]:
        out |= {f"{path}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
    if not sparse:
        return out | mlp(f"{path}.mlp", config["intermediate_size"], d)
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    out |= {f"{path}.mlp.gate.weight": (experts, d), f"{path}.mlp.gate.e_score_correction_bias": (experts,)}
    for m in range(experts):
        out |= mlp(f"{path}.mlp.experts.{m}", width, d)
    return out | mlp(f"{path}.mlp.shared_experts", width * config["n_shared_experts"], d)


def further_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the MTP module as GLM-4.6 has them: a layer, without copies of embedding and head."""
    d, path = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
    norms = {f"{path}.{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return layer(config, path, sparse=True) | norms | {f"{path}.eh_proj.weight": (d, 2 * d)}


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns DeepSeek V3's values."""
    return deepseek3.values(name, noise)
