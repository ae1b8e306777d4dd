"""GGUF files that the package `gguf` wrote: header, blocks of every type, order of rows, refusals; and writing."""

import pathlib
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest

from convert.gguf import architectures, container, folder, tokens, write
from convert.gguf.container import FLOATS, QUANTISED, Alternating, Heads, Rows, open_file


F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
ROWS, BLOCKS = 300, 3  # rows of a matrix, more than are decoded at a time, and blocks of a row
RANDOM = np.random.RandomState(0)


def made(path, arrays, architecture="llama", **keys):
    """Writes a file by the `gguf` package. An array may be a pair of bytes and the name of their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        key = key.replace("__", ".")
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, array in arrays.items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=gguf.GGMLQuantizationType[array[1]])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind, rows=ROWS):
    """Returns random bytes of a quantised matrix, some of whose scales are infinite or NaN."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return RANDOM.randint(0, 256, (rows, BLOCKS * size), dtype=np.uint8)


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_have_the_bits_of_the_package(tmp_path, kind):
    raw = blocks(kind)
    stored = open_file(made(tmp_path / "a.gguf", {"a": (raw, kind)})).tensors["a"]
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        tensor = Rows(name="a", stored=stored, sizes=stored.shape)
        assert tensor.shape == want.shape and stored.kind == kind
        for rows, columns in ((slice(None), slice(None)), (slice(5, 290), slice(7, 90)), (slice(9, 9), slice(0, 1))):
            for dtype in F32, BF16:
                assert tensor.part((rows, columns), dtype).tobytes() == want[rows, columns].astype(dtype).tobytes()


def test_plain_types_are_the_bytes_of_the_file(tmp_path):
    values = RANDOM.standard_normal((5, 8)).astype(np.float32)
    arrays = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.astype(BF16).view(np.uint8), "BF16")}
    opened = open_file(made(tmp_path / "a.gguf", arrays))
    for name, dtype in FLOATS.items():
        tensor = container.plain(opened.tensors[name], "a.weight", (5, 8), dtype)
        assert tensor.view().tobytes() == values.astype(dtype).tobytes()
    assert opened.dtype == F32  # that of the largest


def test_default_dtype(tmp_path):
    norm, half = np.ones(64, np.float32), np.ones((4, 32), np.float16)
    assert open_file(made(tmp_path / "a.gguf", {"norm": norm, "a": half})).dtype == np.float16
    assert open_file(made(tmp_path / "b.gguf", {"norm": norm, "a": half, "b": (blocks("Q8_0"), "Q8_0")})).dtype == BF16


def test_metadata(tmp_path):
    """All types of metadata, and version 2, are read as the package wrote them."""
    keys = {
        "a__int": 7, "a__float": 1e-5, "a__text": "é\0x", "a__flag": True, "a__texts": ["", "b c"],
        "a__numbers": [1, -2], "a__floats": [0.5, 2.0], "a__flags": [True, False],
    }  # fmt: skip
    path = made(tmp_path / "a.gguf", {"a": np.ones(3, np.float32)}, **keys)
    for version in 3, 2:
        content = bytearray(path.read_bytes())
        content[4:8] = struct.pack("<I", version)
        path.write_bytes(content)
        metadata = open_file(path).metadata
        for key, value in keys.items():
            found = metadata[key.replace("__", ".")]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
    assert metadata["general.architecture"] == "llama"


def test_parts(tmp_path):
    """A split file is read from any of its parts, with the metadata of the first."""
    for n in 1, 2:
        made(tmp_path / f"a-0000{n}-of-00002.gguf", {f"t{n}": np.full(3, n, np.float32)}, first=n)
    for n in 1, 2:
        opened = open_file(tmp_path / f"a-0000{n}-of-00002.gguf")
        assert {name: container.values(t)[0] for name, t in opened.tensors.items()} == {"t1": 1, "t2": 2}
        assert opened.metadata["first"] == 1
    assert folder.only(tmp_path).name == "a-00001-of-00002.gguf"
    (tmp_path / "a-00001-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match=r"one of 2 parts, and a-00001-of-00002.gguf is not beside it"):
        open_file(tmp_path / "a-00002-of-00002.gguf")


def cut(content, at, new):
    return content[:at] + new + content[at + len(new) :]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: b"GGML" + c[4:], r"is no GGUF file: it begins with b'GGML'"),
        (lambda c: c[:20], "it has 20 bytes"),
        (lambda c: cut(c, 4, struct.pack("<I", 1)), "a GGUF file of version 1; versions 2 and 3"),
        (lambda c: cut(c, 4, struct.pack(">I", 3)), "a GGUF file of big-endian machines"),
        (lambda c: c[:200], "is not a whole GGUF file, near byte"),
        (lambda c: c[:-40], "ends before weight does"),
        (lambda c: cut(c, 16, struct.pack("<Q", 2**60)), "is not a whole GGUF file"),
        (lambda c: cut(c, 24, struct.pack("<Q", 2**62)), "bytes are announced, and"),
        (lambda c: c.replace(b"general.name", b"general.type"), "the key general.type appears twice"),
        (lambda c: c.replace(b"x" * 30, b"\xff" * 30), "is not a whole GGUF file"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    path = made(
        tmp_path / "a.gguf", {"weight": np.ones((4, 8), np.float32)}, general__type="model", general__name="x" * 30
    )
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        open_file(path)


def test_types_that_are_not_read_are_named(tmp_path):
    path = made(tmp_path / "a.gguf", {"weight": (blocks("TQ1_0", 2), "TQ1_0")})
    with pytest.raises(
        ValueError, match=r"weight in .* has the type TQ1_0, which is not read; those that are: F32, F16"
    ):
        open_file(path)


def test_several_files_are_named(tmp_path):
    for name in "a.Q8_0.gguf", "b.gguf", "mmproj-a.gguf":
        made(tmp_path / name, {"t": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"has 2 GGUF files; name one of them, as .*: a\.Q8_0\.gguf, b\.gguf"):
        folder.only(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert folder.only(tmp_path) == tmp_path / "a.Q8_0.gguf"
    (tmp_path / "model.safetensors").touch()
    assert folder.only(tmp_path) is None


# ======================================================================================================================
# Llama by hand, as conversion/llama.py of llama.cpp writes it
# ======================================================================================================================

SIZES = {
    "llama__context_length": 64, "llama__embedding_length": 16, "llama__block_count": 1,
    "llama__feed_forward_length": 24, "llama__attention__head_count": 2, "llama__attention__head_count_kv": 1,
    "llama__attention__layer_norm_rms_epsilon": 1e-5, "llama__rope__dimension_count": 8,
}  # fmt: skip


def llama():
    shapes = {
        "token_embd.weight": (10, 16), "output_norm.weight": (16,), "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16), "blk.0.attn_k.weight": (8, 16), "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16), "blk.0.ffn_norm.weight": (16,), "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16), "blk.0.ffn_down.weight": (16, 24),
    }  # fmt: skip
    return {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_rows_of_queries_and_keys(tmp_path):
    """Rows are permuted as the converter does it, by all slices; biases, too."""
    arrays, hub = llama(), RANDOM.standard_normal((16, 16)).astype(np.float32)
    permuted = lambda array: array.reshape(2, 2, 4, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    arrays |= {"blk.0.attn_q.weight": permuted(hub), "blk.0.attn_q.bias": permuted(hub[:, 0])}
    found = architectures.tensors(open_file(made(tmp_path / "a.gguf", arrays, **SIZES)))
    weight, bias = (found[f"model.layers.0.self_attn.q_proj.{name}"] for name in ("weight", "bias"))
    for start in range(16):
        for stop in range(start, 17):
            index = (slice(start, stop),)
            np.testing.assert_array_equal(weight.part(index, F32), hub[index])
            np.testing.assert_array_equal(bias.part(index, F32), hub[index][:, 0])
    down = found["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(down.view(), arrays["blk.0.ffn_down.weight"])


def test_rows_in_turn(tmp_path):
    """gpt-oss's rows of gate and up in turn, swapped: all slices, as its converter cuts them. A part alone is named."""
    hub, bias = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((3, 5, 8), (3, 8)))
    stored = {"weight": hub.swapaxes(1, 2), "bias": bias}
    arrays = {
        f"blk.0.ffn_{name}_exps.{key}": np.ascontiguousarray(array[:, n::2])
        for n, name in enumerate(("gate", "up"))
        for key, array in stored.items()
    }
    opened = open_file(made(tmp_path / "a.gguf", arrays))
    parts = lambda key: tuple(
        Rows(name="a", stored=(one := opened.tensors[f"blk.0.ffn_{name}_exps.{key}"]), sizes=one.shape)
        for name in ("gate", "up")
    )
    weights, biases = (Alternating(name="a", parts=parts(key)) for key in ("weight", "bias"))
    assert weights.shape == hub.shape and biases.shape == bias.shape
    for start in range(8):
        for stop in range(start, 9):
            index = (slice(1, 3), slice(2, 4), slice(start, stop))
            np.testing.assert_array_equal(weights.part(index, F32), hub[index])
            np.testing.assert_array_equal(biases.part(index[::2], F32), bias[index[::2]])
    kind = next(each for each in architectures.ARCHITECTURES if each.name == "gpt-oss")
    lone = container.Opened(opened.path, {}, {name: t for name, t in opened.tensors.items() if "up" not in name})
    with pytest.raises(
        ValueError, match=r"lacks blk\.0\.ffn_up_exps\.weight, without which .*gate_up_proj is not whole"
    ):
        architectures._together(kind, lone)


def test_rows_by_head(tmp_path):
    """DeepSeek's map to keys and values: all slices of the two tensors into which its converter splits it."""
    hub = RANDOM.standard_normal((3 * (4 + 2), 5)).astype(np.float32)  # heads of 4 keys and 2 values
    heads = hub.reshape(3, 6, 5)
    arrays = {"k": np.ascontiguousarray(heads[:, :4].swapaxes(1, 2)), "v": np.ascontiguousarray(heads[:, 4:])}
    found = open_file(made(tmp_path / "a.gguf", arrays)).tensors
    swapped, plain = (Rows(name="a", stored=found[name], sizes=found[name].shape) for name in "kv")
    whole = Heads(name="a", swapped=swapped, plain=plain)
    assert whole.shape == hub.shape and whole.nbytes == hub.nbytes
    for start in range(18):
        for stop in range(start, 19):
            index = (slice(start, stop), slice(1, 4))
            np.testing.assert_array_equal(whole.part(index, F32), hub[index])


def test_config(tmp_path):
    opened = open_file(made(tmp_path / "a.gguf", llama(), tokenizer__ggml__eos_token_id=3, **SIZES))
    assert architectures.config_json(architectures.described(opened)) == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 10,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "eos_token_id": 3, "torch_dtype": "float32",
    }  # fmt: skip


def test_divisors_of_no_llama_3(tmp_path):
    """Divisors of frequencies that no parameters of Llama 3 give are read as LongRoPE's."""
    arrays = llama() | {"rope_freqs.weight": np.float32([1, 2, 3, 7])}
    opened = open_file(made(tmp_path / "a.gguf", arrays, **SIZES))
    assert architectures.config_json(architectures.described(opened))["rope_scaling"] == {
        "rope_type": "longrope", "short_factor": [1, 2, 3, 7], "long_factor": [1, 2, 3, 7], "factor": 1.0,
        "attention_factor": 1.0, "original_max_position_embeddings": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    "keys, arrays, message",
    [
        (dict(llama__attention__clamp_kqv=8.0), {}, r"says llama\.attention\.clamp_kqv=8\.0, which is not implemented"),
        (dict(llama__attention__value_length=4), {}, r"attention\.value_length=4, .*; what is read: 8"),
        (dict(llama__rope__scaling__type="longrope"), {}, r"rope\.scaling\.type='longrope', which is not implemented"),
        (dict(llama__attention__causal=False), {}, r"attention\.causal=False, which is not implemented"),
        (dict(llama__block_count=2**31), {}, r"llama\.block_count=2147483648, but has only 11 tensors"),
        ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, r"has 3 divisors, where heads have 8 features"),
        (dict(llama__vocab_size=11), {}, r"vocab_size=11, .*; what is read: 10"),
        (
            {},
            {"blk.0.attn_sinks.weight": np.ones(2, np.float32)},
            r"the tensor blk\.0\.attn_sinks\.weight, which llama",
        ),
        ({}, {"cls.weight": np.ones(2, np.float32)}, r"the tensor cls\.weight, which llama does not have"),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path, keys, arrays, message):
    opened = open_file(made(tmp_path / "a.gguf", llama() | arrays, **SIZES | keys))
    with pytest.raises(ValueError, match=message):
        architectures.tensors(opened)


def test_architectures_are_named(tmp_path):
    opened = open_file(made(tmp_path / "a.gguf", llama(), architecture="falcon"))
    with pytest.raises(ValueError, match="has the architecture 'falcon'; read are deepseek2, gemma, gemma2"):
        architectures.of(opened)
    missing = open_file(made(tmp_path / "b.gguf", {"t": np.ones(3, np.float32)}, llama__block_count=1))
    with pytest.raises(ValueError, match=r"lacks llama\.embedding_length"):
        architectures.config_json(architectures.described(missing))


# ======================================================================================================================
# Tokenizers
# ======================================================================================================================


def described(**keys):
    return container.Opened(
        pathlib.Path("a.gguf"),
        {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"general.architecture": "llama"},
        {},
    )


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(model="bert", tokens=[]), r"tokenizer\.ggml\.model='bert'; read are gpt2 and llama"),
        (dict(model="gpt2", tokens=["a"], pre="default", merges=[]), r"pre='default', whose regular expression is not"),
        (dict(model="gpt2", tokens=["a"], token_type=[1, 1], pre="qwen2"), "has 1 tokens and 2 token_types"),
        (dict(model="gpt2", tokens=["a"], pre="gpt-2", merges=["a b"]), "the merge 'a b', whose result is no token"),
        (
            dict(model="gpt2", tokens=["a"], pre="gpt-2", merges=[], bos_token_id=5, add_bos_token=True),
            "bos_token_id=5, which is",
        ),
        (
            dict(model="gpt2", tokens=["a"], pre="tekken", merges=[]),
            r"lacks tokenizer\.ggml\.bos_token_id, which its texts have",
        ),
        (dict(model="llama", tokens=["a"], scores=[0, 0], bos_token_id=0), "has 1 tokens and 2 scores"),
        (dict(model="llama", bos_token_id=0), r"lacks tokenizer\.ggml\.tokens"),
    ],
)
def test_tokenizers_that_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        tokens.tokenizer_json(described(**keys))


def test_merges_follow_from_scores():
    pieces = {"a": -9.0, "b": -9.0, "ab": -1.0, "aab": -2.0, "aa": -2.0}
    assert tokens.merges_of(pieces) == [("a", "b"), ("aa", "b"), ("a", "ab"), ("a", "a")]


# ======================================================================================================================
# Writing
# ======================================================================================================================


def test_types_of_matrices(tmp_path):
    """Matrices are in the type asked for, by the package's own quantisation; vectors and routers are in F32."""
    values = {
        "token_embd.weight": RANDOM.standard_normal((6, 64)), "blk.0.ffn_up.weight": RANDOM.standard_normal((7, 96)),
        "blk.0.ffn_down.weight": RANDOM.standard_normal((7, 40)), "blk.0.attn_norm.weight": RANDOM.standard_normal(40),
        "blk.0.ffn_gate_inp.weight": RANDOM.standard_normal((4, 64)),
    }  # fmt: skip
    values = {name: array.astype(np.float32) for name, array in values.items()}
    wanted = {
        "f32": ["F32"] * 5, "f16": ["F16", "F16", "F16", "F32", "F32"], "bf16": ["BF16", "BF16", "BF16", "F32", "F32"],
        "q8_0": ["Q8_0", "Q8_0", "F16", "F32", "F32"], "q4_0": ["Q8_0", "Q4_0", "F16", "F32", "F32"],
    }  # fmt: skip
    for kind, kinds in wanted.items():
        path, count = tmp_path / f"{kind}.gguf", []
        every = [(name, array.shape, lambda rows, array=array: array[rows]) for name, array in values.items()]
        write.write_file(path, {"general.architecture": "llama", "n": 3}, every, kind, count.append)
        assert sum(count) == sum(array.size for array in values.values())
        reader = gguf.GGUFReader(path)
        assert [tensor.tensor_type.name for tensor in reader.tensors] == kinds
        for tensor in reader.tensors:
            with_type = gguf.quants.quantize(values[tensor.name], tensor.tensor_type)
            assert tensor.data.tobytes() == with_type.tobytes(), tensor.name
        assert reader.fields["n"].contents() == 3
        assert [path.name for path in tmp_path.glob("*unfinished*")] == []


def test_a_failed_file_leaves_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "PIECE", 8)
    path = tmp_path / "a.gguf"
    path.write_text("old")
    values = np.full((4, 32), 1e6, np.float32)
    every = [("blk.0.ffn_up.weight", values.shape, lambda rows: values[rows])]
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight has values that float16 cannot hold.*--type bf16"):
        write.write_file(path, {"general.architecture": "llama"}, every, "f16")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    write.write_file(path, {"general.architecture": "llama"}, every, "bf16")
    assert (container.values(open_file(path).tensors["blk.0.ffn_up.weight"]) == values.astype(BF16).astype(F32)).all()
