"""Qwen3-VL without its tower: dense models, and mixtures."""

from typing import Any

from tests.zoo.tiny import COMMON, attention, mlp, qwen3_5


QWEN3_VL = {k: v for k, v in COMMON.items() if k not in ("torch_dtype", "head_dim")} | dict(
    dtype="float32", rms_norm_eps=1e-6
)
AXES = dict(mrope_interleaved=True, mrope_section=[4, 2, 2])  # for text, without effect

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of transformers 5. Layers 3 and 5 have experts: there is a head, a period and a tail.
    "qwen3_vl-moe": {k: v for k, v in QWEN3_VL.items() if k != "rope_theta"}
    | dict(
        model_type="qwen3_vl_moe_text", architectures=["Qwen3VLMoeTextModel"], head_dim=8, attention_bias=True,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, num_hidden_layers=7, decoder_sparse_step=2,
        mlp_only_layers=[1], rope_parameters=AXES | dict(rope_type="default", rope_theta=1000.0),
    ),
    "qwen3_vl": QWEN3_VL
    | dict(
        model_type="qwen3_vl_text", architectures=["Qwen3VLTextModel"], head_dim=16, tie_word_embeddings=True,
        rope_scaling=AXES | dict(rope_type="default"),
    ),
}  # fmt: skip
STACK = "qwen3_vl-moe"
PARAMETERS = {
    "qwen3-vl-2b": 1_720_574_976, "qwen3-vl-4b": 4_022_468_096, "qwen3-vl-8b": 8_190_735_360,
    "qwen3-vl-32b": 32_762_123_264, "qwen3-vl-30b-a3b": 30_532_122_624, "qwen3-vl-235b-a22b": 235_093_634_560,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub (there with `language_model.` after `model.`)."""
    c, d, v = config, config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        layer, experts, width = f"model.layers.{n}", c.get("num_experts"), c.get("moe_intermediate_size")
        out |= attention(c, layer)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{layer}.self_attn.{norm}.weight": (c["head_dim"],) for norm in ("q_norm", "k_norm")}
        if not experts or n in c["mlp_only_layers"] or (n + 1) % c["decoder_sparse_step"]:
            out |= mlp(f"{layer}.mlp", c["intermediate_size"], d)
        else:
            out[f"{layer}.mlp.gate.weight"] = (experts, d)
            out[f"{layer}.mlp.experts.gate_up_proj"] = (experts, d, 2 * width)
            out[f"{layer}.mlp.experts.down_proj"] = (experts, width, d)
    return out


def vision_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape for the checkpoint's tower: Qwen3.5's, and DeepStack's tensors."""
    c = config["vision_config"]
    wide = c["spatial_merge_size"] ** 2 * c["hidden_size"]
    linear = lambda name, o, *i: {f"model.visual.{name}.weight": (o, *i), f"model.visual.{name}.bias": (o,)}
    out = qwen3_5.vision_shapes(config)
    for n in range(len(c["deepstack_visual_indexes"])):
        merger = f"deepstack_merger_list.{n}"
        out |= linear(f"{merger}.norm", wide) | linear(f"{merger}.linear_fc1", wide, wide)
        out |= linear(f"{merger}.linear_fc2", c["out_hidden_size"], wide)
    return out


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters that a checkpoint with this config.json has beside the text model."""
    import math

    return sum(math.prod(shape) for shape in vision_shapes(config).values())
