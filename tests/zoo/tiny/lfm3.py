"""LFM3."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, lfm2


LFM3 = {k: v for k, v in COMMON.items() if k not in ("hidden_act", "rope_theta", "tie_word_embeddings")} | dict(
    model_type="lfm3", architectures=["Lfm3ForCausalLM"], norm_eps=1e-5, sliding_window=4, pad_token_id=0,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # A head, a period of four layers twice, and a tail, by the class's own kinds of layers.
    "lfm3": LFM3
    | dict(
        num_hidden_layers=10, attention_bias=False, conv_L_cache=7, conv_bias=False, tie_word_embeddings=True,
        use_attention_gate=True, use_sandwich_norm=True,
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", rope_theta=5000.0, partial_rotary_factor=0.5),
            sliding_attention=dict(rope_type="default", rope_theta=500.0),
        ),
    ),
    # What no released model has.
    "lfm3-plain": LFM3
    | dict(
        layer_types=["sliding_attention", "conv", "full_attention", "conv"], num_hidden_layers=4, attention_bias=True,
        conv_L_cache=3, conv_bias=True, tie_word_embeddings=False, use_attention_gate=False, use_sandwich_norm=False,
        num_key_value_heads=1, norm_eps=0.01,
    ),
}  # fmt: skip
STACK = "lfm3"
PARAMETERS = {"lfm3-1.7b": 1_728_801_536}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, width = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    fours = ["sliding_attention", "conv", "full_attention", "conv"]
    kinds = config.get("layer_types") or ["conv", *(fours[n % 4] for n in range(1, config["num_hidden_layers"]))]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.embedding_norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    norms = ["operator_norm", "ffn_norm"]
    norms += ["post_operator_norm", "post_ffn_norm"] if config["use_sandwich_norm"] else []
    for n, kind in enumerate(kinds):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in norms}
        matrices = dict(w1=(width, d), w2=(d, width), w3=(width, d))
        out |= {f"{layer}.feed_forward.{w}.weight": shape for w, shape in matrices.items()}
        if kind == "conv":
            out |= lfm2.conv(config, layer)
            continue
        out |= attention(config, layer)
        out |= {f"{layer}.self_attn.{norm}.weight": (config["head_dim"],) for norm in ("q_norm", "k_norm")}
        if config["use_attention_gate"]:
            out[f"{layer}.self_attn.gate_proj.weight"] = (config["num_attention_heads"], d)
    return out
