"""Qwen3.5 and Qwen3.6, the text models: a mixture, and a dense one."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, mlp, qwen3_vl


QWEN3_5 = {k: v for k, v in COMMON.items() if k not in ("rope_theta", "torch_dtype", "num_hidden_layers")} | dict(
    dtype="float32", rms_norm_eps=1e-6, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_num_key_heads=2,
    attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
)  # fmt: skip
AXES = dict(mrope_interleaved=True, mrope_section=[1, 1, 0])  # for text, without effect
LINEAR, FULL = "linear_attention", "full_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5-moe": {k: v for k, v in QWEN3_5.items() if k != "intermediate_size"}
    | dict(
        model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"], num_hidden_layers=4,
        full_attention_interval=2, linear_num_value_heads=4, linear_value_head_dim=12, num_experts=6,
        num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=16, mlp_only_layers=[],
        rope_parameters=AXES | dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    ),
    # This one has a head, a period and a tail.
    "qwen3_5": QWEN3_5
    | dict(
        model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], num_hidden_layers=6,
        layer_types=[LINEAR, LINEAR, FULL, LINEAR, FULL, FULL], full_attention_interval=4, linear_num_value_heads=2,
        linear_value_head_dim=8, linear_conv_kernel_dim=3, tie_word_embeddings=True, attention_bias=True,
        output_gate_type="swish", partial_rotary_factor=0.5, bos_token_id=None, pad_token_id=None,
        rope_parameters=AXES
        | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0),
    ),
}  # fmt: skip
STACK = "qwen3_5"
PARAMETERS = {
    "qwen3.5-0.8b": 752_393_024, "qwen3.5-2b": 1_881_825_088, "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264, "qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912, "qwen3.5-397b-a17b": 396_346_350_336, "qwen3.6-27b": 26_895_998_464,
    "qwen3.6-35b-a3b": 34_660_610_688, "qwen3.8-27b": 26_895_998_464,
}  # fmt: skip
# Numbers of parameters of the MTP module.
MTP_PARAMETERS = {
    "qwen3.5-0.8b": 20_452_864, "qwen3.5-2b": 60_828_160, "qwen3.5-4b": 120_599_552, "qwen3.5-9b": 243_290_624,
    "qwen3.5-27b": 424_699_392, "qwen3.5-35b-a3b": 844_640_768, "qwen3.5-122b-a10b": 2_523_679_232,
    "qwen3.5-397b-a17b": 6_595_568_128, "qwen3.6-27b": 424_699_392, "qwen3.6-35b-a3b": 844_640_768,
    "qwen3.8-27b": 424_699_392,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub (there with `language_model.` after `model.`), without MTP."""
    d, v, layers = (config[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    every = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [FULL if (n + 1) % every == 0 else LINEAR for n in range(layers)]
    for n, kind in enumerate(types):
        out |= layer(config, f"model.layers.{n}", kind)
    return out


def layer(config: dict[str, Any], path: str, kind: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer: name -> shape."""
    c, d = config, config["hidden_size"]
    out = {f"{path}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if kind == FULL:
        out |= attention(config, path)
        out[f"{path}.self_attn.q_proj.weight"] = (2 * c["num_attention_heads"] * c["head_dim"], d)
        if config.get("attention_bias"):
            out[f"{path}.self_attn.q_proj.bias"] = (2 * c["num_attention_heads"] * c["head_dim"],)
        out |= {f"{path}.self_attn.{norm}.weight": (c["head_dim"],) for norm in ("q_norm", "k_norm")}
    else:
        heads, keys = c["linear_num_value_heads"], c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = heads * c["linear_value_head_dim"]
        out |= {
            f"{path}.linear_attn.in_proj_qkv.weight": (2 * keys + values, d),
            f"{path}.linear_attn.in_proj_z.weight": (values, d),
            f"{path}.linear_attn.in_proj_b.weight": (heads, d),
            f"{path}.linear_attn.in_proj_a.weight": (heads, d),
            f"{path}.linear_attn.conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
            f"{path}.linear_attn.A_log": (heads,),
            f"{path}.linear_attn.dt_bias": (heads,),
            f"{path}.linear_attn.norm.weight": (c["linear_value_head_dim"],),
            f"{path}.linear_attn.out_proj.weight": (d, values),
        }
    if not (experts := c.get("num_experts")):
        return out | mlp(f"{path}.mlp", c["intermediate_size"], d)
    width = c["moe_intermediate_size"]
    out[f"{path}.mlp.gate.weight"] = (experts, d)
    out[f"{path}.mlp.experts.gate_up_proj"] = (experts, 2 * width, d)
    out[f"{path}.mlp.experts.down_proj"] = (experts, d, width)
    out[f"{path}.mlp.shared_expert_gate.weight"] = (1, d)
    return out | mlp(f"{path}.mlp.shared_expert", c["shared_expert_intermediate_size"], d)


def further_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the MTP module."""
    d = config["hidden_size"]
    norms = {f"mtp.{norm}.weight": (d,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return layer(config, "mtp.layers.0", FULL) | norms | {"mtp.fc.weight": (d, 2 * d)}


vision_parameters = qwen3_vl.vision_parameters


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with norms stored as their distance from one, except the norm within a linear layer.

    With 0.4 everywhere, half a unit in the last place of the weights would change the gradients by 1.2e-5.
    """
    if "norm" in name:
        return 0.3 * noise + ("linear_attn.norm" in name)
    scale = {"embed_tokens.weight": 1.0, "in_proj_a.weight": 0.1, "out_proj.weight": 0.1}
    return next((scale[end] for end in scale if name.endswith(end)), 0.4) * noise


# ======================================================================================================================
# Qwen3.5 with its tower, which is Qwen3-VL's without DeepStack, above a hybrid text model.
# ======================================================================================================================

SEEING = [
    qwen3_vl.Qwen3VL(
        "qwen3_5", architecture="Qwen3_5ForConditionalGeneration", text_names=("qwen3_5_text", "Qwen3_5ForCausalLM"),
        deep=[], restated=("rope_parameters", "partial_rotary_factor"),
        parameters={  # without the MTP module
            "qwen3.5-0.8b": 852_985_920, "qwen3.5-2b": 2_213_241_664, "qwen3.5-4b": 4_539_265_536,
            "qwen3.5-9b": 9_409_813_744, "qwen3.5-27b": 27_356_728_560, "qwen3.5-35b-a3b": 35_107_181_936,
            "qwen3.5-122b-a10b": 122_562_817_776, "qwen3.5-397b-a17b": 396_802_360_816, "qwen3.6-27b": 27_356_728_560,
            "qwen3.6-35b-a3b": 35_107_181_936, "qwen3.8-27b": 27_356_728_560,
        },
        layer_types=["linear_attention", "full_attention"] * 2, num_hidden_layers=4,
    )
]  # fmt: skip
