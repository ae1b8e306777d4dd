"""Loading: where the bytes go."""

import resource
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import zoo
from tests.zoo import tiny


CODE = """
import sys, resource, jax, zoo
jax.numpy.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(zoo.load(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """300 MB in two shards, with a largest tensor of 33 MB."""
    size = dict(vocab_size=16384, hidden_size=512, intermediate_size=16384, num_hidden_layers=2, head_dim=128)
    folder = tiny.write(tmp_path_factory.mktemp("large"), "llama-rope3", **size)
    config = tiny.CONFIGS["llama-rope3"] | size
    (folder / "model.safetensors").unlink()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tiny.shapes(config).items()}
    lazy = {name: (array.shape, array.dtype, lambda array=array: array) for name, array in zeros.items()}
    convert.tensors.save_tensors(folder, lazy, shard_bytes=200 * 10**6)
    return folder, sum(array.nbytes for array in zeros.values()), max(array.nbytes for array in zeros.values())


def test_peak_memory(large, pytestconfig):
    """At most the model and its largest tensor."""
    folder, size, largest = large
    assert len(list(folder.glob("*.safetensors"))) == 2 and size > 250e6
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)], capture_output=True, text=True, cwd=pytestconfig.rootpath
    )
    assert int(run.stdout) * 1024 < size + largest, run.stderr


def test_an_aligned_tensor_is_not_copied(large):
    """The array of a tensor that is in no stack is the file's own mapping."""
    folder, *_ = large
    tensor = convert.tensors.open_tensors(folder)["model.embed_tokens.weight"]
    mapped = tensor.view().__array_interface__["data"][0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    array = jax.device_put(tensor.view())
    assert array.unsafe_buffer_pointer() == mapped
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


@pytest.mark.parametrize("padding", [0, 8])
def test_alignment_changes_nothing(tmp_path, padding):
    """Whatever the file's alignment, the bits are the file's, and outlive it."""
    folder = tiny.write(tmp_path / "model", "qwen3")
    tensors = tiny.tensors(tiny.CONFIGS["qwen3"])
    note = {"format": "pt", "note": "x" * padding}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata=note)
    model = zoo.load(folder)
    zoo.save(jax.tree.map(lambda a: a + 1, model), folder)
    assert (np.asarray(model.embed_tokens.weight) == tensors["model.embed_tokens.weight"]).all()
    assert (np.asarray(zoo.load(folder).norm.weight) == tensors["model.norm.weight"] + 1).all()
