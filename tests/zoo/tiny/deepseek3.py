"""DeepSeek V3, Kimi K2 and GLM-4.7-Flash.

transformers has no `model_type` kimi_k2, so its checkpoint has V3's here.
"""

import math
from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, deepseek2


DEEPSEEK3 = {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], rms_norm_eps=1e-5, num_key_value_heads=4,
    q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12, moe_intermediate_size=16,
    n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1, moe_layer_freq=1,
    topk_method="noaux_tc", n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
    scoring_func="sigmoid", attention_bias=False, num_nextn_predict_layers=1, ep_size=1,
)  # fmt: skip
YARN = dict(type="yarn", factor=4, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8)
KIMI = dict(type="yarn", factor=8.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek3": DEEPSEEK3 | dict(rope_scaling=YARN | dict(original_max_position_embeddings=16)),
    "deepseek3-kimi": DEEPSEEK3
    | dict(
        rope_scaling=KIMI | dict(original_max_position_embeddings=16), rope_theta=50000.0, n_group=1, topk_group=1,
        num_nextn_predict_layers=0, aux_loss_alpha=0.001, seq_aux=True, pretraining_tp=1,
    ),
    "deepseek3-new": {k: v for k, v in DEEPSEEK3.items() if k != "rope_theta"}
    | dict(
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), q_lora_rank=None, norm_topk_prob=False,
        head_dim=8, qk_head_dim=18, rope_interleave=True, first_k_dense_replace=2, num_hidden_layers=4,
        n_shared_experts=2, routed_scaling_factor=1.0,
    ),
    # In the form of GLM-4.7-Flash's file: values have as many features as queries.
    "deepseek3-glm": {k: v for k, v in DEEPSEEK3.items() if k not in ("moe_layer_freq", "scoring_func", "ep_size")}
    | dict(
        model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"], rope_scaling=None,
        partial_rotary_factor=1.0, n_group=1, topk_group=1, v_head_dim=18, routed_scaling_factor=1.8, pad_token_id=0,
    ),
}  # fmt: skip
STACK = "deepseek3"
PARAMETERS = {
    "deepseek-v3": 671_026_419_200, "deepseek-v3-0324": 671_026_419_200, "deepseek-v3.1": 671_026_419_200,
    "deepseek-v3.1-terminus": 671_026_419_200, "deepseek-r1": 671_026_419_200, "deepseek-r1-0528": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448, "kimi-k2-0905": 1_026_408_232_448, "kimi-k2.5": 1_026_408_232_448,
    "kimi-k2.6": 1_026_408_232_448, "kimi-k2.7-code": 1_026_408_232_448,
    "glm4.7-flash": 29_943_393_920,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub, without the MTP module."""
    experts, first = config["n_routed_experts"], config["first_k_dense_replace"]
    moe = range(first, config["num_hidden_layers"])
    biases = {f"model.layers.{n}.mlp.gate.e_score_correction_bias": (experts,) for n in moe}
    return deepseek2.shapes(config) | biases


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters of Kimi K2.5 beside the text model: its tower, and the projection."""
    if "vision_config" not in config:
        return 0
    c, embed = config["vision_config"], config["text_config"]["hidden_size"]
    d, width, merged = c["vt_hidden_size"], c["vt_intermediate_size"], math.prod(c["merge_kernel_size"])
    linear = lambda ins, outs: (ins + 1) * outs
    layer = linear(d, 3 * d) + linear(d, d) + linear(d, width) + linear(width, d) + 4 * d
    places = c["init_pos_emb_height"] * c["init_pos_emb_width"] * d
    tower = linear(3 * c["patch_size"] ** 2, d) + places + c["vt_num_hidden_layers"] * layer + 2 * d
    return tower + 2 * d + linear(merged * d, merged * d) + linear(merged * d, embed)


def further_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the MTP module: a layer, with copies of the embedding and the head."""
    d, v, n = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    layer, more = f"model.layers.{n}.", shapes(config | dict(num_hidden_layers=n + 1))
    out = {name: shape for name, shape in more.items() if name.startswith(layer)}
    norms = {f"{layer}{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    copies = {f"{layer}{name}.weight": (v, d) for name in ("embed_tokens", "shared_head.head")}
    return out | norms | copies | {f"{layer}eh_proj.weight": (d, 2 * d)}


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns V2's values, and a bias that changes some of the choices."""
    return 0.1 * noise if "bias" in name else deepseek2.values(name, noise)
