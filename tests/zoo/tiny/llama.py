"""Llama."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, biases, mlp


LLAMA = COMMON | dict(model_type="llama", architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5)
ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0])

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_theta")} | dict(num_key_value_heads=4),
    "llama-rope3": LLAMA | dict(rope_scaling=ROPE, max_position_embeddings=16),  # this is also the original context
    "llama-rope3-new": {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    | dict(rope_parameters=ROPE | dict(rope_theta=10000.0, original_max_position_embeddings=16)),
    "llama-linear": LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)),
    # With keys that SmolLM2, Unsloth, a training run and generation leave behind.
    "llama-dynamic": LLAMA
    | dict(
        rope_scaling=dict(type="dynamic", factor=2.0), max_position_embeddings=16, num_key_value_heads=None,
        hidden_act="swish", attention_dropout=0.1, is_llama_config=True, rope_interleaved=False, unsloth_fixed=True,
        temperature=0.6, pretraining_tp=2, partial_rotary_factor=1.0, **{"transformers.js_config": {"dtype": "q4"}},
    ),
    "llama-longrope": {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    | dict(rope_scaling=LONG, original_max_position_embeddings=16),
    "llama-tied-biases": LLAMA | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
}  # fmt: skip
STACK = "llama"
PARAMETERS = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824, "llama3.3-70b": 70_553_706_496, "llama-guard-3-1b": 1_235_814_400,
    "llama-guard-3-8b": 8_030_261_248, "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-llama-70b": 70_553_706_496, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "skywork-reward-llama-3.1-8b-v0.2": 8_030_261_248,  # with output embeddings, which the repository lacks
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        matrices = mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= attention(config, layer) | matrices | (biases(matrices) if config.get("mlp_bias") else {})
    return out
