"""Weights in the formats of quantising libraries: values by their formulas one by one, bit by bit; models; refusals."""

import dataclasses
import json
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import zoo
from convert.formats import layouts, unpack
from convert.tensors import _Remote, open_tensors, save_tensors
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, forward, on_host, same
from zoo import surgery
from zoo.quantized import QuantizedLinear, coded


BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
F32, F16, I32, I8, U8 = map(np.dtype, (np.float32, np.float16, np.int32, np.int8, np.uint8))
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of each nibble of a word, the lowest first
GROUP = 16


def words(values, bits):
    """Packs unsigned integers along the last axis into 32-bit words, the first one lowest. Pads the last word."""
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % (32 // bits))])
    each = values.astype(np.uint64).reshape(*values.shape[:-1], -1, 32 // bits)
    shifted = each << np.arange(0, 32, bits, dtype=np.uint64)
    return shifted.sum(axis=-1).astype(np.uint32).view(np.int32)


def matrix(shape, value):
    """Returns a float32 matrix, computed one value after the other."""
    out = np.empty(shape, np.float32)
    for o, i in np.ndindex(shape):
        out[o, i] = value(o, i)
    return out


def positive(random, *shape, dtype: Any = F16):
    return np.exp2(random.uniform(-6, -2, shape)).astype(dtype)


def bnb4(kind, *, nested):
    def store(random, shape, size=64):
        n = shape[0] * shape[1]
        blocks = -(-n // size)
        nibbles, table = random.randint(0, 16, n), random.standard_normal(16).astype(F32)
        state = dict(quant_type=kind, blocksize=size, dtype="bfloat16", shape=list(shape))
        pairs = np.append(nibbles, 0)[: 2 * -(-n // 2)].reshape(-1, 2)
        tensors = {"weight": (pairs[:, :1] * 16 + pairs[:, 1:]).astype(U8), "weight.quant_map": table}
        scales = positive(random, blocks, dtype=F32)
        if nested:
            codes, of_code = random.randint(0, 256, blocks).astype(U8), random.standard_normal(256).astype(F32)
            outer, offset = positive(random, -(-blocks // 4), dtype=F32), 0.0625
            scales = np.array([of_code[c] * outer[b // 4] for b, c in enumerate(codes)], F32) + F32.type(offset)
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": of_code}
            state |= dict(nested_blocksize=4, nested_dtype="float32", nested_offset=offset)
        tensors["weight.absmax"] = codes if nested else scales
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), U8)
        value = lambda o, i: table[nibbles[o * shape[1] + i]] * scales[(o * shape[1] + i) // size]
        return tensors, matrix(shape, value)

    return store, dict(quant_method="bitsandbytes", _load_in_4bit=True, load_in_4bit=True, bnb_4bit_quant_type=kind)


def bnb8(random, shape):
    codes, scales = random.randint(-127, 128, shape).astype(I8), positive(random, shape[0], dtype=F32)
    tensors = {"weight": codes, "SCB": scales, "weight_format": np.array(0, U8)}
    return tensors, matrix(shape, lambda o, i: F32.type(codes[o, i]) * scales[o] * F32.type(1 / 127))


def awq(group):
    def store(random, shape):
        size = shape[1] if group == -1 else group
        codes, zeros = random.randint(0, 16, shape[::-1]), random.randint(0, 16, (shape[1] // size, shape[0]))
        scales = positive(random, *zeros.shape)
        pack = lambda a: words(a.reshape(len(a), -1, 8)[..., AWQ_ORDER].reshape(a.shape), 4)
        tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
        value = lambda o, i: F32.type(codes[i, o] - zeros[i // size, o]) * scales[i // size, o]
        return tensors, matrix(shape, value)

    return store, dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="GEMM")


def gptq(bits, version, *, shuffled):
    def store(random, shape):
        groups, rest = divmod(shape[1], GROUP)
        assert not rest
        codes, zeros = (random.randint(0, 2**bits, s) for s in (shape[::-1], (groups, shape[0])))
        of = np.arange(shape[1]) // GROUP
        of = (random.permutation(of) if shuffled else of).astype(I32)
        scales, stored = positive(random, groups, shape[0]), (zeros - (version == 1)) % 2**bits
        tensors = {"qweight": words(codes.T, bits).T, "qzeros": words(stored, bits), "scales": scales, "g_idx": of}
        return tensors, matrix(shape, lambda o, i: F32.type(codes[i, o] - zeros[of[i], o]) * scales[of[i], o])

    form = {1: "gptq", 2: "gptq_v2"}[version]
    return store, dict(quant_method="gptq", bits=bits, group_size=GROUP, desc_act=shuffled, checkpoint_format=form)


def compressed(form, kind, strategy, *, bits=8, zero=False, scale=BF16, activations=None, block=None, size=GROUP):
    dtype = I8 if kind == "int" else E4M3
    height = {"tensor": 0, "channel": 1, "group": 1, "block": block and block[0]}[strategy]
    width = {"group": size, "block": block and block[1]}.get(strategy)

    def store(random, shape):
        high = 2 ** (bits - 1)
        codes = random.randint(-high, high, shape) if kind == "int" else random.uniform(-448, 448, shape)
        codes = codes.astype(dtype)
        rows, columns = height or shape[0], width or shape[1]
        table = -(-shape[0] // rows), -(-shape[1] // columns)
        scales = positive(random, *table, dtype=scale)
        zeros = random.randint(-high, high, table).astype(I8) if zero else np.zeros(table, I8)
        at = lambda a, o, i: F32.type(a[o // rows, i // columns])
        want = matrix(shape, lambda o, i: (F32.type(codes[o, i]) - at(zeros, o, i)) * at(scales, o, i))
        tensors = {"weight_scale": scales.reshape(-1) if strategy == "tensor" else scales}
        if form == "pack-quantized":
            tensors |= {"weight_packed": words(codes.astype(int) + high, bits), "weight_shape": np.array(shape)}
            packed = words(zeros.astype(int).T + high, bits).T
            return tensors | ({"weight_zero_point": packed} if zero else {}), want
        tensors |= {"weight": codes} | ({"weight_zero_point": zeros} if zero else {})
        return tensors | ({"input_scale": np.ones(1, scale)} if activations else {}), want

    weights = dict(num_bits=bits, type=kind, strategy=strategy, symmetric=not zero, dynamic=False)
    weights |= dict(group_size=width if strategy == "group" else None, block_structure=block)
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, output_activations=None)
    config = dict(config_groups={"group_0": group}, format=form, quantization_status="compressed", ignore=["lm_head"])
    return store, config | dict(quant_method="compressed-tensors", kv_cache_scheme=None)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)


def nvfp4(library):
    def store(random, shape):
        codes, of_block = random.randint(0, 16, shape), positive(random, shape[0], shape[1] // 16, dtype=E4M3)
        whole = F32.type(random.uniform(0.1, 1))
        tensors = {"weight_packed": (codes[:, 1::2] << 4 | codes[:, ::2]).astype(U8), "weight_scale": of_block}
        if library == "modelopt":
            scales = of_block.astype(F32) * whole
            tensors |= {"weight": tensors.pop("weight_packed"), "weight_scale_2": np.array(whole)}
            tensors |= {"input_scale": np.ones((), F32), "k_scale": np.ones((), F32)}
        else:
            scales = of_block.astype(F32) / whole
            tensors |= {"weight_global_scale": np.array([whole]), "input_global_scale": np.ones(1, F32)}
        return tensors, matrix(shape, lambda o, i: FP4[codes[o, i]] * scales[o, i // 16])

    if library == "modelopt":
        return store, dict(quant_method="modelopt", quant_algo="NVFP4", kv_cache_scheme={}, ignore=["lm_head"])
    weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False)
    group = dict(targets=["Linear"], weights=weights, input_activations=weights | dict(dynamic="local"))
    config = dict(config_groups={"group_0": group}, format="nvfp4-pack-quantized", quantization_status="compressed")
    return store, config | dict(quant_method="compressed-tensors")


def modelopt_fp8():
    whole, _ = compressed("naive-quantized", "float", "tensor", scale=F32)

    def store(random, shape):
        tensors, want = whole(random, shape)
        return tensors | {"weight_scale": tensors["weight_scale"].reshape(()), "input_scale": np.ones((), F32)}, want

    return store, dict(quant_method="modelopt", quant_algo="FP8")


def static_fp8():
    """Returns Mistral's format: compressed-tensors' format of whole tensors under other names."""
    whole, _ = compressed("naive-quantized", "float", "tensor", scale=BF16)

    def store(random, shape):
        tensors, want = whole(random, shape)
        scales = {"weight_scale_inv": tensors["weight_scale"].reshape(()), "activation_scale": np.ones((), BF16)}
        return {"weight": tensors["weight"]} | scales, want

    return store, dict(quant_method="fp8", activation_scheme="static", weight_block_size=None, dequantize=False)


STATIC = dict(num_bits=8, type="float", strategy="tensor", dynamic=False)
DYNAMIC = dict(num_bits=8, type="int", strategy="token", dynamic=True)
FORMATS = {
    "bitsandbytes nf4": bnb4("nf4", nested=False),
    "bitsandbytes fp4, double": bnb4("fp4", nested=True),
    "bitsandbytes int8": (bnb8, dict(quant_method="bitsandbytes", load_in_8bit=True)),
    "awq": awq(GROUP),
    "awq, whole columns": awq(-1),
    "gptq": gptq(4, 1, shuffled=False),
    "gptq, by importance": gptq(4, 1, shuffled=True),
    "gptq of 8 bits, version 2": gptq(8, 2, shuffled=True),
    "gptq of 2 bits": gptq(2, 1, shuffled=False),
    "fp8, whole": compressed("naive-quantized", "float", "tensor", scale=F32, activations=STATIC),
    "fp8, static": static_fp8(),
    "fp8, rows": compressed("float-quantized", "float", "channel"),
    "fp8, blocks": compressed("float-quantized", "float", "block", block=[24, 32]),
    "int8, rows": compressed("int-quantized", "int", "channel", activations=DYNAMIC),
    "int8, groups with zeros": compressed("naive-quantized", "int", "group", zero=True),
    "packed int8, rows": compressed("pack-quantized", "int", "channel"),
    "packed int4, groups with zeros": compressed("pack-quantized", "int", "group", bits=4, zero=True),
    "packed int4, groups of 64": compressed("pack-quantized", "int", "group", bits=4, size=64),
    "nvfp4": nvfp4("compressed-tensors"),
    "modelopt nvfp4": nvfp4("modelopt"),
    "modelopt fp8": modelopt_fp8(),
}  # fmt: skip
each_format = pytest.mark.parametrize("store, config", FORMATS.values(), ids=FORMATS)


def save(folder, tensors):
    save_tensors(folder, {name: (a.shape, a.dtype, lambda a=a: a) for name, a in tensors.items()})


def bits(array):
    return array.shape, array.dtype, array.tobytes()


@each_format
def test_values(tmp_path, store, config):
    """Values are right for more rows than one block of work, whole and in parts that start within words and blocks."""
    parts, want = store(np.random.RandomState(0), (136, 96))
    norm = np.ones(3, F16)
    save(tmp_path, {f"a.{end}": tensor for end, tensor in parts.items()} | {"norm.weight": norm})
    tensors = unpack(open_tensors(tmp_path), config)
    assert tensors.keys() == {"a.weight", "norm.weight"}
    weight = tensors["a.weight"]
    assert (weight.name, weight.shape, weight.dtype) == ("a.weight", (136, 96), F16)
    for dtype in F32, BF16, F16:
        assert bits(weight.part((), dtype)) == bits(want.astype(dtype))
    for index in ((slice(3, 5), slice(7, 90)), (slice(129, 136),), (slice(0, 136), slice(95, 96))):
        assert bits(weight.part(index, BF16)) == bits(want[index].astype(BF16))


def write(folder, name, config, linears, rest):
    tiny.write(folder, name, torch_dtype="float16", **config)
    save(folder, linears | rest)
    return folder


@pytest.mark.parametrize(
    "name", ["bitsandbytes nf4", "bitsandbytes int8", "awq", "gptq, by importance", "fp8, rows", "packed int8, rows"]
)
def test_a_model(tmp_path, name):
    """A model equals that of the dequantised weights, and saving writes these."""
    store, config = FORMATS[name]
    random, stored, plain, rest = np.random.RandomState(1), {}, {}, {}
    for tensor, value in tiny.tensors("qwen3").items():
        if tensor.endswith("_proj.weight"):
            parts, want = store(random, value.shape)
            stored |= {f"{tensor.removesuffix('weight')}{end}": part for end, part in parts.items()}
            plain[tensor] = want.astype(F16)
        else:
            rest[tensor] = value.astype(F16)
    bias = {"model.layers.0.self_attn.q_proj.bias": np.eye(64, dtype=F16)[3]}
    folder = write(tmp_path / "stored", "qwen3", dict(quantization_config=config), stored, rest | bias)
    with pytest.raises(ValueError, match=r"has 1 tensors that .* has no place for: .*q_proj.bias"):
        zoo.load(folder)
    bias = {name: np.zeros_like(value) for name, value in bias.items()}  # as GPTQ's tools write it
    folder = write(tmp_path / "stored", "qwen3", dict(quantization_config=config), stored, rest | bias)
    want = zoo.load(write(tmp_path / "plain", "qwen3", {}, plain, rest))
    model = zoo.load(folder)
    assert same(model, want) and zoo.inspect(str(folder)) == want.config
    zoo.save(model, tmp_path / "saved")
    assert same(zoo.load(tmp_path / "saved"), want)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_mixed_precision(tmp_path):
    """ModelOpt's float8 and NVFP4 are told apart by the dtypes of their codes."""
    each, tensors, wants = dict(a="modelopt fp8", b="modelopt nvfp4"), {"norm.weight": np.ones(3, F16)}, {}
    for name, format in each.items():
        parts, wants[f"{name}.weight"] = FORMATS[format][0](np.random.RandomState(0), (40, 96))
        tensors |= {f"{name}.{end}": part for end, part in parts.items()}
    save(tmp_path, tensors)
    layers = {name: dict(quant_algo=algorithm) for name, algorithm in dict(a="FP8", b="NVFP4").items()}
    config = dict(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    found = unpack(open_tensors(tmp_path), config)
    assert found.keys() == {*wants, "norm.weight"}
    for name, want in wants.items():
        assert bits(found[name].part((), F32)) == bits(want)


def kept_model(tmp_path, name):
    """Writes a tiny Qwen3 whose linear maps are in a format, of widths that its blocks divide; returns the folder."""
    store, config = FORMATS[name]
    random, stored, changes = np.random.RandomState(1), {}, dict(hidden_size=64, intermediate_size=128)
    for tensor, shape in tiny.MODULES["qwen3"].shapes(tiny.CONFIGS["qwen3"] | changes).items():
        if tensor.endswith("_proj.weight"):
            parts = store(random, shape)[0]
            stored |= {f"{tensor.removesuffix('weight')}{end}": part for end, part in parts.items()}
        else:
            stored[tensor] = random.uniform(0.5, 1, shape).astype(BF16)
    return write(tmp_path, "qwen3", dict(quantization_config=config, **changes), stored, {})


@pytest.mark.parametrize("name", ["nvfp4", "packed int4, groups of 64"])
def test_weights_stay_as_they_are_stored(tmp_path, name):
    """Linear maps keep four bits, which stand for the numbers that are read without the option."""
    folder = kept_model(tmp_path / "stored", name)
    floats, kept = (zoo.load(folder, dtype="float32", quantize=quantize) for quantize in (None, "stored"))
    assert len(dict(surgery.modules(kept, QuantizedLinear))) == 7
    linear, want = kept.layers.period[0].mlp.down_proj, floats.layers.period[0].mlp.down_proj.weight
    assert same(jax.jit(lambda linear: coded(linear, F32).read())(linear), want)
    assert linear.weight.nbytes * 2 == want.size and linear.scale.nbytes == want.size / (4 if "nvfp4" in name else 16)
    if "nvfp4" in name:
        with pytest.raises(ValueError, match=r"q_proj.weight stays in NVFP4, which is read and not written: load the"):
            zoo.save(kept, tmp_path / "saved")
        return
    zoo.save(on_host(zoo.load(folder, quantize="stored")), tmp_path / "saved")
    ours, theirs = open_tensors(tmp_path / "saved"), open_tensors(folder)
    assert all(ours[n].view().tobytes() == theirs[n].view().tobytes() for n in ours if not n.endswith("_shape"))
    assert ours.keys() == theirs.keys() and same(zoo.load(tmp_path / "saved"), zoo.load(folder))


def test_products_with_nvfp4(tmp_path):
    """Logits differ from those of the dequantised weights by the order of sums alone."""
    folder = kept_model(tmp_path, "modelopt nvfp4")
    floats, kept = (zoo.load(folder, dtype="float32", quantize=quantize) for quantize in (None, "stored"))
    close(forward(kept, TOKENS), forward(floats, TOKENS), terms=MODEL)


def test_headers_alone(tmp_path):
    """Headers of a repository on the Hub tell everything except the shapes of bitsandbytes' 4-bit tensors."""
    for name in "awq", "bitsandbytes nf4":
        store, config = FORMATS[name]
        save(tmp_path, {f"a.{end}": part for end, part in store(np.random.RandomState(0), (40, 96))[0].items()})
        opened, file = open_tensors(tmp_path), _Remote(tmp_path / "model.safetensors")
        weight = unpack({n: dataclasses.replace(t, _file=file) for n, t in opened.items()}, config)["a.weight"]
        if name == "awq":
            assert weight.shape == (40, 96)
            continue
        with pytest.raises(ValueError, match=r"a.weight in .*in 4 bits, which states shapes among the data.*load the"):
            assert weight.shape


AWQ, GPTQ, FP8 = FORMATS["awq"][1], FORMATS["gptq"][1], FORMATS["fp8, rows"][1]
GROUPS = FP8["config_groups"]["group_0"]


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(quant_method="hqq"), "the quant_method 'hqq' is not read; those that are: fp8, mxfp4, bitsandbytes, awq"),
        (dict(quant_method="fp8", fmt="e5m2"), "fmt 'e5m2' is not read"),
        (dict(quant_method="fp8"), "weight_block_size None is not read"),
        (dict(load_in_4bit=True, bnb_4bit_quant_type="af4"), "bnb_4bit_quant_type 'af4' is not read; what is: 'nf4'"),
        (AWQ | dict(version="gemv"), "version 'gemv' is not read; what is: 'gemm'"),
        (AWQ | dict(bits=3), "bits 3 is not read"),
        (AWQ | dict(group_size=0), "group_size 0 is no number"),
        (AWQ | dict(backend="llm-awq"), "backend 'llm-awq' is not read"),
        (GPTQ | dict(bits=3), "bits 3 is not read; what is: 2, 4, 8"),
        (GPTQ | dict(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not read"),
        (GPTQ | dict(dynamic={"-:x": {}}), "dynamic .* is not read"),
        (FP8 | dict(format="mxfp6-pack-quantized"), "format 'mxfp6-pack-quantized' is not read"),
        (FP8 | dict(format="nvfp4-pack-quantized"), "type 'float'|num_bits 8 is not read; what is: 4"),
        (dict(quant_method="modelopt", quant_algo="INT4_AWQ"), "quant_algo 'int4_awq' is not read; what is: 'fp8'"),
        (dict(quant_method="modelopt", quant_algo="NVFP4", group_size=32), "group_size 32 is not read; what is: 16"),
        (
            dict(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": dict(quant_algo="X")}),
            "quant_algo 'x' is not read",
        ),
        (FP8 | dict(transform_config={"config_groups": {}}), "transform_config .* is not read"),
        (FP8 | dict(sparsity_config={"format": "sparse-24-bitmask"}), "format 'sparse-24-bitmask' is not read"),
        (FP8 | dict(config_groups={}), "config_groups with 0 ways"),
        (FP8 | dict(config_groups={"a": GROUPS | dict(weights=GROUPS["weights"] | dict(num_bits=4))}), "num_bits 4 is"),
    ],
)
def test_what_is_not_read(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        layouts(config)
    tiny.write(tmp_path, "qwen3", quantization_config=config)
    with pytest.raises(ValueError, match=f"has the quantization_config .*{message}.*Load another"):
        zoo.config(tmp_path)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("awq", dict(qzeros=None), r"a.qweight in .* has no zeros; the checkpoint lacks a.qzeros"),
        ("awq", dict(qweight=None), r"a.qzeros in .* scales nothing|a.scales in .* scales nothing"),
        ("awq", dict(scales=np.ones((3, 40), F16)), r"a.scales in .*float16\[3, 40\].*do not fit"),
        ("gptq", dict(g_idx=np.full(96, 6, I32)), r"a.g_idx in .* names groups that are not from 0 to 5"),
        ("bitsandbytes int8", dict(weight_format=np.array(3, U8)), r"a.weight_format in .* is 3: an order"),
        ("bitsandbytes nf4", {"weight.quant_state.bitsandbytes__nf4": np.zeros(9, U8)}, "does not say a shape"),
        ("int8, rows", dict(weight_scale=np.ones((40, 2), BF16)), r"bfloat16\[40, 2\], do not fit"),
        ("packed int4, groups with zeros", dict(weight_scale=np.ones((40, 1), BF16)), "do not fit"),
    ],
)
def test_damage(tmp_path, name, change, message):
    store, config = FORMATS[name]
    parts = store(np.random.RandomState(0), (40, 96))[0] | change
    save(tmp_path, {f"a.{end}": tensor for end, tensor in parts.items() if tensor is not None})
    with pytest.raises(ValueError, match=message) as caught:
        unpack(open_tensors(tmp_path), config)["a.weight"].part((), F32)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


# ------------------------------------------------------------------------------------------------------ the libraries


def numpy(tensor):
    """Returns a torch tensor as an array, also for dtypes that numpy lacks."""
    import torch

    kinds = {torch.bfloat16: (torch.int16, BF16), torch.float8_e4m3fn: (torch.uint8, E4M3)}
    as_integers, dtype = kinds.get(tensor.dtype, (tensor.dtype, None))
    array = tensor.detach().contiguous().view(as_integers).numpy()
    return array if dtype is None else array.view(dtype)


@pytest.mark.live
@pytest.mark.parametrize("width", [128, 95])  # its function for CPUs is wrong if even rows share blocks
@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 double", "int8"])
def test_bitsandbytes(tmp_path, kind, width):
    """A file that bitsandbytes writes gives the values that its own functions dequantise."""
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight, name = torch.randn(150, width, dtype=torch.bfloat16) * 0.1, kind.split()[0]
    if kind == "int8":
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
        parts, config = {"weight": codes, "SCB": scales}, dict(load_in_8bit=True)
        want = bnb.functional.int8_vectorwise_dequant(codes, scales)
    else:
        codes, state = bnb.functional.quantize_4bit(weight, quant_type=name, compress_statistics="double" in kind)
        parts = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        config, want = dict(load_in_4bit=True, bnb_4bit_quant_type=name), bnb.functional.dequantize_4bit(codes, state)
    save(tmp_path, {f"a.{end}": numpy(t) for end, t in parts.items()} | {"norm.weight": np.ones(3, BF16)})
    ours = unpack(open_tensors(tmp_path), dict(quant_method="bitsandbytes", **config))["a.weight"]
    assert bits(ours.part((), numpy(want).dtype)) == bits(numpy(want))


@pytest.mark.live
@pytest.mark.parametrize(
    "name", [name for name, (_, config) in FORMATS.items() if config["quant_method"] == "compressed-tensors"]
)
def test_compressed_tensors(tmp_path, name):
    """Our files give the values that the library's decompressors make of them."""
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    store, config = FORMATS[name]
    parts, _ = store(np.random.RandomState(2), (144, 192))
    save(tmp_path, {f"a.{end}": part for end, part in parts.items()} | {"norm.weight": np.ones(3, BF16)})
    ours = unpack(open_tensors(tmp_path), config)["a.weight"]
    kinds = {BF16: (np.int16, torch.bfloat16), E4M3: (np.uint8, torch.float8_e4m3fn)}
    state = {}
    for end, part in parts.items():
        plain, dtype = kinds.get(part.dtype, (part.dtype, None))
        tensor = torch.from_numpy(np.ascontiguousarray(part).view(plain))
        state[end] = tensor if dtype is None else tensor.view(dtype)
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    want = compressors.BaseCompressor.get_value_from_registry(config["format"]).decompress(state, scheme)["weight"]
    assert bits(ours.part((), numpy(want).dtype)) == bits(numpy(want))
