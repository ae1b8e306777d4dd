"""Granite 4.1."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, biases, mlp


GRANITE = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="granite", architectures=["GraniteForCausalLM"], rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False,
    attention_multiplier=0.2, embedding_multiplier=3, logits_scaling=0.4, residual_multiplier=0.22, rope_scaling=None,
    tie_word_embeddings=True, pad_token_id=0,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

CONFIGS: dict[str, dict[str, Any]] = {
    "granite": GRANITE,
    # One head of keys for all queries.
    "granite-yarn-new": {k: v for k, v in GRANITE.items() if k not in ("rope_theta", "rope_scaling", "rms_norm_eps")}
    | dict(
        num_hidden_layers=2, num_key_value_heads=1, head_dim=12, rope_parameters=YARN | dict(rope_theta=5000.0),
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False, residual_multiplier=0.6,
    ),
    # Without multipliers, as in transformers' defaults.
    "granite-plain": {k: v for k, v in GRANITE.items() if "multiplier" not in k and k != "logits_scaling"}
    | dict(num_hidden_layers=2, num_key_value_heads=None, rope_scaling=dict(type="linear", factor=2.0)),
}  # fmt: skip
STACK = "granite"
PARAMETERS = {"granite4.1-3b": 3_402_836_480, "granite4.1-8b": 8_791_592_960}


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
        out |= attention(config, layer) | matrices | (biases(matrices) if config["mlp_bias"] else {})
    return out
