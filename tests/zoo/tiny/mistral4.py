"""Mistral Small 4."""

from typing import Any

from tests.zoo.tiny import COMMON, deepseek2, mistral3


ROPE = dict(
    rope_type="yarn", type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=8, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, max_position_embeddings=64, llama_4_scaling_beta=0.5,
    partial_rotary_factor=0.5,
)  # fmt: skip
MISTRAL4 = {k: v for k, v in COMMON.items() if k not in ("head_dim", "rope_theta")} | dict(
    model_type="mistral4", architectures=["Mistral4ForCausalLM"], rms_norm_eps=1e-5, num_key_value_heads=4,
    q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, moe_intermediate_size=16,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=0, n_group=1, topk_group=1,
    routed_scaling_factor=1.0, norm_topk_prob=True, attention_bias=False, mlp_bias=False, rope_interleave=True,
    rope_parameters=ROPE, head_dim=16, qk_head_dim=16,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "mistral4": MISTRAL4,
    # What no released model has: groups, dense layers, plain queries, and another share of features that turn.
    "mistral4-groups": {k: v for k, v in MISTRAL4.items() if k not in ("head_dim", "qk_head_dim")}
    | dict(
        n_routed_experts=12, n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=2.5,
        n_shared_experts=2, first_k_dense_replace=1, num_hidden_layers=4, q_lora_rank=None, qk_nope_head_dim=24,
        rope_parameters=ROPE | dict(
            partial_rotary_factor=0.25, mscale=0.8, mscale_all_dim=0.6, llama_4_scaling_beta=0.2, beta_fast=4.0,
            original_max_position_embeddings=16,
        ),
    ),
}  # fmt: skip
STACK = "mistral4-groups"
PARAMETERS = {"mistral-small-4": 118_972_826_624}
values, vision_parameters = deepseek2.values, mistral3.vision_parameters


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub: those of DeepSeek V2, but all experts of a layer as one."""
    d, experts, width = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    out = {name: shape for name, shape in deepseek2.shapes(config).items() if ".experts." not in name}
    for n in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        out[f"model.layers.{n}.mlp.experts.gate_up_proj"] = (experts, 2 * width, d)
        out[f"model.layers.{n}.mlp.experts.down_proj"] = (experts, d, width)
    return out
