"""MiniMax M2's own features: routers in float32 beside weights in fp8, and keys of config.json that say nothing."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import zoo
from tests.zoo import tiny
from tests.zoo.programs import on_host, packed, same
from zoo.config import read as read_config
from zoo.models import minimax_m2


FAMILY, NAME = tiny.MODULES["minimax_m2"], "minimax_m2"
CONFIG = tiny.CONFIGS[NAME]
PLAIN = re.compile(r".*(norm|gate|e_score_correction_bias|embed_tokens|lm_head).*")  # these are not in 8 bits
E4M3 = ml_dtypes.float8_e4m3fn
QUANTIZED = dict(  # as in the file
    activation_scheme="dynamic", fmt="float8_e4m3fn", quant_method="fp8", weight_block_size=[128, 128],
    modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
)  # fmt: skip
WIDE = dict(hidden_size=160, intermediate_size=136, num_local_experts=4, num_hidden_layers=2, head_dim=36)


def read(**changes):
    return read_config(minimax_m2.FAMILY, CONFIG | changes)


def test_fp8_is_read_as_stored(tmp_path):
    """Weights are their codes times their scales, rounded once; routers keep their float32."""
    random, stored, plain = np.random.RandomState(3), {}, {}
    for name, shape in FAMILY.shapes(CONFIG | WIDE).items():
        noise = random.standard_normal(shape).astype(np.float32)
        if PLAIN.fullmatch(name):
            kept = "gate.weight" in name or "bias" in name
            plain[name] = stored[name] = FAMILY.values(name, noise).astype(np.float32 if kept else ml_dtypes.bfloat16)
            continue
        codes = (100 * noise).clip(-448, 448).astype(E4M3)
        scales = random.uniform(1e-4, 1e-3, [-(-n // 128) for n in shape]).astype(np.float32)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        each = scales.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]
        plain[name] = (codes.astype(np.float32) * each).astype(ml_dtypes.bfloat16)
    models = []
    for folder, tensors, changes in [("fp8", stored, dict(quantization_config=QUANTIZED)), ("plain", plain, {})]:
        tiny.write(tmp_path / folder, NAME, **WIDE, **changes)
        safetensors.numpy.save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        models.append(zoo.load(tmp_path / folder, dtype="bfloat16"))
    assert same(*models)
    model = models[0]
    gate = model.layers.period[0].block_sparse_moe.gate
    assert gate.weight.value.dtype == jnp.float32 and model.lm_head.weight.dtype == jnp.bfloat16
    assert np.array_equal(gate.weight.value[1], plain["model.layers.1.block_sparse_moe.gate.weight"])

    zoo.save(on_host(model), tmp_path / "saved", fp8=True)
    saved = convert.tensors.open_tensors(tmp_path / "saved")
    assert {name: tensor.dtype for name, tensor in saved.items()} == {name: t.dtype for name, t in stored.items()}


def test_keys(load, tmp_path):
    """The rotary part of heads is read in all forms and written as in MiniMax's files; layers are attention."""
    zoo.save(on_host(load(NAME)), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rotary_dim"] == 8 and "partial_rotary_factor" not in saved
    assert not saved.keys() & {*minimax_m2.UNREAD, "attn_type_list"}
    assert read(use_mtp=True) == read(attn_type_list=None) == read()
    assert read(rotary_dim=16) == read(rotary_dim=None) != read()
    assert read(rotary_dim=16, rope_scaling=dict(rope_type="default", partial_rotary_factor=0.5)) == read()
    for changes, words in [
        (dict(attn_type_list=[1, 0, 1]), r"attn_type_list=\[1, 0, 1\]; only plain attention"),
        (dict(rotary_dim=32), "at most 1, the whole head"),
        (dict(rotary_dim="8"), "has the key 'rotary_dim'"),
        (dict(shared_intermediate_size=64), "implements only 0"),
        (dict(qk_norm_type="per_head"), "implements only 'per_layer'"),
    ]:
        with pytest.raises(ValueError, match=words):
            read(**changes)


def test_rebalance(load):
    """The biases of float32 routers are moved, too."""
    model = load(NAME)
    reports = packed(model)[2]
    moved = minimax_m2.rebalance(model, reports, 0.25)
    bias = lambda model: np.asarray(model.layers.period[0].block_sparse_moe.gate.e_score_correction_bias.value)
    assert set(np.abs(bias(moved) - bias(model)).round(6).ravel().tolist()) <= {0, 0.25}
    load_of = np.asarray(jax.tree.leaves(reports, is_leaf=lambda x: hasattr(x, "load"))[0].load)
    assert ((bias(moved) > bias(model)) == (load_of < load_of.mean(axis=1, keepdims=True))).all()
