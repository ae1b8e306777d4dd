"""Mixtral."""

from typing import Any

from tests.zoo.tiny import COMMON, attention


MIXTRAL = COMMON | dict(
    model_type="mixtral", architectures=["MixtralForCausalLM"], rms_norm_eps=1e-5, num_local_experts=4,
    num_experts_per_tok=2, sliding_window=None, output_router_logits=False, router_aux_loss_coef=0.02,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {k: v for k, v in MIXTRAL.items() if k != "head_dim"},
    "mixtral-window-new": {k: v for k, v in MIXTRAL.items() if k != "rope_theta"}
    | dict(
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), num_local_experts=5, num_experts_per_tok=3,
        sliding_window=6, tie_word_embeddings=True, router_jitter_noise=0.0,
    ),
}  # fmt: skip
STACK = "mixtral"
PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112, "mixtral-8x22b-instruct": 140_630_071_296,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, width = (config[key] for key in ("hidden_size", "vocab_size", "intermediate_size"))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(config, layer)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out[f"{layer}.block_sparse_moe.gate.weight"] = (config["num_local_experts"], d)
        for m in range(config["num_local_experts"]):
            matrices = dict(w1=(width, d), w2=(d, width), w3=(width, d))
            out |= {f"{layer}.block_sparse_moe.experts.{m}.{w}.weight": shape for w, shape in matrices.items()}
    return out
