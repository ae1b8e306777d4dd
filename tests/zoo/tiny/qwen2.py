"""Qwen2.5, the dense models."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, biases, mlp


QWEN2 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="qwen2", architectures=["Qwen2ForCausalLM"], rms_norm_eps=1e-6, max_window_layers=1,
    use_sliding_window=False, sliding_window=4, use_mrope=False,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2 | dict(tie_word_embeddings=True),  # a window that is not used
    "qwen2-window-max": QWEN2 | dict(use_sliding_window=True),
    "qwen2-new": {k: v for k, v in QWEN2.items() if k not in ("rope_theta", "use_mrope")}
    | dict(
        rope_parameters=YARN | dict(rope_theta=10000.0), rms_norm_eps=0.01, num_hidden_layers=5,
        use_sliding_window=True,
        layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "full")],
    ),
}  # fmt: skip
STACK = "qwen2-window-max"
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen2.5-coder-0.5b": 494_032_768, "qwen2.5-coder-1.5b": 1_543_714_304,
    "qwen2.5-coder-3b": 3_085_938_688, "qwen2.5-coder-7b": 7_615_616_512, "qwen2.5-coder-14b": 14_770_033_664,
    "qwen2.5-coder-32b": 32_763_876_352, "qwen2.5-math-1.5b": 1_543_714_304, "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-math-72b": 72_706_203_648, "qwq-32b": 32_763_876_352, "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512, "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    d, v = config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        matrices = attention(config, layer)
        out |= matrices | biases({k: shape for k, shape in matrices.items() if "o_proj" not in k})
        out |= mlp(f"{layer}.mlp", config["intermediate_size"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, so small that attention is not sharp enough to magnify rounding."""
    return 1 + 0.3 * noise if "norm" in name else 0.25 * noise
