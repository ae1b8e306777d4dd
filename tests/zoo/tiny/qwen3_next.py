"""Qwen3-Next."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp


QWEN3_NEXT = COMMON | dict(
    model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], rms_norm_eps=1e-6, moe_intermediate_size=24,
    num_experts_per_tok=3, shared_expert_intermediate_size=20, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=6, linear_conv_kernel_dim=4, output_router_logits=False,
    router_aux_loss_coef=0.001,
)  # fmt: skip
LAYERS = ["full_attention" if kind == "f" else "linear_attention" for kind in "llflfl"]

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of the Hub's file, except that every second layer has attention and not every fourth.
    "qwen3_next": QWEN3_NEXT
    | dict(
        num_experts=8, num_hidden_layers=4, full_attention_interval=2, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], partial_rotary_factor=0.25, rope_scaling=None, use_sliding_window=False,
    ),
    # In the form of transformers 5. Layers 1 and 3 have experts: there is a head, a period of two layers and a tail.
    "qwen3_next-dense-new": {k: v for k, v in QWEN3_NEXT.items() if k != "rope_theta"}
    | dict(
        num_experts=6, num_hidden_layers=6, layer_types=LAYERS, norm_topk_prob=False, decoder_sparse_step=2,
        mlp_only_layers=[5], tie_word_embeddings=True, attention_bias=True, linear_conv_kernel_dim=3,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
}  # fmt: skip
STACK = "qwen3_next-dense-new"
PARAMETERS = dict.fromkeys(("qwen3-next-80b-a3b", "qwen3-coder-next"), 79_674_391_296)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub, without the MTP module."""
    d, v = config["hidden_size"], config["vocab_size"]
    every = config.get("full_attention_interval", 4)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        full = config["layer_types"][n] == "full_attention" if "layer_types" in config else (n + 1) % every == 0
        sparse = n not in config["mlp_only_layers"] and (n + 1) % config["decoder_sparse_step"] == 0
        out |= layer(config, f"model.layers.{n}", full, sparse)
    return out


def layer(config: dict[str, Any], path: str, full: bool, sparse: bool) -> dict[str, tuple[int, ...]]:
    d, head, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    out = {f"{path}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if full:
        out |= attention(config, path) | {f"{path}.self_attn.q_proj.weight": (2 * heads * head, d)}
        out |= {f"{path}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        if config.get("attention_bias"):
            out[f"{path}.self_attn.q_proj.bias"] = (2 * heads * head,)
    else:
        v_heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], v_heads * dim
        out |= {
            f"{path}.linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, d),
            f"{path}.linear_attn.in_proj_ba.weight": (2 * v_heads, d),
            f"{path}.linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
            f"{path}.linear_attn.dt_bias": (v_heads,),
            f"{path}.linear_attn.A_log": (v_heads,),
            f"{path}.linear_attn.norm.weight": (dim,),
            f"{path}.linear_attn.out_proj.weight": (d, values),
        }
    if not sparse:
        return out | mlp(f"{path}.mlp", config["intermediate_size"], d)
    out |= {f"{path}.mlp.gate.weight": (config["num_experts"], d), f"{path}.mlp.shared_expert_gate.weight": (1, d)}
    out |= mlp(f"{path}.mlp.shared_expert", config["shared_expert_intermediate_size"], d)
    for m in range(config["num_experts"]):
        out |= mlp(f"{path}.mlp.experts.{m}", config["moe_intermediate_size"], d)
    return out


def further_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the MTP module."""
    d = config["hidden_size"]
    norms = {f"mtp.{norm}.weight": (d,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {"mtp.fc.weight": (d, 2 * d)} | norms | layer(config, "mtp.layers.0", full=True, sparse=True)


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values for norms that scale by 1 + weight, except a linear layer's. States last few tokens, or many."""
    if "A_log" in name:
        return noise - 1
    if "linear_attn.norm" in name:
        return 1 + 0.3 * noise
    return 0.3 * noise if "norm" in name else 0.4 * noise
