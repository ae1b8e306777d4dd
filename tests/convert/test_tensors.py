"""Folders of safetensors: every dtype, damaged and mismatched files, interrupted writing, memory and descriptors."""

import concurrent.futures
import gc
import hashlib
import json
import os
import pathlib
import random
import resource
import signal
import struct
import subprocess
import sys
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert.files import MANIFEST
from convert.tensors import DTYPES, open_tensors, save_tensors, verify_files


ROOT = pathlib.Path(__file__).parents[2]
BF16 = np.dtype(ml_dtypes.bfloat16)


def bits(array):
    return array.shape, array.dtype, array.tobytes()


def noise(shape, dtype, seed=0):
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


def lazily(arrays):
    return {name: (array.shape, array.dtype, lambda array=array: array) for name, array in arrays.items()}


def content(folder):
    """Returns the tensors that are loaded from a folder, as bits."""
    return {name: bits(tensor.view()) for name, tensor in open_tensors(folder).items()}


def export(seed, layers=6):
    """Returns a small checkpoint with 256 bytes a layer; its content identifies the seed."""
    return {f"layers.{i}.weight": noise((8, 8), np.dtype(np.float32), seed * 100 + i) for i in range(layers)}


ARRAYS = {"a.weight": noise((4, 6), np.dtype(np.float32)), "a.bias": noise((6,), BF16), "b.weight": noise((2, 3), BF16)}


def single(folder):
    save_file(ARRAYS, folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(folder, weight_map=None, **extra):
    """Writes two shards with the library, a.* in the first and b.* in the second."""
    a = {name: array for name, array in ARRAYS.items() if name.startswith("a.")}
    save_file(a, folder / "model-00001-of-00002.safetensors")
    save_file({"b.weight": ARRAYS["b.weight"], **extra}, folder / "model-00002-of-00002.safetensors")
    if weight_map is None:
        weight_map = {name: f"model-0000{1 if name in a else 2}-of-00002.safetensors" for name in ARRAYS}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_there_and_back(tmp_path, code):
    dtype = DTYPES[code]
    arrays = {"matrix": noise((3, 5), dtype), "scalar": noise((), dtype), "empty": noise((0, 4), dtype)}
    save_tensors(tmp_path / "ours", lazily(arrays))
    (tmp_path / "theirs").mkdir()
    save_file(arrays, tmp_path / "theirs" / "model.safetensors")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        tensors = open_tensors(folder)
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            out = np.empty(array.shape, dtype)
            tensors[name].read_into(out)
            assert bits(out) == bits(tensors[name].view()) == bits(array)
            assert tensors[name].nbytes == array.nbytes
    with safe_open(tmp_path / "ours" / "model.safetensors", "np") as file:
        assert {name: file.get_slice(name).get_dtype() for name in arrays} == dict.fromkeys(arrays, code)


def test_shards_as_the_hub_writes_them(tmp_path):
    weight_map = sharded(tmp_path)
    save_file({"never": np.zeros(3)}, tmp_path / "consolidated.safetensors")
    assert content(tmp_path) == {name: bits(array) for name, array in ARRAYS.items()}
    assert {name: tensor.file for name, tensor in open_tensors(tmp_path).items()} == {
        name: tmp_path / file for name, file in weight_map.items()
    }


def test_a_snapshot_of_links_into_the_hub_cache(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    sharded(blobs)
    for i, path in enumerate(list(blobs.iterdir())):
        path.rename(blobs / f"{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert content(snapshot) == {name: bits(array) for name, array in ARRAYS.items()}


def test_the_single_file_wins_as_in_transformers(tmp_path):
    sharded(tmp_path)
    save_file({"only": np.arange(3)}, tmp_path / "model.safetensors")
    assert open_tensors(tmp_path).keys() == {"only"}


def test_views_are_the_file(tmp_path):
    save_tensors(tmp_path, lazily({"x": noise((64, 64), np.dtype(np.float32)), "y": noise((64, 64), BF16)}))
    for tensor in open_tensors(tmp_path).values():
        view = tensor.view()
        assert not view.flags.writeable and not view.flags.owndata
        assert jax.device_put(view, jax.devices("cpu")[0]).unsafe_buffer_pointer() == view.ctypes.data


def test_views_that_a_foreign_file_does_not_align(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8 + 1)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2))
    view = open_tensors(tmp_path)["x"].view()
    assert not view.flags.aligned
    np.testing.assert_array_equal(jax.device_put(view), [1.5, -2])


def test_parts_are_the_file_until_they_are_cast(tmp_path):
    arrays = {"x": noise((5, 6), BF16), "scalar": noise((), BF16)}
    save_tensors(tmp_path, lazily(arrays))
    tensors = open_tensors(tmp_path)
    for index in ((), (slice(1, 4),), (slice(None), slice(2, 6)), (slice(0, 5, 2), slice(3))):
        part = tensors["x"].part(index, BF16)
        assert bits(part) == bits(arrays["x"][index])
        assert np.shares_memory(part, tensors["x"].view())
        cast = tensors["x"].part(index, np.dtype(np.float32))
        assert bits(cast) == bits(arrays["x"][index].astype(np.float32)) and cast.flags.writeable
    for dtype in (BF16, np.dtype(np.float32)):
        scalar = tensors["scalar"].part((), dtype)
        assert isinstance(scalar, np.ndarray) and bits(scalar) == bits(arrays["scalar"].astype(dtype))


@pytest.mark.parametrize("start, stop", [(0, 4), (0, 1), (1, 3), (3, 4), (4, 4), (0, 0)])
def test_read_into_reads_rows(tmp_path, start, stop):
    single(tmp_path)
    out = np.empty((stop - start, 6), np.float32)
    open_tensors(tmp_path)["a.weight"].read_into(out, start)
    assert bits(out) == bits(ARRAYS["a.weight"][start:stop])


def test_read_into_of_a_scalar_has_one_row(tmp_path):
    save_tensors(tmp_path, lazily({"x": noise((), BF16), "y": noise((), BF16, 1)}))
    x, out = open_tensors(tmp_path)["x"], np.empty((), BF16)
    x.read_into(out, 0)
    assert bits(out) == bits(noise((), BF16))
    for wrong, start in ((out, 1), (np.empty(1, BF16), 0)):
        with pytest.raises(ValueError, match=rf"x in .* is bfloat16\[\]; it needs .* from row {start} on"):
            x.read_into(wrong, start)


@pytest.mark.parametrize("rows, start", [(5, 0), (2, 3), (0, 5), (1, -1)])
def test_read_into_refuses_rows_that_are_not_there(tmp_path, rows, start):
    path = single(tmp_path)
    with pytest.raises(ValueError, match=rf"a\.weight in {path} .* float32\[{rows}, 6\] from row {start} on"):
        open_tensors(tmp_path)["a.weight"].read_into(np.empty((rows, 6), np.float32), start)


@pytest.mark.parametrize(
    "out",
    [
        np.empty((6, 4), np.float32),
        np.empty((4, 6), np.float16),
        np.empty((4, 6), np.int32),
        np.empty((6, 4), np.float32).T,
        np.frombuffer(bytes(96), np.float32).reshape(4, 6),
    ],
    ids=["shape", "size", "dtype", "order", "read-only"],
)
def test_read_into_refuses_other_arrays(tmp_path, out):
    path = single(tmp_path)
    with pytest.raises(ValueError, match=rf"a\.weight in {path} is float32\[4, 6\]; it needs a writeable C-contiguous"):
        open_tensors(tmp_path)["a.weight"].read_into(out)


def test_read_into_goes_on_after_short_reads(tmp_path, monkeypatch):
    single(tmp_path)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    out = np.empty((4, 6), np.float32)
    open_tensors(tmp_path)["a.weight"].read_into(out)
    assert bits(out) == bits(ARRAYS["a.weight"])


def test_read_into_a_file_cut_short_after_opening(tmp_path):
    path = single(tmp_path)
    tensor = max(open_tensors(tmp_path).values(), key=lambda tensor: tensor.offset)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match=f"{path} ends before {tensor.name} does"):
        tensor.read_into(np.empty(tensor.shape, tensor.dtype))


def test_errors_of_the_system_name_the_file(tmp_path, monkeypatch):
    path = single(tmp_path)
    tensor = open_tensors(tmp_path)["a.weight"]

    def preadv(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        tensor.read_into(np.empty((4, 6), np.float32))


def test_many_threads_read_one_file(tmp_path):
    arrays = {f"{i}": noise((1000 + i,), np.dtype(np.float32), i) for i in range(64)}
    save_tensors(tmp_path, lazily(arrays))
    tensors = open_tensors(tmp_path)

    def read(name):
        out = np.empty(tensors[name].shape, np.float32)
        tensors[name].read_into(out)
        return bits(out) == bits(arrays[name]) == bits(tensors[name].view())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, list(arrays) * 8))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in Linux's /proc")
def test_descriptors_are_shared_and_closed(tmp_path):
    save_tensors(tmp_path, lazily(export(0)), shard_bytes=600)
    count = lambda: len(os.listdir("/proc/self/fd"))
    gc.collect()  # files that other tests left open
    before = count()
    tensors = open_tensors(tmp_path)
    assert count() == before + 3
    view = tensors["layers.0.weight"].view()
    del tensors
    assert count() == before + 1
    assert bits(view) == bits(export(0)["layers.0.weight"])
    del view
    assert count() == before


PEAK = """
import resource, sys
import numpy as np
from convert.tensors import open_tensors

tensor = open_tensors(sys.argv[1])["x"]
out = np.ones(tensor.shape, tensor.dtype)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensor.read_into(out)
print(out.sum(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_read_into_takes_no_memory_of_its_own(tmp_path):
    save_tensors(tmp_path, lazily({"x": np.full(2**24, 2, np.float32)}))
    command = [sys.executable, "-c", PEAK, tmp_path]
    total, grown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert float(total) == 2**25
    assert int(grown) < 4 * 2**10, f"{grown} KiB beyond the array's own 64 MiB"


# ------------------------------------------------------------------------------------------------------------ bad input


def truncated(folder):
    path = single(folder)
    os.truncate(path, path.stat().st_size - 1)


def longer(folder):
    with single(folder).open("ab") as file:
        file.write(b"more")


def headed(folder, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def claimed(folder, size):
    single(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", size))


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def lacking(folder):
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def damaged_shard(folder):
    sharded(folder)
    os.truncate(folder / "model-00002-of-00002.safetensors", 20)


def pointing(folder, file):
    sharded(folder, {"a.weight": "model-00001-of-00002.safetensors", "b.weight": file})


def unlisted(folder):
    sharded(folder, {name: file for name, file in sharded(folder).items() if name != "a.bias"})


def unheld(folder):
    sharded(folder, {**sharded(folder), "c.weight": "model-00002-of-00002.safetensors"})


def misplaced(folder):
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    sharded(folder, {"a.weight": first, "a.bias": second, "b.weight": second})


def indexed(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)


def pickled(folder):
    for name in ("pytorch_model-00002-of-00002.bin", "pytorch_model-00001-of-00002.bin", "config.json"):
        (folder / name).touch()


MODEL, INDEX = "model.safetensors", r"model\.safetensors\.index\.json"
SECOND = "model-00002-of-00002.safetensors"
BAD = {
    "no folder": (lambda folder: folder.rmdir(), "There is no folder .*"),
    "nothing": (lambda folder: None, f"neither {MODEL} nor {INDEX}"),
    "pickles": (
        pickled,
        r"only pytorch_model-00001-of-00002\.bin: pickle files can run code .* convert the repository",
    ),
    "empty file": (lambda folder: (folder / MODEL).touch(), f"{MODEL} is not a whole safetensors file"),
    "a folder for a file": (lambda folder: (folder / MODEL).mkdir(), MODEL),
    "truncated": (truncated, f"{MODEL} is not a whole safetensors file"),
    "longer": (longer, f"{MODEL} is not a whole safetensors file"),
    "header not JSON": (lambda folder: headed(folder, b"{oops"), f"{MODEL} is not a whole safetensors file"),
    "header not UTF-8": (lambda folder: headed(folder, b'{"\xff":1}'), f"{MODEL} is not a whole safetensors file"),
    "header beyond the file": (lambda folder: claimed(folder, 10**6), f"{MODEL} is not a whole safetensors file"),
    "header of a million tensors": (
        lambda folder: claimed(folder, 10**8),
        f"{MODEL} is not a whole .*far too many tensors",
    ),
    "header of 2**63 bytes": (
        lambda folder: claimed(folder, 2**63),
        f"{MODEL} is not a whole .*9,223,372,036,854,775,808",
    ),
    "a pipe": (lambda folder: os.mkfifo(folder / MODEL), f"{MODEL} is no regular file"),
    "a device": (lambda folder: (folder / MODEL).symlink_to("/dev/zero"), f"{MODEL} is no regular file"),
    "a pipe for an index": (
        lambda folder: os.mkfifo(folder / "model.safetensors.index.json"),
        f"{INDEX} is no regular file",
    ),
    "overlap": (
        lambda folder: headed(folder, {"x": entry(), "y": entry(start=4, end=12)}, bytes(12)),
        f"{MODEL} is not a whole safetensors file .*y",
    ),
    "hole": (
        lambda folder: headed(folder, {"x": entry(), "y": entry(start=9, end=17)}, bytes(17)),
        f"{MODEL} is not a whole safetensors file .*y",
    ),
    "shape and bytes disagree": (
        lambda folder: headed(folder, {"x": entry(shape=(3,))}, bytes(8)),
        f"{MODEL} is not a whole safetensors file",
    ),
    "overflowing shape": (
        lambda folder: headed(folder, {"x": entry(shape=(2**32, 2**32))}, bytes(8)),
        f"{MODEL} is not a whole safetensors file",
    ),
    "huge empty shape": (
        lambda folder: headed(folder, {"x": entry(shape=(0, 2**62), end=0)}),
        rf"x in .*{MODEL} has the shape \[0, {2**62}\]",
    ),
    "70 axes": (
        lambda folder: headed(folder, {"x": entry(shape=(1,) * 70, end=4)}, bytes(4)),
        rf"x in .*{MODEL} has the shape \[1, 1,",
    ),
    "dtype of half a byte": (
        lambda folder: headed(folder, {"x": entry(dtype="F4", end=1)}, bytes(1)),
        f"x in .*{MODEL} has the dtype F4",
    ),
    "made-up dtype": (lambda folder: headed(folder, {"x": entry(dtype="F33")}, bytes(8)), f"{MODEL} is not a whole"),
    "absent shard": (lacking, f"{INDEX} names {SECOND}, which is not there"),
    "damaged shard": (damaged_shard, f"{SECOND} is not a whole safetensors file"),
    "index to the folder above": (
        lambda folder: pointing(folder, f"../{SECOND}"),
        rf"{INDEX} puts b\.weight in '\.\./{SECOND}', which is no",
    ),
    "index to the root": (lambda folder: pointing(folder, f"/{SECOND}"), rf"{INDEX} puts b\.weight in '/{SECOND}'"),
    "index with a drive": (lambda folder: pointing(folder, "C:\\x.safetensors"), rf"{INDEX} puts b\.weight in 'C:"),
    "index to a pickle": (lambda folder: pointing(folder, "b.bin"), rf"{INDEX} puts b\.weight in 'b\.bin'"),
    "index to a pattern": (lambda folder: pointing(folder, "*.safetensors"), rf"{INDEX} puts b\.weight in '\*"),
    "index to a NUL": (lambda folder: pointing(folder, "\0.safetensors"), rf"{INDEX} puts b\.weight in"),
    "index to a number": (lambda folder: pointing(folder, 3), rf"{INDEX} puts b\.weight in 3"),
    "index to a very long name": (lambda folder: pointing(folder, "b" * 999 + ".safetensors"), "bbb.*safetensors"),
    "tensor the index lacks": (unlisted, rf"model-00001-of-00002\.safetensors holds a\.bias, which .*{INDEX} does not"),
    "tensor no shard holds": (unheld, rf"{INDEX} puts c\.weight in {SECOND}, which does not hold it"),
    "tensor in another shard": (misplaced, rf"{INDEX} puts a\.bias in {SECOND}, which does not hold it"),
    "tensor in two shards": (
        lambda folder: sharded(folder, **{"a.bias": np.zeros(6)}),
        rf"a\.bias is both in .*model-00001-of-00002\.safetensors and in .*{SECOND}",
    ),
    "index not JSON": (lambda folder: indexed(folder, '{\n "weight_map": {,}}'), f"{INDEX}, line 2: "),
    "index a list": (lambda folder: indexed(folder, "[]"), f"{INDEX} holds a list"),
    "index without a map": (lambda folder: indexed(folder, '{"metadata": {}}'), f"{INDEX} has no weight_map"),
    "index with a list": (lambda folder: indexed(folder, '{"weight_map": ["a"]}'), f"{INDEX} has no weight_map"),
    "index empty": (lambda folder: indexed(folder, '{"weight_map": {}}'), f"{INDEX} has no weight_map"),
    "index with a tensor twice": (
        lambda folder: indexed(folder, '{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}'),
        f"{INDEX}: the key 'a' appears twice",
    ),
}


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        open_tensors(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mutated_headers_and_indexes(tmp_path):
    """After any change of the bytes, tensors that open lie within their file, and refused files are named."""
    sharded(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    random_ = random.Random(0)
    refused = 0
    for _ in range(600):
        path, raw = random_.choice(list(files.items()))
        header = len(raw) if path.suffix == ".json" else 8 + int.from_bytes(raw[:8], "little")
        mutated = bytearray(raw)
        kind = random_.choice(["flip", "flip", "length", "cut", "drop", "insert", "swap"])
        at = random_.randrange(header)
        if kind == "flip":
            for _ in range(random_.randint(1, 3)):
                mutated[random_.randrange(header)] ^= 1 << random_.randrange(8)
        elif kind == "length":
            mutated[random_.randrange(8)] = random_.randrange(256)
        elif kind == "cut":
            del mutated[random_.randrange(len(raw)) :]
        elif kind == "drop":
            del mutated[at : at + random_.randint(1, 8)]
        elif kind == "insert":
            mutated[at:at] = random_.randbytes(random_.randint(1, 8))
        else:
            other = random_.randrange(header)
            mutated[at], mutated[other] = mutated[other], mutated[at]
        path.unlink()
        path.write_bytes(mutated)
        try:
            for tensor in open_tensors(tmp_path).values():
                tensor.view().tobytes()
                tensor.read_into(np.empty(tensor.shape, tensor.dtype))
                assert tensor.offset + tensor.nbytes <= tensor.file.stat().st_size
        except (ValueError, OSError) as error:
            refused += 1
            assert path.name in str(error) or "model.safetensors.index.json" in str(error)
        path.unlink()
        path.write_bytes(raw)
    assert refused > 500


# -------------------------------------------------------------------------------------------------------------- writing


def test_one_file_as_transformers_writes_it(tmp_path):
    arrays = export(1)
    save_tensors(tmp_path / "new" / "folder", lazily(arrays))
    path = tmp_path / "new" / "folder" / "model.safetensors"
    assert sorted(os.listdir(path.parent)) == [path.name, MANIFEST]
    assert json.loads((path.parent / MANIFEST).read_text()) == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert {name: bits(array) for name, array in load_file(path).items()} == {n: bits(a) for n, a in arrays.items()}
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(open_tensors(path.parent)) == list(arrays)


def test_shards_and_index_as_the_hub_has_them(tmp_path):
    save_tensors(tmp_path, lazily(export(1)), shard_bytes=600)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == [*shards, "model.safetensors.index.json", MANIFEST]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 6 * 256},
        "weight_map": {f"layers.{i}.weight": shards[i // 2] for i in range(6)},
    }
    assert content(tmp_path) == {name: bits(array) for name, array in export(1).items()}


def test_views_that_are_not_contiguous_are_written_in_order(tmp_path):
    arrays = {"x": noise((3, 4, 5), BF16).transpose(2, 0, 1)[::2], "y": noise((4, 6), BF16)[:, 1]}
    save_tensors(tmp_path, lazily(arrays))
    assert content(tmp_path) == {name: bits(array) for name, array in arrays.items()}


def test_jax_arrays(tmp_path):
    array = jax.numpy.arange(6, dtype="bfloat16").reshape(2, 3)
    save_tensors(tmp_path, {"x": (array.shape, array.dtype, lambda: array)})
    assert content(tmp_path) == {"x": bits(np.asarray(array))}


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    made = []

    def make(i):
        assert all(array() is None for array in made)
        array = np.full(100, i, np.float32)
        made.append(weakref.ref(array))
        return array

    save_tensors(tmp_path, {f"{i}": ((100,), np.dtype(np.float32), lambda i=i: make(i)) for i in range(9)})
    assert len(made) == 9


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({}, "no tensors to write to .*out"),
        ({"x": ((1,), np.dtype(np.complex128), lambda: np.zeros(1, np.complex128))}, "x is complex128, which"),
        (
            {"x": ((2,), np.dtype(np.float32), lambda: np.zeros(3, np.float32))},
            r"x was .* float32\[2\], but is float32\[3\]",
        ),
        (
            {"x": ((2,), BF16, lambda: np.zeros(2, np.float32))},
            r"x was announced as bfloat16\[2\], but is float32\[2\]",
        ),
    ],
    ids=["nothing", "dtype", "other shape", "other dtype"],
)
def test_what_cannot_be_written(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        save_tensors(tmp_path / "out", tensors)
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


class Killed(BaseException):
    """Raised in place of a killed process: after the first one, nothing changes the disk."""


SIZES = {"one file": 10**9, "two shards": 800, "three shards": 600}
# To the same names, to other names, and from shards to a single file that would be loaded in their place, or back.
CHANGES = [
    ("one file", "one file"), ("one file", "three shards"), ("three shards", "one file"),
    ("three shards", "three shards"), ("three shards", "two shards"),
]  # fmt: skip


@pytest.mark.parametrize("old, new", CHANGES)
@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_stopped_at_any_step_the_folder_holds_one_export(tmp_path, monkeypatch, old, new, links):
    before = {name: bits(array) for name, array in export(1).items()}
    after = {name: bits(array) for name, array in export(2, layers=5).items()}
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    seen = []
    for steps in range(1000):
        folder = tmp_path / f"{steps}"
        save_tensors(folder, lazily(export(1)), shard_bytes=SIZES[old])
        (folder / "config.json").touch()
        left = steps

        def counted(function):
            def call(*args, **kwargs):
                nonlocal left
                if function is os.link and not links:
                    raise PermissionError("no hard links here")
                if left <= 0:
                    raise Killed
                left -= 1
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((os, "link"), (os, "rename"), (os, "replace"), (os, "fsync"), (pathlib.Path, "unlink")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                save_tensors(folder, lazily(export(2, layers=5)), shard_bytes=SIZES[new])
                finished = True
            except Killed:
                finished = False
        try:
            seen.append(content(folder))
            verify_files(folder)
        except FileNotFoundError as error:  # renamed files wait for their index, and only they exist
            assert not links and "which is not there" in str(error)
        assert seen[-1] in (before, after)
        save_tensors(folder, lazily(export(2, layers=5)), shard_bytes=SIZES[new])
        assert content(folder) == after
        assert not [name for name in os.listdir(folder) if name.startswith("saving-")]
        assert (folder / "config.json").exists()
        if finished:
            break
    assert seen == sorted(seen, key=lambda loaded: loaded == after), "went back to the earlier export"
    assert seen[0] == before and seen[-1] == after


def test_files_of_other_exports_are_told_apart(tmp_path):
    """Files of another export are noticed: one that would replace shards, a shard of the same shapes, a flipped bit."""
    folder, older = tmp_path / "folder", tmp_path / "older"
    save_tensors(folder, lazily(export(1)), shard_bytes=600)
    save_tensors(older, lazily(export(2)), shard_bytes=600)
    verify_files(folder)
    shard = "model-00002-of-00003.safetensors"
    mine = (folder / shard).read_bytes()
    (folder / shard).write_bytes((older / shard).read_bytes())
    for share in (slice(None), slice(1, None, 2)):  # the files of a sole process, and of the second of two
        with pytest.raises(ValueError, match=f"{folder / shard} is not what was written .* or load with"):
            verify_files(folder, share)
    verify_files(folder, slice(0, None, 2))
    (folder / shard).write_bytes(mine[:-1] + bytes([mine[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{folder / shard} is not what was written"):
        verify_files(folder)
    (folder / shard).write_bytes(mine)
    single(folder)
    with pytest.raises(ValueError, match=f"{folder}/model.safetensors would be loaded, but is of another export than"):
        verify_files(folder)
    (folder / MANIFEST).unlink()
    verify_files(folder)


def test_an_error_while_a_tensor_is_made_leaves_nothing_behind(tmp_path):
    save_tensors(tmp_path, lazily(export(1)), shard_bytes=600)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def make():
        raise RuntimeError("the device is gone")

    tensors = {**lazily(export(2)), "z": ((4,), np.dtype(np.float32), make)}
    with pytest.raises(RuntimeError, match="the device is gone"):
        save_tensors(tmp_path, tensors, shard_bytes=600)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_full_disk_leaves_the_earlier_export(tmp_path):
    save_tensors(tmp_path, lazily(export(1)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/saving-.*-model\.safetensors'"):
            save_tensors(tmp_path, lazily({"x": np.zeros(2**20, np.float32)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", MANIFEST]
    assert content(tmp_path) == {name: bits(array) for name, array in export(1).items()}


STUCK = """
import signal, sys
import numpy as np
from convert.tensors import save_tensors

def stuck():
    print("half way", flush=True)
    signal.pause()

f32 = np.dtype(np.float32)
tensors = {"x": ((99,), f32, lambda: np.zeros(99, f32)), "y": ((99,), f32, stuck)}
save_tensors(sys.argv[1], tensors, shard_bytes=396)
"""


def test_a_kill_half_way(tmp_path):
    save_tensors(tmp_path, lazily(export(1)), shard_bytes=800)
    with subprocess.Popen([sys.executable, "-c", STUCK, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"half way\n"
        child.send_signal(signal.SIGKILL)
    assert len([name for name in os.listdir(tmp_path) if name.startswith("saving-")]) == 2
    assert content(tmp_path) == {name: bits(array) for name, array in export(1).items()}
    save_tensors(tmp_path, lazily(export(2)))
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", MANIFEST]


@pytest.mark.parametrize("shard_bytes", [600, 10**9], ids=["shards", "one file"])
def test_a_model_mapped_from_the_folder_it_is_written_to(tmp_path, shard_bytes):
    save_tensors(tmp_path, lazily(export(1)), shard_bytes=shard_bytes)
    tensors = open_tensors(tmp_path)
    views = {name: tensor.view() for name, tensor in tensors.items()}
    doubled = {name: (view.shape, view.dtype, lambda view=view: view[::-1]) for name, view in views.items()}
    save_tensors(tmp_path, doubled, shard_bytes=shard_bytes)
    assert content(tmp_path) == {name: bits(array[::-1]) for name, array in export(1).items()}
    assert {name: bits(view) for name, view in views.items()} == {n: bits(a) for n, a in export(1).items()}
    out = np.empty((8, 8), np.float32)
    tensors["layers.5.weight"].read_into(out)
    assert bits(out) == bits(export(1)["layers.5.weight"])


def test_files_of_others_stay(tmp_path):
    others = ["config.json", "consolidated.safetensors", "adapter_model.safetensors", "model.onnx", "pytorch_model.bin"]
    for name in others:
        (tmp_path / name).write_text(name)
    save_tensors(tmp_path, lazily(export(1)), shard_bytes=600)
    save_tensors(tmp_path, lazily(export(1)))
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "model.safetensors", MANIFEST])
    assert all((tmp_path / name).read_text() == name for name in others)
