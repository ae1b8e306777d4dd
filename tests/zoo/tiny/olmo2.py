"""Olmo 2."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, mlp


OLMO2 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="olmo2", architectures=["Olmo2ForCausalLM"], rms_norm_eps=1e-6, hidden_size=64, attention_bias=False,
    rope_scaling=None, pad_token_id=0,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

CONFIGS: dict[str, dict[str, Any]] = {
    "olmo2": OLMO2,
    # One head of keys for all queries.
    "olmo2-yarn-new": {k: v for k, v in OLMO2.items() if k not in ("rope_theta", "rope_scaling", "rms_norm_eps")}
    | dict(
        num_hidden_layers=2, num_key_value_heads=1, head_dim=12, rope_parameters=YARN | dict(rope_theta=5000.0),
        attention_bias=True, tie_word_embeddings=True,
    ),
    "olmo2-linear": {k: v for k, v in OLMO2.items() if k not in ("num_key_value_heads", "rope_theta")}
    | dict(num_hidden_layers=2, rope_scaling=dict(type="linear", factor=2.0), rms_norm_eps=0.01),
}  # fmt: skip
STACK = "olmo2"
PARAMETERS = {"olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(config, layer) | mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("post_attention_layernorm", "post_feedforward_layernorm")}
        norms = dict(q_norm="q_proj", k_norm="k_proj")  # over the outputs of all heads together
        out |= {
            f"{layer}.self_attn.{norm}.weight": out[f"{layer}.self_attn.{proj}.weight"][:1]
            for norm, proj in norms.items()
        }
    return out
