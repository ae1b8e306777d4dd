"""Time to load a checkpoint: zoo.load, transformers' from_pretrained, and a plain read of the same bytes.

    python -m benchmarks.load --help

Every load is the first one of a fresh process, whose imports are not counted. The files are in the system's cache.
"""

import concurrent.futures
import functools
import itertools
import json
import mmap
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from benchmarks.common import Contestant, alternate, import_transformers, memory, ratios, report, write_checkpoint


THREADS = min(8, os.cpu_count() or 1)  # as in zoo.load
PIECE = 2**24  # bytes of one read


def measure(load: Callable[[], Any], arrays: Callable[[Any], Iterable[np.ndarray]]) -> dict[str, float]:
    """Loads, and then reads one byte of every page, because memory-mapped pages are read only on access."""
    resident, private = memory("VmRSS"), memory("RssAnon")
    begin = time.perf_counter()
    loaded = load()
    result = {"load, s": time.perf_counter() - begin, "peak of the load, MB": (memory("VmHWM") - resident) / 1e6}
    for array in arrays(loaded):
        array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max()
    return result | {
        "load and touch, s": time.perf_counter() - begin,
        "peak of both, MB": (memory("VmHWM") - resident) / 1e6,
        "kept, not of a file, MB": (memory("RssAnon") - private) / 1e6,
    }


def zoo_load(folder: str, quantize: Literal["int8"] | None = None) -> Callable[[], dict[str, float]]:
    import jax

    import zoo

    jax.devices()  # starts the backend, which is not part of loading
    return lambda: measure(
        lambda: jax.block_until_ready(zoo.load(folder, quantize=quantize)),
        lambda m: map(np.asarray, jax.tree.leaves(m)),
    )


def transformers_load(folder: str) -> Callable[[], dict[str, float]]:
    import torch

    (name,) = json.loads((pathlib.Path(folder) / "config.json").read_text())["architectures"]
    model = getattr(import_transformers(), name)  # importing it takes an access by name
    return lambda: measure(
        lambda: model.from_pretrained(folder, dtype="auto"),
        lambda model: (parameter.detach().view(torch.uint8).numpy() for parameter in model.parameters()),
    )


def plain_read(folder: str, threads: int) -> Callable[[], dict[str, float]]:
    def piece(path: pathlib.Path, buffer: np.ndarray, offset: int) -> None:
        part = buffer[offset : offset + PIECE]
        with path.open("rb", buffering=0) as file:
            if os.preadv(file.fileno(), [part.data], offset) != len(part):
                raise OSError(f"{path} was not read whole.")

    def load() -> list[np.ndarray]:
        files = list(pathlib.Path(folder).glob("*.safetensors"))
        buffers = [np.empty(path.stat().st_size, np.uint8) for path in files]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            pieces = [(p, b, at) for p, b in zip(files, buffers, strict=True) for at in range(0, len(b), PIECE)]
            list(pool.map(piece, *zip(*pieces, strict=True)))
        return buffers

    return lambda: measure(load, iter)


# Width and depth determine the size: a layer's parameters, and those of embedding and head.
LLAMA = dict(
    model_type="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, tie_word_embeddings=False,
)  # fmt: skip
MIXTRAL = LLAMA | dict(model_type="mixtral", intermediate_size=3584, num_local_experts=8, num_experts_per_tok=2)


def main(
    gigabytes: float = 1.4,
    model: Literal["llama", "mixtral"] = "llama",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    sharded: bool = False,
    int8: bool = False,
    rounds: int = 5,
) -> None:
    """Measures load time and memory of a checkpoint with random weights.

    Args:
        gigabytes: the checkpoint's size, roughly: layers are added to a model of a fixed width.
        model: a dense model, or a mixture of 8 experts, each of whose matrices is a tensor of its own.
        dtype: dtype of the weights.
        sharded: split into files of at most 0.3 GB, with an index.
        int8: also load with quantize="int8".
        rounds: loads by each contestant.
    """
    config = dict(LLAMA if model == "llama" else MIXTRAL)
    mlps = 8 if model == "mixtral" else 1
    ends, layer = 2 * 32000 * 2048, 2048 * (2 * 2048 + 2 * 512 + 3 * mlps * int(config["intermediate_size"]))
    parameters = gigabytes * 1e9 / (2 if dtype == "bfloat16" else 4)
    config["num_hidden_layers"] = max(1, round((parameters - ends) / layer))

    reader = f"read, {THREADS} threads"
    builds = {
        "zoo": zoo_load,
        **({"zoo, int8": functools.partial(zoo_load, quantize="int8")} if int8 else {}),
        "transformers": transformers_load,
        reader: functools.partial(plain_read, threads=THREADS),
        "read, 1 thread": functools.partial(plain_read, threads=1),
    }

    def turn(build: Callable) -> dict[str, float]:
        # The host of a virtual machine reclaims free memory, by amounts that differ from turn to turn: the same load
        # took 0.5 s or 5 s. So as much memory as a load needs is touched and freed right before each.
        np.full(2 * size, 1, np.uint8)
        with Contestant(build, folder) as contestant:
            return contestant.turn()["outputs"][0]

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config, dtype=dtype, shard="300MB" if sharded else "50GB")
        files = list(pathlib.Path(folder).glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        # The alignment of the tensors in each file. JAX can use the mapped file directly only at multiples of 64 bytes.
        starts = [(8 + int(np.fromfile(path, "<u8", 1)[0])) % 64 for path in files]
        taken = alternate({name: functools.partial(turn, build) for name, build in builds.items()}, rounds)
    results = {name: {key: [t[key] for t in turns] for key in turns[0]} for name, turns in taken.items()}
    for values in results.values():
        for key, other in itertools.product(("load", "load and touch"), ("transformers", reader)):
            values[f"{key} / {other}"] = ratios(values[f"{key}, s"], results[other][f"{key}, s"])
    settings = {"config": config, "dtype": dtype, "bytes": size, "start modulo 64": starts, "rounds": rounds}
    report("load" if model == "llama" else f"load-{model}", "cpu", settings | {"threads": THREADS}, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
