"""Llama."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, biases, mlp


LLAMA = COMMON | dict(model_type="llama", architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5)
ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_theta")} | dict(num_key_value_heads=4),
    "llama-rope3": LLAMA | dict(rope_scaling=ROPE),
    "llama-rope3-new": {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    | dict(rope_parameters=ROPE | dict(rope_theta=10000.0)),
    "llama-linear": LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)),
    "llama-tied-biases": LLAMA | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as stored on the Hub."""
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        parts = {
            "attention_bias": attention(config, layer),
            "mlp_bias": mlp(f"{layer}.mlp", config["intermediate_size"], d),
        }
        for bias, matrices in parts.items():
            out |= matrices | (biases(matrices) if config.get(bias) else {})
    return out
