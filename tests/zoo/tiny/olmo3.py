"""Olmo 3."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, mlp


OLMO3 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="olmo3", architectures=["Olmo3ForCausalLM"], rms_norm_eps=1e-6, hidden_size=64, attention_bias=False,
    rope_theta=500000, sliding_window=4, pad_token_id=0,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=8, beta_fast=32, beta_slow=1,
    attention_factor=1.2079441541679836,
)  # fmt: skip
ROPES = dict(
    full_attention=YARN | dict(rope_theta=5000.0), sliding_attention=dict(rope_type="default", rope_theta=5000.0)
)


def layers(kinds: str) -> dict[str, Any]:
    types = ["sliding_attention" if kind == "s" else "full_attention" for kind in kinds]
    return dict(layer_types=types, num_hidden_layers=len(types))


CONFIGS: dict[str, dict[str, Any]] = {
    "olmo3": OLMO3 | layers("ssfssf") | dict(rope_scaling=YARN),
    # A head, a period of two layers twice, and a tail; one head of keys for all queries.
    "olmo3-head": OLMO3
    | layers("fsfsfss")
    | dict(rope_scaling=YARN, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=0.01),
    # In the form of transformers 5. No kinds of layers are stated: every fourth is full.
    "olmo3-new": {k: v for k, v in OLMO3.items() if k not in ("rope_theta", "num_key_value_heads", "rms_norm_eps")}
    | dict(num_hidden_layers=5, rope_parameters=ROPES, head_dim=12),
}  # fmt: skip
STACK = "olmo3-head"
PARAMETERS = {"olmo3-7b": 7_298_011_136, "olmo3-32b": 32_233_522_176, "olmo3.1-32b": 32_233_522_176}


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
