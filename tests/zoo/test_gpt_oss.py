"""gpt-oss as released: experts in MXFP4, and the duplicate keys of config.json."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import convert.tensors
import zoo
from tests.close import close
from tests.zoo import make_golden, tiny
from tests.zoo.programs import MODEL, TOKENS, forward, on_host, same
from tests.zoo.test_lora import assert_like_floats
from zoo.config import read
from zoo.models import gpt_oss
from zoo.nn.layers import Float32RMSNorm
from zoo.quantized import coded, quantize


BF16 = np.dtype(ml_dtypes.bfloat16)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SUFFIXES = "blocks", "scales"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def write(folder, tensors, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS["gpt_oss"] | dict(intermediate_size=64) | changes))
    lazy = {name: (array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()}
    convert.tensors.save_tensors(folder, lazy)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns the same weights twice, with the experts in MXFP4 and in 16 bits, and one layer's experts in float64."""
    random, root = np.random.RandomState(0), tmp_path_factory.mktemp("gpt_oss")
    packed, plain, values = {}, {}, {}
    for name, shape in tiny.MODULES["gpt_oss"].shapes(tiny.CONFIGS["gpt_oss"] | dict(intermediate_size=64)).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, height = shape
            codes = random.randint(0, 256, (experts, height, width // 32, 16)).astype(np.uint8)
            scales = random.randint(122, 125, codes.shape[:3]).astype(np.uint8)
            pairs = np.stack([FP4[codes % 16], FP4[codes // 16]], axis=-1).reshape(*scales.shape, 32)
            matrices = (pairs * 2.0 ** (scales[..., None] - 127.0)).reshape(experts, height, width)
            packed |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            plain[name], values[name] = matrices.swapaxes(1, 2).astype(BF16), matrices
        else:
            value = tiny.MODULES["gpt_oss"].values(name, random.standard_normal(shape)).astype(BF16)
            packed[name] = plain[name] = value
    stored = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    return (
        write(root / "packed", packed, quantization_config=stored),
        write(root / "plain", plain, torch_dtype="bfloat16"),
        values[EXPERTS],
    )


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_mxfp4_is_read_as_what_it_stands_for(checkpoint, dtype):
    packed, plain, values = checkpoint
    model = zoo.load(packed, dtype=dtype)
    weight = model.layers.period[1].mlp.experts.gate_up_proj.weight
    assert weight.dtype == (dtype or jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(weight)[0].astype(np.float32), values)
    assert same(model, zoo.load(plain, dtype=dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_mxfp4_stays_as_it_is_stored(checkpoint, dtype, tmp_path):
    """Experts in MXFP4 are kept, stand for the numbers that are read without the option, and are saved bit by bit."""
    packed, *_ = checkpoint
    floats, kept = (zoo.load(packed, dtype=dtype, quantize=quantize) for quantize in (None, "stored"))
    experts = kept.layers.period[1].mlp.experts.gate_up_proj
    weight = jax.jit(lambda linear: coded(linear, dtype or jnp.bfloat16).read())(experts)
    assert same(weight, floats.layers.period[1].mlp.experts.gate_up_proj.weight)
    assert experts.weight.nbytes * 2 == weight.size and experts.scale.dtype == jnp.uint8
    tokens = jnp.asarray(np.random.RandomState(0).randint(0, 64, (2, 12)))
    # In float32 only the order of sums differs; in bfloat16 these are rounded in other places, too.
    close(forward(kept, tokens), forward(floats, tokens), terms=MODEL if dtype else 8)
    if dtype:
        assert_like_floats(kept, floats)
    zoo.save(on_host(kept), tmp_path)
    ours, theirs = convert.tensors.open_tensors(tmp_path), convert.tensors.open_tensors(packed)
    if dtype is None:
        assert ours.keys() == theirs.keys()
        assert all(ours[name].view().tobytes() == theirs[name].view().tobytes() for name in ours)
    assert same(zoo.load(tmp_path, quantize="stored"), kept)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    split = zoo.load(packed, dtype=dtype, quantize="stored", mesh="fsdp=2,tensor=2,expert=2")
    assert same(split, kept)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_int8_of_mxfp4_as_it_is_read(checkpoint, dtype):
    packed, *_ = checkpoint
    in_int8 = eqx.filter_jit(lambda model: quantize(model, "int8"))
    assert same(zoo.load(packed, dtype=dtype, quantize="int8"), in_int8(zoo.load(packed, dtype=dtype)))


def test_saving_writes_16_bits(checkpoint, tmp_path):
    packed, plain, _ = checkpoint
    zoo.save(on_host(zoo.load(packed)), tmp_path)
    ours, theirs = convert.tensors.open_tensors(tmp_path), convert.tensors.open_tensors(plain)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == BF16 and ours[name].view().tobytes() == theirs[name].view().tobytes()
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert zoo.config(tmp_path) == zoo.config(packed)


def test_mxfp4_is_written(checkpoint, tmp_path):
    """Experts that did not change are written bit by bit; of a changed one nothing but its block changes."""
    packed, *_ = checkpoint
    model = on_host(zoo.load(packed))
    zoo.save(model, tmp_path / "same", mxfp4=True)
    theirs, ours = convert.tensors.open_tensors(packed), convert.tensors.open_tensors(tmp_path / "same")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].view().tobytes() == theirs[name].view().tobytes() for name in ours)
    assert json.loads((tmp_path / "same" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    weight = np.array(model.layers.period[1].mlp.experts.gate_up_proj.weight)  # [layers, experts, out, in]
    weight[0, 2, 5, :32] = np.linspace(-0.55, 0.6, 32)
    changed = eqx.tree_at(lambda m: m.layers.period[1].mlp.experts.gate_up_proj.weight, model, weight)
    zoo.save(changed, tmp_path / "changed", mxfp4=True)
    ours = convert.tensors.open_tensors(tmp_path / "changed")
    blocks, scales = (ours[f"{EXPERTS}_{part}"].view() != theirs[f"{EXPERTS}_{part}"].view() for part in SUFFIXES)
    assert blocks[2, 5, 0].any() and blocks.sum() == blocks[2, 5, 0].sum() and scales.sum() == scales[2, 5, 0]
    assert ours[f"{EXPERTS}_scales"].view()[2, 5, 0] == 127 - 3  # 0.6 / 6 is at most 2**-3
    with pytest.raises(ValueError, match="qwen3 has no layout with MXFP4"):
        zoo.save(zoo.load(tiny.write(tmp_path / "qwen3", "qwen3")), tmp_path / "refused", mxfp4=True)


@pytest.mark.live
def test_transformers_reads_what_is_written(checkpoint, tmp_path):
    """The experts of a fine-tuned model are those that transformers reads from its export in MXFP4."""
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    _, plain, _ = checkpoint
    model = zoo.load(plain, dtype="float32")
    noise = np.random.RandomState(3).standard_normal(model.layers.period[1].mlp.experts.gate_up_proj.weight.shape)
    tuned = eqx.tree_at(lambda m: m.layers.period[1].mlp.experts.gate_up_proj.weight, model, jnp.asarray(0.1 * noise))
    zoo.save(on_host(tuned), tmp_path, mxfp4=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="bfloat16", quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    theirs = loaded.get_parameter(EXPERTS).detach().float().numpy().swapaxes(1, 2)
    ours = np.asarray(zoo.load(tmp_path).layers.period[1].mlp.experts.gate_up_proj.weight)[0]
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)
    assert 0 < np.abs(theirs - 0.1 * noise[0]).max() < 0.1 * np.abs(noise).max() / 5


@pytest.mark.live
def test_transformers_reads_the_same(checkpoint):
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    packed, plain, _ = checkpoint
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        packed, dtype="bfloat16", quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    theirs = loaded.get_parameter(EXPERTS).detach().float().numpy()
    ours = np.asarray(zoo.load(packed).layers.period[1].mlp.experts.gate_up_proj.weight)[0]
    np.testing.assert_array_equal(ours.astype(np.float32).swapaxes(1, 2), theirs)
    theirs = make_golden.logits(plain)
    close(forward(zoo.load(packed, dtype="float32"), TOKENS), theirs, terms=MODEL)


def test_the_norm_rounds_once():
    """In bfloat16 the product with the weight is computed in float32, unlike Llama's."""
    x, weight = np.random.RandomState(0).standard_normal((2, 64)).astype(BF16)
    norm = eqx.tree_at(lambda m: m.weight, Float32RMSNorm(64, 1e-5), jnp.asarray(weight))  # not compiled as one
    x64, weight64 = (np.asarray(a, np.float64) for a in (x, weight))
    exact = x64 / np.sqrt(np.mean(x64**2) + 1e-5) * weight64
    ours = norm(jnp.asarray(x))
    close(ours, exact, terms=3)
    assert np.mean(np.asarray(ours) == exact.astype(BF16)) > 0.9, "a number next to a tie may fall to its other side"


def test_sliding_layers_cache_their_window_alone():
    """At 131,072 positions, 12 layers cache all of them, and 12 cache 128, for 8 heads of 64 numbers."""
    c = zoo.config("gpt-oss-20b")
    model = eqx.filter_eval_shape(lambda: gpt_oss.Model(c, key=jax.random.key(0)))
    _, (sliding, full), _ = jax.eval_shape(lambda: model.init_cache(1, c.max_position_embeddings, jnp.bfloat16))
    assert sliding.k.shape == sliding.v.shape == (12, 1, 128, 8, 64)
    assert full.k.shape == full.v.shape == (12, 1, 131072, 8, 64)


def test_no_rope_scaling_is_this_familys_own():
    """A file without rope_scaling means YaRN, as in transformers."""
    hub = {k: v for k, v in tiny.CONFIGS["gpt_oss"].items() if k not in ("rope_scaling", "initial_context_length")}
    for without in (hub, hub | dict(rope_scaling=None)):
        assert read(gpt_oss.FAMILY, without).rope_scaling == gpt_oss.YARN


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope_scaling", {"rope_type": "default"}),
        ("layer_types", ["full_attention"] * 4),
        ("layer_types", ["full_attention"] * 4 + ["chunked_attention"]),
    ],
)
def test_refused(key, value):
    hub = {k: v for k, v in tiny.CONFIGS["gpt_oss"].items() if k != "initial_context_length"}
    with pytest.raises(ValueError, match=key):
        read(gpt_oss.FAMILY, hub | {key: value})


def test_keys_that_repeat_others_and_differ(caplog):
    """transformers reads neither, so both are skipped with a warning."""
    hub = tiny.CONFIGS["gpt_oss"]
    assert read(gpt_oss.FAMILY, hub | dict(experts_per_token=3, initial_context_length=32)) == read(gpt_oss.FAMILY, hub)
    (record,) = caplog.records
    assert record.getMessage().endswith("experts_per_token, initial_context_length")
