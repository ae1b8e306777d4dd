"""Loading onto a mesh of two processes: each reads, and ever holds, about its half, and the values equal the file's."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

import convert.tensors
from tests.zoo import tiny


CHILD = """
import json, os, pathlib, re, sys
import jax, numpy as np
import zoo
from convert.tensors import Tensor
from train.base import cluster
from zoo.mesh import make_mesh

folder, mesh, options, processes, process, coordinator = sys.argv[1:]
if int(processes) > 1:
    os.environ |= {"JAX_COORDINATOR_ADDRESS": coordinator, "NNODES": processes, "NODE_RANK": process}
    cluster.initialize()
mesh, options = make_mesh(mesh), json.loads(options)
jax.numpy.zeros(1).block_until_ready()

count = 0  # of the bytes that are read, by either of the two ways there are
class Mapping(np.ndarray):
    def __getitem__(self, index):
        global count
        part = np.asarray(self)[index]
        count += part.nbytes
        return part
view, read_into = Tensor.view, Tensor.read_into
def counted(self, out, start=0):
    global count
    count += out.nbytes
    read_into(self, out, start)
Tensor.view, Tensor.read_into = lambda self, **own: view(self, **own).view(Mapping), counted

peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use
before = peak()
model = jax.block_until_ready(zoo.load(folder, mesh=mesh, **options))
found = {"bytes": count, "peak": peak() - before}

for ours, whole in zip(*map(jax.tree.leaves, (model, zoo.load(folder, **options))), strict=True):
    assert ours.dtype == whole.dtype and ours.shape == whole.shape
    for shard in ours.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.asarray(whole)[shard.index].tobytes()
found["values"] = True
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes 150 MB of noise, in several files."""
    folder, size = tmp_path_factory.mktemp("checkpoint"), dict(vocab_size=8192, hidden_size=512, num_hidden_layers=3)
    size |= dict(intermediate_size=5120, head_dim=128)
    tiny.write(folder, "llama-rope3", **size)
    (folder / "model.safetensors").unlink()
    shapes = tiny.MODULES[tiny.FAMILIES["llama-rope3"]].shapes(tiny.CONFIGS["llama-rope3"] | size)
    make = lambda n, shape: np.random.default_rng(n).standard_normal(shape, np.float32)
    lazy = {
        name: (tuple(shape), np.dtype(np.float32), lambda n=n, shape=shape: make(n, shape))
        for n, (name, shape) in enumerate(shapes.items())
    }
    convert.tensors.save_tensors(folder, lazy, shard_bytes=50 * 10**6)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def load(root, folder, mesh, processes, **options):
    """Returns each process's counts from a run on two devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}"}
    arguments = [str(folder), mesh, json.dumps(options), str(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments, str(n), address],
            cwd=root, env=os.environ | flags, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for n in range(processes)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n".join(texts)
    return [json.loads(text.split("FOUND ")[1]) for text in texts]


@pytest.mark.thorough
def test_each_process_reads_and_holds_its_half(checkpoint, pytestconfig):
    (whole,) = load(pytestconfig.rootpath, checkpoint, "fsdp=2", 1)
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert 0.95 * size < whole["bytes"] < size and whole["peak"] > 0.8 * size
    for half in load(pytestconfig.rootpath, checkpoint, "fsdp=2", 2):
        assert half["bytes"] < 0.55 * whole["bytes"] and half["peak"] < 0.6 * whole["peak"]


@pytest.mark.thorough
def test_int8(checkpoint, pytestconfig):
    """Scales need whole rows, so that maps with split rows are read whole; the kept part is still a half."""
    (whole,) = load(pytestconfig.rootpath, checkpoint, "tensor=2", 1, quantize="int8")
    for half in load(pytestconfig.rootpath, checkpoint, "tensor=2", 2, quantize="int8"):
        assert half["bytes"] < 0.75 * whole["bytes"] and half["peak"] < 0.75 * whole["peak"]
