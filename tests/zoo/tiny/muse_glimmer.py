"""Muse Glimmer without its tower."""

import math
from typing import Any

import numpy as np

from tests.zoo.tiny import COMMON, attention, biases, gemma2, mlp


MUSE_GLIMMER = {k: v for k, v in COMMON.items() if k not in ("torch_dtype", "hidden_act", "rope_theta")} | dict(
    model_type="muse_glimmer_text", architectures=["MuseGlimmerTextModel"], dtype="float32", hidden_activation="silu",
    rms_norm_eps=1e-5, post_norm_eps=1e-8, attention_bias=False, sliding_window=4, qk_scale_factor=3.87,
    output_multiplier=3.0, final_logit_softcapping=20.0, rope_parameters=dict(rope_type="default", rope_theta=5000.0),
    pad_token_id=None,
)  # fmt: skip


def layers(*kinds: str, theta: float) -> dict[str, Any]:
    """Returns the keys of layers, each "sliding" or "full", with "+" if it has rotary positions."""
    types = [f"{kind.removesuffix('+')}_attention" for kind in kinds]
    thetas = [theta if kind.endswith("+") else 0 for kind in kinds]
    return dict(num_hidden_layers=len(kinds), layer_types=types, layer_rope_theta=thetas)


CONFIGS: dict[str, dict[str, Any]] = {
    "muse_glimmer": MUSE_GLIMMER | dict(num_hidden_layers=8),  # a period of four twice
    # A head, a period of two twice and a tail, in which windows and positions are apart; one head of keys.
    "muse_glimmer-lists": {k: v for k, v in MUSE_GLIMMER.items() if k != "rope_parameters"}
    | layers("full+", "sliding+", "full", "sliding+", "full", "sliding", theta=300.0)
    | dict(
        rope_theta=300.0, rope_scaling=dict(rope_type="linear", factor=2.0), num_key_value_heads=1, head_dim=12,
        attention_bias=True, tie_word_embeddings=True, rms_norm_eps=0.01, post_norm_eps=0.5, sliding_window=40,
        qk_scale_factor=2.0,
    ),
    # What is absent is transformers' default; the full layers are the first and the last.
    "muse_glimmer-defaults": {
        k: v for k, v in MUSE_GLIMMER.items() if k not in ("rope_parameters", "num_key_value_heads", "post_norm_eps")
    }
    | dict(num_hidden_layers=5, sliding_window=50),
}  # fmt: skip
STACK = "muse_glimmer-lists"
PARAMETERS = {"muse-glimmer-30b": 27_854_780_928}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub (there with `language_model.` after `model.`)."""
    c = dict(num_key_value_heads=2) | config
    d, v = c["hidden_size"], c["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= attention(c, layer) | mlp(f"{layer}.mlp", c["intermediate_size"], d)
        out[f"{layer}.self_attn.gate_proj.weight"] = (c["num_attention_heads"] * c["head_dim"], d)
        out |= {f"{layer}.{norm}.weight": (d,) for norm in gemma2.NORMS}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Norms of layers are stored minus 1."""
    return (1 if name == "model.norm.weight" else 0) + 0.3 * noise


def vision_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape of the tower, its adapter and the projection."""
    c, width = config["vision_config"], config["projector_hidden_size"]
    d, patch = c["hidden_size"], 3 * c["patch_temporal"] * c["patch_size"] ** 2
    out: dict[str, tuple[int, ...]] = {
        "patch_embedder.patch_embedding.weight": (d, patch),
        "patch_embedder.position_embedding_table.weight": (c["pos_emb_height"] * c["pos_emb_width"], d),
    }
    norms = ["ln_pre", "ln_post"]
    for n in range(c["num_hidden_layers"]):
        maps = {f"attn.{name}.weight": (d, d) for name in ("q_proj", "k_proj", "v_proj", "proj")}
        maps |= {"mlp.fc1.weight": (c["intermediate_size"], d), "mlp.fc2.weight": (d, c["intermediate_size"])}
        out |= {f"layers.{n}.{name}": shape for name, shape in (maps | biases(maps)).items()}
        norms += [f"layers.{n}.norm1", f"layers.{n}.norm2"]
    out |= {f"{norm}.{kind}": (d,) for norm in norms for kind in ("weight", "bias")}
    return {f"model.vision_tower.{name}": shape for name, shape in out.items()} | {
        "model.vision_adapter.fc1.weight": (width, config["out_hidden_size"]),
        "model.vision_adapter.fc2.weight": (width, width),
        "model.vision_projection.weight": (config["text_config"]["hidden_size"], width),
    }


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters that a checkpoint with this config.json has beside the text model."""
    return sum(math.prod(shape) for shape in vision_shapes(config).values())
