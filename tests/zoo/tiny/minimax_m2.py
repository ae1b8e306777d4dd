"""MiniMax M2 to M2.7."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, deepseek3, mixtral


MINIMAX = COMMON | dict(
    model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], rms_norm_eps=1e-6, intermediate_size=24,
    num_experts_per_tok=3,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of M2's file, but for `use_mtp`: transformers 5.24 would look for the module that no file has.
    "minimax_m2": MINIMAX
    | dict(
        num_local_experts=8, rotary_dim=8, attn_type_list=[1, 1, 1], qk_norm_type="per_layer", use_qk_norm=True,
        use_routing_bias=True, scoring_func="sigmoid", shared_intermediate_size=0, shared_moe_mode="sigmoid",
        sliding_window=None, num_mtp_modules=3, mtp_transformer_layers=1, mlp_intermediate_size=96,
        layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0,
    ),
    # In the form of transformers 5, with what no released model has.
    "minimax_m2-new": {k: v for k, v in MINIMAX.items() if k != "rope_theta"}
    | dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, partial_rotary_factor=0.75, factor=4.0,
            original_max_position_embeddings=16,
        ),
        num_local_experts=6, num_key_value_heads=1, num_hidden_layers=2, tie_word_embeddings=True,
        output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
    ),
}  # fmt: skip
STACK = "minimax_m2"
PARAMETERS = dict.fromkeys(("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7"), 228_689_764_864)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub: Mixtral's, with norms and with a bias of each expert."""
    out, head = mixtral.shapes(config), config["head_dim"]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out[f"{layer}.self_attn.q_norm.weight"] = (config["num_attention_heads"] * head,)
        out[f"{layer}.self_attn.k_norm.weight"] = (config["num_key_value_heads"] * head,)
        out[f"{layer}.block_sparse_moe.e_score_correction_bias"] = (config["num_local_experts"],)
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns DeepSeek V3's values."""
    return deepseek3.values(name, noise)
