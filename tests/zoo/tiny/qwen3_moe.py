"""Qwen3's mixtures of experts."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, mlp


QWEN3_MOE = COMMON | dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], rms_norm_eps=1e-6, moe_intermediate_size=24,
    num_experts_per_tok=3, decoder_sparse_step=1, output_router_logits=False, router_aux_loss_coef=0.001,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of the Coder's file.
    "qwen3_moe": QWEN3_MOE
    | dict(
        num_experts=8, norm_topk_prob=True, mlp_only_layers=[], max_window_layers=3, use_sliding_window=False,
        sliding_window=None, rope_scaling=None, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0,
    ),
    # In the form of transformers 5. Layers 3 and 5 have experts: there is a head, a period and a tail.
    "qwen3_moe-dense-new": {k: v for k, v in QWEN3_MOE.items() if k not in ("rope_theta", "head_dim")}
    | dict(
        num_local_experts=6, num_hidden_layers=7, decoder_sparse_step=2, mlp_only_layers=[1], tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), use_sliding_window=True, sliding_window=6,
        max_window_layers=3, attention_bias=True,
    ),
}  # fmt: skip
STACK = "qwen3_moe-dense-new"
PARAMETERS = {
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392, "qwen3-coder-480b-a35b-fp8": 480_154_875_392,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v = config["hidden_size"], config["vocab_size"]
    head = config.get("head_dim") or d // config["num_attention_heads"]
    experts = config.get("num_experts") or config["num_local_experts"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(config, layer)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        if n in config["mlp_only_layers"] or (n + 1) % config["decoder_sparse_step"]:
            out |= mlp(f"{layer}.mlp", config["intermediate_size"], d)
        else:
            out[f"{layer}.mlp.gate.weight"] = (experts, d)
            for m in range(experts):
                out |= mlp(f"{layer}.mlp.experts.{m}", config["moe_intermediate_size"], d)
    return out
