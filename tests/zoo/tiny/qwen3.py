"""Qwen3, the dense models."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, mlp


QWEN3 = COMMON | dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], rms_norm_eps=1e-6, attention_bias=False,
    max_window_layers=3, use_sliding_window=False, sliding_window=None,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0)


def sliding(types: str) -> dict[str, Any]:
    kinds = ["sliding_attention" if kind == "s" else "full_attention" for kind in types]
    return dict(layer_types=kinds, num_hidden_layers=len(kinds), use_sliding_window=True, sliding_window=4)


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | dict(tie_word_embeddings=True),
    "qwen3-yarn": QWEN3 | dict(rope_scaling=YARN, max_position_embeddings=16),  # this is also the original context
    "qwen3-window-tail": QWEN3 | sliding("ssfssfss"),
    "qwen3-window-head": QWEN3 | sliding("ffsfsfs"),
    "qwen3-window-max": QWEN3
    | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1, attention_bias=True),
}
STACK = "qwen3-window-head"
PARAMETERS = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-embedding-0.6b": 595_776_512, "qwen3-embedding-4b": 4_021_774_336,
    "qwen3-embedding-8b": 8_188_515_328,  # with output embeddings, which the repository lacks
    "qwen3-reranker-0.6b": 595_776_512, "qwen3-reranker-4b": 4_021_784_576, "qwen3-reranker-8b": 8_188_548_096,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(config, layer) | mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
    return out
