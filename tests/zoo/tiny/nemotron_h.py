"""Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, biases
from tests.zoo.tiny import values as usual


# transformers uses time_step_min as the model's least step, and not only for random weights.
NEMOTRON_H = {k: v for k, v in COMMON.items() if k not in ("hidden_act", "rope_theta")} | dict(
    model_type="nemotron_h", architectures=["NemotronHForCausalLM"], attention_bias=False, chunk_size=16,
    conv_kernel=4, expand=2, layer_norm_epsilon=1e-5, mamba_head_dim=16, mamba_hidden_act="silu", mamba_num_heads=4,
    mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2", n_groups=2, num_logits_to_keep=1, pad_token_id=0,
    rescale_prenorm_residual=True, residual_in_fp32=False, sliding_window=None, ssm_state_size=12,
    time_step_floor=1e-8, time_step_max=0.1, time_step_min=1e-8, use_bias=False, use_conv_bias=True,
    use_mamba_kernels=True,
)  # fmt: skip
EXPERTS = dict(
    moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, n_group=1, n_routed_experts=8, n_shared_experts=1,
    norm_eps=1e-5, norm_topk_prob=True, num_experts_per_tok=3, routed_scaling_factor=2.5, topk_group=1,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    # In the form of Nemotron 3 Super's file.
    "nemotron_h": NEMOTRON_H
    | EXPERTS
    | dict(
        hybrid_override_pattern="M*EM*E", num_hidden_layers=6, moe_latent_size=24, moe_shared_expert_overlap=False,
        mamba_ssm_cache_dtype="float32", partial_rotary_factor=1.0, rope_theta=10000, num_nextn_predict_layers=1,
        mtp_hybrid_override_pattern="*E", time_step_limit=[0.0, float("inf")],
    ),
    # In the form of transformers 5: a period of two, a layer, and layers of one kind, so three scans; all biases.
    "nemotron_h-mlp-new": {k: v for k, v in NEMOTRON_H.items() if k != "num_hidden_layers"}
    | dict(
        layers_block_type=["linear_attention", "mlp"] * 3 + ["full_attention"] + ["linear_attention"] * 5,
        mlp_bias=True, use_bias=True, rms_norm_eps=1e-5, conv_kernel=3, mamba_num_heads=6, mamba_head_dim=8, n_groups=3,
        mtp_layers_block_type=["full_attention", "moe"],
    ),
    "nemotron_h-groups": NEMOTRON_H
    | EXPERTS
    | dict(
        hybrid_override_pattern="ME*", num_hidden_layers=3, n_group=4, topk_group=2,
        norm_topk_prob=False, routed_scaling_factor=1.0, use_conv_bias=False, n_groups=1,
    ),
}  # fmt: skip
STACK = "nemotron_h-mlp-new"
PARAMETERS = {
    "nemotron-nano-9b-v2": 8_888_227_328, "nemotron3-nano-30b-a3b": 31_577_940_288,
    "nemotron3-super-120b-a12b": 120_668_707_840, "nemotron3.5-lightning-30b-a3b": 31_577_940_288,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub, without the MTP modules."""
    c, d, v = config, config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (v, d), "backbone.norm_f.weight": (d,)}
    out["lm_head.weight"] = (v, d)
    letters = dict(mlp="-", linear_attention="M", full_attention="*", moe="E")
    kinds = c.get("hybrid_override_pattern") or "".join(letters[kind] for kind in c["layers_block_type"])
    make = {"M": mamba2, "*": attention, "-": mlp, "E": experts}
    for n, kind in enumerate(kinds):
        out |= {f"backbone.layers.{n}.norm.weight": (d,)} | make[kind](c, f"backbone.layers.{n}.mixer")
    return out


def further_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the MTP module."""
    d, first, second = config["hidden_size"], "mtp.layers.0", "mtp.layers.1"
    norms = f"{first}.enorm", f"{first}.hnorm", f"{first}.norm", f"{second}.norm", f"{second}.final_layernorm"
    out: dict[str, tuple[int, ...]] = {f"{norm}.weight": (d,) for norm in norms}
    out |= {f"{first}.eh_proj.weight": (d, 2 * d)} | attention(config, f"{first}.mixer")
    return out | experts(config, f"{second}.mixer")


def mamba2(c: dict[str, Any], path: str) -> dict[str, tuple[int, ...]]:
    d, heads, inner = c["hidden_size"], c["mamba_num_heads"], c["mamba_num_heads"] * c["mamba_head_dim"]
    channels = inner + 2 * c["n_groups"] * c["ssm_state_size"]
    matrices: dict[str, tuple[int, ...]] = {
        f"{path}.in_proj.weight": (inner + channels + heads, d),
        f"{path}.out_proj.weight": (d, inner),
    }
    out: dict[str, tuple[int, ...]] = {f"{path}.conv1d.weight": (channels, 1, c["conv_kernel"])}
    out |= {f"{path}.conv1d.bias": (channels,)} if c["use_conv_bias"] else {}
    out |= {f"{path}.{name}": (heads,) for name in ("A_log", "D", "dt_bias")} | {f"{path}.norm.weight": (inner,)}
    return out | matrices | (biases(matrices) if c["use_bias"] else {})


def attention(c: dict[str, Any], path: str) -> dict[str, tuple[int, ...]]:
    d, q, kv = c["hidden_size"], *(c[f"num_{of}_heads"] * c["head_dim"] for of in ("attention", "key_value"))
    rows = dict(q_proj=(q, d), k_proj=(kv, d), v_proj=(kv, d), o_proj=(d, q))
    return {f"{path}.{name}.weight": shape for name, shape in rows.items()}


def mlp(c: dict[str, Any], path: str, width: int = 0) -> dict[str, tuple[int, ...]]:
    d, width = c["hidden_size"], width or c["intermediate_size"]
    matrices: dict[str, tuple[int, ...]] = {
        f"{path}.up_proj.weight": (width, d),
        f"{path}.down_proj.weight": (d, width),
    }
    return matrices | (biases(matrices) if c["mlp_bias"] else {})


def experts(c: dict[str, Any], path: str) -> dict[str, tuple[int, ...]]:
    d, count, latent = c["hidden_size"], c["n_routed_experts"], c.get("moe_latent_size")
    out: dict[str, tuple[int, ...]] = {f"{path}.gate.weight": (count, d)}
    out[f"{path}.gate.e_score_correction_bias"] = (count,)
    for m in range(count):
        out[f"{path}.experts.{m}.up_proj.weight"] = (c["moe_intermediate_size"], latent or d)
        out[f"{path}.experts.{m}.down_proj.weight"] = (latent or d, c["moe_intermediate_size"])
    if latent:
        out[f"{path}.fc1_latent_proj.weight"] = (latent, d)
        out[f"{path}.fc2_latent_proj.weight"] = (d, latent)
    return out | mlp(c, f"{path}.shared_experts", c["moe_shared_expert_intermediate_size"])


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with small steps, so that a state reaches far, and a router's bias that changes some choices."""
    if name.endswith("dt_bias"):
        return noise - 2
    if name.endswith(("q_proj.weight", "correction_bias")):
        return 0.1 * noise
    return usual(name, noise)
