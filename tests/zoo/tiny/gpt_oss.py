"""gpt-oss."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, biases


GPT_OSS = COMMON | dict(
    model_type="gpt_oss", architectures=["GptOssForCausalLM"], rms_norm_eps=1e-5, attention_bias=True,
    num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=5, sliding_window=6, swiglu_limit=7.0,
    layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"], router_aux_loss_coef=0.9,
    output_router_logits=False,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=4.0, beta_fast=8.0, beta_slow=0.5, original_max_position_embeddings=16, truncate=False
)

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS | dict(rope_scaling=YARN, experts_per_token=2, initial_context_length=16),
    # In the form of transformers 5, with layers in another order, and limits that nearly every token reaches.
    "gpt_oss-new": {k: v for k, v in GPT_OSS.items() if k != "rope_theta"}
    | dict(
        rope_parameters=YARN | dict(rope_theta=10000.0), num_local_experts=5, num_experts_per_tok=3,
        layer_types=["full_attention"] * 2 + ["sliding_attention", "full_attention", "sliding_attention"],
        swiglu_alpha=1.5, swiglu_limit=1.25, tie_word_embeddings=True,
    ),
}  # fmt: skip
STACK = "gpt_oss"
PARAMETERS = {"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub in 16 bits."""
    d, v, width, experts = (config[k] for k in ("hidden_size", "vocab_size", "intermediate_size", "num_local_experts"))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        router = {f"{layer}.mlp.router.weight": (experts, d)}
        out |= attention(config, layer) | router | biases(router)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out[f"{layer}.self_attn.sinks"] = (config["num_attention_heads"],)
        out[f"{layer}.mlp.experts.gate_up_proj"] = (experts, d, 2 * width)
        out[f"{layer}.mlp.experts.gate_up_proj_bias"] = (experts, 2 * width)
        out[f"{layer}.mlp.experts.down_proj"] = (experts, width, d)
        out[f"{layer}.mlp.experts.down_proj_bias"] = (experts, d)
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values that are smaller for experts, because the product of gate and up grows fast."""
    return 1 + 0.3 * noise if "norm" in name else (0.25 if "experts" in name else 0.4) * noise
