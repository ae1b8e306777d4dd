"""Gemma 4, the text models: with K = V, with experts, and with embeddings for each layer and shared keys and values."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    k: v for k, v in COMMON.items() if k not in ("tie_word_embeddings", "hidden_act", "rope_theta", "head_dim")
} | dict(
    model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], rms_norm_eps=1e-6, attention_bias=False,
    hidden_activation="gelu_pytorch_tanh", sliding_window=4, head_dim=8, global_head_dim=16, pad_token_id=0,
    rope_parameters={
        SLIDING: dict(rope_type="default", rope_theta=100.0),
        FULL: dict(rope_type="proportional", rope_theta=5000.0, partial_rotary_factor=0.25),
    },
    vocab_size_per_layer_input=64, hidden_size_per_layer_input=0,
)  # fmt: skip
LARGE = GEMMA4 | dict(
    attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=30.0,
    use_bidirectional_attention="vision",
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": LARGE
    | dict(
        layer_types=[SLIDING, FULL] * 2, num_hidden_layers=4, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4-dense": LARGE
    | dict(
        layer_types=[FULL, SLIDING, SLIDING, FULL], num_hidden_layers=4, num_key_value_heads=4,
        num_global_key_value_heads=2,
    ),
    # Two periods with keys of their own, of which the second is shared, and two that read it.
    "gemma4-shared": GEMMA4
    | dict(
        layer_types=[SLIDING, FULL] * 4, num_hidden_layers=8, num_kv_shared_layers=4,
        hidden_size_per_layer_input=16, use_double_wide_mlp=True, num_key_value_heads=1, final_logit_softcapping=20.0,
        rms_norm_eps=0.01,
    ),
    # No period: embeddings for each layer, shared keys and K = V; no tied head; rows of keys with biases.
    "gemma4-untied": LARGE
    | dict(
        layer_types=[FULL, SLIDING, FULL, SLIDING, FULL], num_hidden_layers=5, num_kv_shared_layers=2,
        num_global_key_value_heads=None, hidden_size_per_layer_input=8, tie_word_embeddings=False, attention_bias=True,
        final_logit_softcapping=None, rms_norm_eps=0.01, use_bidirectional_attention=None,
    ),
}  # fmt: skip
STACK = "gemma4-shared"
PARAMETERS = {  # of the text models, each with a number for each layer (`layer_scalar`)
    "gemma4-e2b": 4_628_569_344 + 35, "gemma4-e4b": 7_463_013_376 + 42, "gemma4-12b": 11_907_350_272 + 48,
    "gemma4-26b": 25_233_141_760 + 30, "gemma4-31b": 30_697_345_280 + 60,
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
MOE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub by the text-only models."""
    d, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not config.get("tie_word_embeddings", True):
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    if dim:
        out["model.embed_tokens_per_layer.weight"] = (config["vocab_size_per_layer_input"], layers * dim)
        out["model.per_layer_model_projection.weight"] = (layers * dim, d)
        out["model.per_layer_projection_norm.weight"] = (dim,)
    shared = layers - config.get("num_kv_shared_layers", 0)
    for n, kind in enumerate(config["layer_types"]):
        layer, head, k_is_v = f"model.layers.{n}", config["head_dim"], False
        kv = config["num_key_value_heads"]
        if kind == FULL:
            head, k_is_v = config["global_head_dim"], config.get("attention_k_eq_v", False)
            kv = (k_is_v and config["num_global_key_value_heads"]) or kv
        own = attention(config | dict(head_dim=head, num_key_value_heads=kv), layer)
        own |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        drop = ("k_proj", "v_proj", "k_norm") if n >= shared else ("v_proj",) if k_is_v else ()
        out |= {name: shape for name, shape in own.items() if name.split(".")[4] not in drop}
        wide = 2 if n >= shared and config.get("use_double_wide_mlp") else 1
        out |= mlp(f"{layer}.mlp", wide * config["intermediate_size"], d) | {f"{layer}.layer_scalar": (1,)}
        out |= {f"{layer}.{norm}.weight": (d,) for norm in NORMS}
        if config.get("enable_moe_block"):
            experts, width = config["num_experts"], config["moe_intermediate_size"]
            out |= {f"{layer}.{norm}.weight": (d,) for norm in MOE_NORMS}
            out |= {f"{layer}.router.proj.weight": (experts, d), f"{layer}.router.scale": (d,)}
            out |= {f"{layer}.router.per_expert_scale": (experts,)}
            out |= {f"{layer}.experts.gate_up_proj": (experts, 2 * width, d)}
            out |= {f"{layer}.experts.down_proj": (experts, d, width)}
        if dim:
            out |= {f"{layer}.per_layer_input_gate.weight": (dim, d), f"{layer}.per_layer_projection.weight": (d, dim)}
            out |= {f"{layer}.post_per_layer_input_norm.weight": (d,)}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Products of queries and keys are not scaled: norms are."""
    if "layer_scalar" in name or "scale" in name:
        return 1 + 0.2 * noise
    if "q_norm" in name or "k_norm" in name:
        return 0.6 + 0.2 * noise
    return 1 + 0.3 * noise if "norm" in name else 0.4 * noise


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters beside the text model's. `layer_scalar` is none in the recorded counts."""
    if "vision_config" not in config:
        return 0
    text, c, audio = config["text_config"], config["vision_config"], config["audio_config"]
    hidden = text["hidden_size"]
    if config["model_type"] == "gemma4_unified":
        patch, d = 3 * c["model_patch_size"] ** 2, c["mm_embed_dim"]
        vision = 2 * patch + d * patch + d + 2 * d + 2 * d + c["mm_posemb_size"] * 2 * d + hidden * d
        return vision + hidden * audio["audio_embed_dim"] - text["num_hidden_layers"]
    d, width, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    layer = 4 * d * d + 3 * d * width + 4 * d + 2 * head
    table = 2 * c["position_embedding_size"] * d + 3 * c["patch_size"] ** 2 * d
    vision = c["num_hidden_layers"] * layer + table + hidden * d
    tower = 304_824_608 + hidden * audio["output_proj_dims"] if audio else 0  # of sound, as recorded
    return vision + tower - text["num_hidden_layers"]
