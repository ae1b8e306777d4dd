"""Loading: memory, mapping and alignment; and checkpoints that are opened once."""

import dataclasses
import json
import resource
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import pytest
import safetensors.numpy

import convert.files
import convert.hub
import convert.tensors
import zoo
from tests.zoo import tiny
from tests.zoo.programs import same
from zoo.quantized import quantize
from zoo.source import Source
from zoo.weights import reading


CODE = """
import ctypes, gc, json, pathlib, re, sys
import jax, zoo

status = lambda key: 1024 * int(re.search(rf"{key}:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
jax.numpy.zeros(1).block_until_ready()
for folder, options in map(json.loads, sys.argv[1:]):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use
    before = status("VmRSS")
    model = jax.block_until_ready(zoo.load(folder, **options))
    print(before, status("VmHWM") - before, sum(array.nbytes for array in jax.tree.leaves(model)))
    del model
"""


def write_large(folder, name, **size):
    """Writes ones in shards of 60 MB. Returns the folder, the size of all tensors, and that of the largest."""
    tiny.write(folder, name, **size)
    (folder / "model.safetensors").unlink()
    shapes = tiny.MODULES[tiny.FAMILIES[name]].shapes(tiny.CONFIGS[name] | size)
    f32 = np.dtype(np.float32)
    lazy = {name: (tuple(shape), f32, lambda shape=shape: np.ones(shape, f32)) for name, shape in shapes.items()}
    convert.tensors.save_tensors(folder, lazy, shard_bytes=60 * 10**6)
    assert len(list(folder.glob("*.safetensors"))) > 2
    sizes = [tensor.nbytes for tensor in convert.tensors.open_tensors(folder).values()]
    return folder, sum(sizes), max(sizes)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Writes 170 MB, with a largest tensor of 33 MB."""
    size = dict(vocab_size=16384, hidden_size=512, intermediate_size=16384, num_hidden_layers=1, head_dim=128)
    return write_large(tmp_path_factory.mktemp("large"), "llama-rope3", **size)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Writes 200 MB, nearly all of it in 72 matrices of experts."""
    size = dict(vocab_size=1024, hidden_size=512, intermediate_size=1280, num_hidden_layers=3, head_dim=128)
    return write_large(tmp_path_factory.mktemp("mixture"), "mixtral", **size, num_local_experts=8)


@pytest.mark.thorough
def test_peak_memory(large, mixture, pytestconfig):
    """The peak rises by a bounded amount while a model is loaded, one after another in a process of their own."""
    runs = (large[0], {}), (mixture[0], {}), (mixture[0], {"dtype": "bfloat16"}), (mixture[0], {"quantize": "int8"})
    command = [sys.executable, "-c", CODE, *(json.dumps([str(folder), options]) for folder, options in runs)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=pytestconfig.rootpath)
    assert run.returncode == 0, run.stderr
    before, peaks, loaded = zip(*(map(int, line.split()) for line in run.stdout.splitlines()), strict=True)
    assert max(before) < min(before) + 2e7, "what an earlier one has left would hide some of the next"
    # At most the model and its largest tensor.
    _, size, largest = large
    assert size > 150e6 and peaks[0] < size + largest
    # Each expert is a tensor of its own, and all of one kind become one array.
    _, size, _ = mixture
    assert loaded[1] == size > 150e6 and peaks[1] < 1.1 * size
    # If the dtypes of reading and keeping differ, the tensors that were read are freed.
    assert loaded[2] == size / 2 and peaks[2] < 0.7 * size
    # In 8 bits the peak is a quarter of the weights, plus the work of a few threads.
    assert 0.25 * size < loaded[3] < 0.3 * size and peaks[3] < 0.4 * size


def test_an_aligned_tensor_is_not_copied(large):
    """The array of a tensor outside of stacks is the file's own mapping."""
    folder, *_ = large
    tensor = convert.tensors.open_tensors(folder)["model.embed_tokens.weight"]
    mapped = tensor.view().__array_interface__["data"][0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    array = jax.device_put(tensor.view())
    assert array.unsafe_buffer_pointer() == mapped
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


def test_mmap(tmp_path):
    """The embedding is the file itself, so that writing into the file changes it, unless it is copied."""
    zoo.save(zoo.load(tiny.write(tmp_path / "model", "qwen3-tied")), tmp_path / "saved")
    mapped, copied = zoo.load(tmp_path / "saved"), zoo.load(tmp_path / "saved", mmap=False)
    before = np.array(copied.embed_tokens.weight)
    offset = convert.tensors.open_tensors(tmp_path / "saved")["model.embed_tokens.weight"].offset
    with (tmp_path / "saved" / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(7).tobytes())
    assert (np.asarray(copied.embed_tokens.weight) == before).all() and mapped.embed_tokens.weight[0, 0] == 7


def test_pieces(tmp_path):
    """A tensor of more than 32 MiB is read in pieces, and one of more than 256 KiB is quantised in pieces. They make up
    the whole, like tensors below.
    """
    size = dict(vocab_size=17 * 2**13, hidden_size=64, intermediate_size=2048, num_hidden_layers=1)
    folder = tiny.write(tmp_path, "qwen3-tied", **size)
    shapes = tiny.MODULES["qwen3"].shapes(tiny.CONFIGS["qwen3-tied"] | size)
    tensors = tiny.filled(shapes, np.random.RandomState(0))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    large, small = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
    assert tensors[large].nbytes > reading.PIECE > tensors[small].nbytes > reading.QUANTIZED_PIECE
    plain = zoo.load(folder)
    for model in (plain, zoo.load(folder, mmap=False), zoo.load(folder, dtype="bfloat16")):
        dtype = model.embed_tokens.weight.dtype
        assert np.array_equal(model.embed_tokens.weight, tensors[large].astype(dtype))
        assert np.array_equal(model.layers[0].mlp.up_proj.weight, tensors[small].astype(dtype))
    assert same(zoo.load(folder, quantize="int8"), eqx.filter_jit(quantize)(plain, "int8"))


@pytest.mark.thorough
@pytest.mark.parametrize("padding", [0, 8])
def test_alignment_changes_nothing(tmp_path, padding):
    """Whatever the file's alignment, the bits are the file's, and outlive it."""
    folder = tiny.write(tmp_path / "model", "qwen3")
    tensors = tiny.tensors("qwen3")
    note = {"format": "pt", "note": "x" * padding}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata=note)
    model = zoo.load(folder)
    zoo.save(jax.tree.map(lambda a: a + 1, model), folder)
    assert (np.asarray(model.embed_tokens.weight) == tensors["model.embed_tokens.weight"]).all()
    assert (np.asarray(zoo.load(folder).norm.weight) == tensors["model.norm.weight"] + 1).all()


@pytest.fixture
def calls(monkeypatch):
    """Lists calls that find a checkpoint or read its config.json."""
    found = []

    def listed(module, name):
        real = getattr(module, name)

        def call(path, *arguments, **options):
            found.append((name, path.name))
            return real(path, *arguments, **options)

        monkeypatch.setattr(module, name, call)

    listed(convert.hub, "folder")
    listed(convert.files, "read_json")
    return found


def test_a_checkpoint_is_opened_once(tmp_path, calls):
    """Everything of a `Source` is that of its name, and it is found, and its config.json read, once."""
    folder = tiny.write(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(folder)
    named = zoo.load(folder)
    once = [("folder", "model"), ("read_json", "config.json")]
    assert calls == once
    calls.clear()
    source = Source.open(folder)
    model, tokenizer = zoo.load(source), zoo.tokenizer(source)
    assert zoo.config(source) is source.config is zoo.inspect(source) is model.config
    assert calls == once
    assert model.config == named.config and tokenizer.folder == folder
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(named), strict=True))
    assert zoo.fingerprint(source) == zoo.fingerprint(folder)


@pytest.mark.parametrize("ask", [zoo.load, zoo.config, zoo.tokenizer])
def test_the_embedded_model_has_no_revisions(ask):
    with pytest.raises(ValueError, match="tiny comes with this package, and has no revision 'v1'; leave it out"):
        ask("tiny", revision="v1")


def test_a_source_is_of_one_revision(tmp_path):
    source = Source.open(tiny.write(tmp_path / "model", "qwen3"))
    with pytest.raises(ValueError, match=r"model was opened before: name its revision 'v1' in Source\.open"):
        zoo.load(source, revision="v1")


def test_a_source_without_weights(monkeypatch, tmp_path):
    """A name of a tokenizer opens, and only its weights are refused; its config.json is not read."""
    tiny.write_tokenizer(tmp_path)
    monkeypatch.setattr(convert.hub, "folder", lambda source, revision, **_: tmp_path)
    source = Source.open("gpt3-175b")
    assert zoo.tokenizer(source).folder == source.folder == tmp_path
    with pytest.raises(ValueError, match="weights of gpt3-175b were never published"):
        assert source.weights
    with pytest.raises(OSError, match=r"config\.json"):
        assert source.config


@pytest.mark.thorough
def test_random_weights(tmp_path):
    """By config, by folder and on a mesh the weights are the same, in the dtype that is asked for."""
    config = dataclasses.replace(zoo.config("llama3.2-1b"), vocab_size=64, hidden_size=32, intermediate_size=48,
                                 num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    key = jax.random.key(0)
    model = zoo.init(config, key=key, dtype="bfloat16")
    assert model.config == config and {a.dtype for a in jax.tree.leaves(model)} == {np.dtype("bfloat16")}
    zoo.save(model, tmp_path)
    again = zoo.init(tmp_path, key=key, dtype="bfloat16", mesh="fsdp=4,tensor=2")
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), model, again))
    assert len(again.layers[0].mlp.up_proj.weight.sharding.device_set) == 8
    with pytest.raises(ValueError, match="dtype='int8' is none of float32, bfloat16 and float16"):
        zoo.init(config, key=key, dtype="int8")
    with pytest.raises(ValueError, match="llama has no part 'vision'"):
        zoo.init(config, key=key, parts=("vision",))
