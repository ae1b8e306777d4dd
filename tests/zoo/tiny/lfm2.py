"""LFM2 and LFM2.5."""

from typing import Any

from tests.zoo.tiny import COMMON, biases


LFM2 = {k: v for k, v in COMMON.items() if k not in ("head_dim", "hidden_act", "tie_word_embeddings")} | dict(
    model_type="lfm2", architectures=["Lfm2ForCausalLM"], conv_L_cache=3, conv_bias=False, norm_eps=1e-5,
    pad_token_id=0,
)  # fmt: skip


def layers(kinds: str) -> dict[str, Any]:
    types = ["full_attention" if kind == "f" else "conv" for kind in kinds]
    return dict(layer_types=types, num_hidden_layers=len(types))


CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of LFM2.5's files: two thirds of 72 are 48.
    "lfm2": LFM2
    | layers("ccfccf")
    | dict(
        block_auto_adjust_ff_dim=True, block_dim=32, block_ff_dim=72, block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0, block_multiple_of=16, block_norm_eps=1e-5, block_out_init_scale=1.0,
        block_use_swiglu=True, block_use_xavier_init=True, conv_dim=32, conv_use_xavier_init=True,
        intermediate_size=72, num_heads=4, tie_embedding=True, use_pos_enc=True,
    ),
    # In the form of transformers 5: a head, a period of two twice, and a tail; biases, and one head of keys.
    "lfm2-new": {k: v for k, v in LFM2.items() if k != "rope_theta"}
    | layers("ccfcff")
    | dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=16),
        num_key_value_heads=1, conv_bias=True, conv_L_cache=4, norm_eps=0.01, tie_word_embeddings=False, head_dim=16,
        block_auto_adjust_ff_dim=False, full_attn_idxs=None,
    ),
    # In the form of LFM2's first files, with what no released model has: two thirds of 48, times 1.3, are 48 again.
    "lfm2-first": LFM2
    | dict(
        num_hidden_layers=4, full_attn_idxs=[1, 2], block_ff_dim=48, block_ffn_dim_multiplier=1.3, block_multiple_of=16,
        conv_dim_out=32, theta=10000.0, rope_scaling=dict(type="linear", factor=2.0), intermediate_size=40,
    ),
}  # fmt: skip
STACK = "lfm2-new"
PARAMETERS = {
    "lfm2-350m": 354_483_968, "lfm2-700m": 742_489_344, "lfm2-1.2b": 1_170_340_608, "lfm2-2.6b": 2_569_272_320,
    "lfm2-2.6b-exp": 2_569_272_320, "lfm2.5-350m": 354_483_968, "lfm2.5-1.2b": 1_170_340_608,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, width = config["hidden_size"], config["vocab_size"], mlp_width(config)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.embedding_norm.weight": (d,)}
    if not config.get("tie_word_embeddings", True):
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer, kinds = f"model.layers.{n}", config.get("layer_types")
        is_conv = kinds[n] == "conv" if kinds else n not in config["full_attn_idxs"]
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("operator_norm", "ffn_norm")}
        out |= conv(config, layer) if is_conv else attention(config, layer)
        matrices = dict(w1=(width, d), w2=(d, width), w3=(width, d))
        out |= {f"{layer}.feed_forward.{w}.weight": shape for w, shape in matrices.items()}
    return out


def mlp_width(config: dict[str, Any]) -> int:
    """Returns the width of the MLP."""
    width = config.get("block_ff_dim", config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    multiple = config["block_multiple_of"]
    return -(-int(2 * width / 3 * config["block_ffn_dim_multiplier"]) // multiple) * multiple


def conv(config: dict[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer's convolution: name -> shape."""
    d, path = config["hidden_size"], f"{layer}.conv"
    out: dict[str, tuple[int, ...]] = {
        f"{path}.in_proj.weight": (3 * d, d),
        f"{path}.conv.weight": (d, 1, config["conv_L_cache"]),
        f"{path}.out_proj.weight": (d, d),
    }
    return out | (biases(out) if config["conv_bias"] else {})


def attention(config: dict[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer's attention: name -> shape."""
    d, heads, path = config["hidden_size"], config["num_attention_heads"], f"{layer}.self_attn"
    head = config.get("head_dim", d // heads)
    q, kv = heads * head, config["num_key_value_heads"] * head
    matrices = dict(q_proj=(q, d), k_proj=(kv, d), v_proj=(kv, d), out_proj=(d, q))
    norms = dict(q_layernorm=(head,), k_layernorm=(head,))
    return {f"{path}.{name}.weight": shape for name, shape in (matrices | norms).items()}
