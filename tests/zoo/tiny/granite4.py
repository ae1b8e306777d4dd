"""Granite 4.0."""

from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, biases
from tests.zoo.tiny import values as usual


GRANITE4 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="granitemoehybrid", architectures=["GraniteMoeHybridForCausalLM"], rms_norm_eps=1e-5,
    shared_intermediate_size=40, attention_bias=False, attention_multiplier=0.2, embedding_multiplier=3,
    logits_scaling=0.4, residual_multiplier=0.6, tie_word_embeddings=True, rope_scaling=None, mamba_chunk_size=16,
    mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=16, mamba_d_state=12, mamba_expand=2, mamba_n_groups=1,
    mamba_n_heads=4, mamba_proj_bias=False, pad_token_id=0,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "granite4": GRANITE4
    | dict(
        num_hidden_layers=6, layer_types=["mamba", "mamba", "attention"] * 2, position_embedding_type="nope",
        num_local_experts=8, num_experts_per_tok=3, intermediate_size=24, normalization_function="rmsnorm",
        init_method="mup",
    ),
    # In the form of transformers 5: a head, a period of two twice, and a tail; all biases, groups and a limited step.
    "granite4-dense-new": {k: v for k, v in GRANITE4.items() if k not in ("rope_theta", "rope_scaling")}
    | dict(
        num_hidden_layers=6, num_local_experts=0, num_experts_per_tok=0, num_key_value_heads=4,
        layer_types=[f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full", "full")],
        position_embedding_type="rope", rope_parameters=dict(rope_type="default", rope_theta=5000.0),
        attention_bias=True, mamba_proj_bias=True, mamba_n_groups=2, mamba_n_heads=8, mamba_d_head="auto",
        mamba_expand=3, mamba_d_conv=3, time_step_limit=[0.05, 0.4], tie_word_embeddings=False,
    ),
    # No kinds of layers are stated, so all are Mamba-2, for which transformers 5.23 cannot make a cache.
    "granite4-mamba": GRANITE4
    | dict(num_hidden_layers=2, num_local_experts=0, num_experts_per_tok=0, mamba_conv_bias=False, use_cache=False),
}  # fmt: skip
STACK = "granite4-dense-new"
PARAMETERS = {
    "granite4-micro": 3_402_836_480, "granite4-h-micro": 3_191_396_096, "granite4-h-tiny": 6_939_037_248,
    "granite4-h-small": 32_207_337_984,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub."""
    c, d, v = config, config["hidden_size"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        layer, experts, kinds = f"model.layers.{n}", c["num_local_experts"], c.get("layer_types")
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        mamba = kinds is None or kinds[n] in ("mamba", "linear_attention")
        out |= mamba2(c, f"{layer}.mamba") if mamba else attention(c, layer)
        out[f"{layer}.shared_mlp.input_linear.weight"] = (2 * c["shared_intermediate_size"], d)
        out[f"{layer}.shared_mlp.output_linear.weight"] = (d, c["shared_intermediate_size"])
        if experts:
            width, moe = c["intermediate_size"], f"{layer}.block_sparse_moe"
            out[f"{moe}.router.layer.weight"] = (experts, d)
            out[f"{moe}.input_linear.weight"] = (experts, 2 * width, d)
            out[f"{moe}.output_linear.weight"] = (experts, d, width)
    return out


def mamba2(c: dict[str, Any], path: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a Mamba-2 layer: name -> shape."""
    d, heads, inner = c["hidden_size"], c["mamba_n_heads"], c["mamba_expand"] * c["hidden_size"]
    channels = inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    matrices: dict[str, tuple[int, ...]] = {
        f"{path}.in_proj.weight": (inner + channels + heads, d),
        f"{path}.out_proj.weight": (d, inner),
    }
    out: dict[str, tuple[int, ...]] = {f"{path}.conv1d.weight": (channels, 1, c["mamba_d_conv"])}
    out |= {f"{path}.conv1d.bias": (channels,)} if c["mamba_conv_bias"] else {}
    out |= {f"{path}.{name}": (heads,) for name in ("A_log", "D", "dt_bias")} | {f"{path}.norm.weight": (inner,)}
    return out | matrices | (biases(matrices) if c["mamba_proj_bias"] else {})


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values with steps so small that a state reaches over many tokens."""
    return noise - 2 if name.endswith("dt_bias") else usual(name, noise)
