"""Shared parts of the benchmarks: contestants that take turns, weights for all of them, and the report. For Linux."""

import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self


# Contestants inherit these. Without the first, torch's threads spin between operations and take time from other
# processes, so that even a slightly busy machine slows torch down several times as much as JAX.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a first call must compile

RESULTS = pathlib.Path(__file__).parent / "results"

# 33.6 million parameters.
REFERENCE: dict[str, Any] = dict(
    model_type="qwen3", vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_600M: dict[str, Any] = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
    tie_word_embeddings=True,
)  # fmt: skip
SMOLLM2_135M: dict[str, Any] = dict(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)  # fmt: skip


class Contestant:
    """A fresh process on the CPU that runs `build(*args)`, and then calls the resulting function when it has a turn.

    `ready` is the number of seconds from the start of the process until it had that function, imports included.
    """

    def __init__(self, build: Callable[..., Callable[[], Any]], *args: Any):
        os.environ["JAX_PLATFORMS"] = "cpu"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, args))
        begin = time.perf_counter()
        self._process.start()
        theirs.close()
        self._receive()
        self.ready = time.perf_counter() - begin

    def turn(self, calls: int = 1) -> dict[str, Any]:
        """Makes the process call its function `calls` times, and waits.

        Returns "wall" and "cpu", the mean seconds of a call (the latter summed over all threads), "outputs", a list of
        the calls' results, and "peak", the process's peak resident memory so far, in bytes.
        """
        self._pipe.send(calls)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("A contestant failed; what it printed is above.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, build: Callable[..., Callable[[], Any]], args: tuple[Any, ...]) -> None:
    call = build(*args)
    pipe.send(None)
    with contextlib.suppress(EOFError):  # the other end has been closed
        while True:
            calls = pipe.recv()
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = [call() for _ in range(calls)]
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            pipe.send({"wall": wall / calls, "cpu": cpu / calls, "outputs": outputs, "peak": memory("VmHWM")})


def alternate(turns: Mapping[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Returns each contestant's turns of all rounds. Every other round is in reverse order, so nobody always goes
    first.
    """
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    for n in range(rounds):
        for name in list(turns)[:: -1 if n % 2 else 1]:
            taken[name].append(turns[name]())
    return taken


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Returns the ratio of each round, so that slow changes in the machine's speed do not matter."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def memory(field: str) -> int:
    """Returns bytes of this process: "VmRSS", resident; "RssAnon", that without files; "VmHWM", the peak of VmRSS."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def import_transformers() -> Any:
    """Imports transformers without our package `kernels`, which it would take for another, importing JAX as well."""
    sys.modules["kernels"] = None  # type: ignore[assignment]  # treated as not installed
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_checkpoint(folder: str, config: Mapping[str, Any], *, dtype: str = "float32", shard: str = "50GB") -> None:
    """Writes a model with random weights in the Hub's layout, by transformers."""
    import torch

    transformers = import_transformers()
    torch.manual_seed(0)
    hub = transformers.AutoConfig.for_model(**config)
    sees = "vision_config" in config
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = auto.from_config(hub, dtype=getattr(torch, dtype))
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # the projection of images' features is zeros when it is new
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder, max_shard_size=shard)


def report(
    name: str, device: str, settings: Mapping[str, Any], results: Mapping[str, Mapping[str, list[float]]]
) -> None:
    """Prints a table, and writes it with the circumstances to results/<name>-<device>-<date>.json.

    `results` has the values of all rounds: results[contestant][quantity and unit].
    """
    import rich.box
    import rich.console
    import rich.table

    number = lambda x: f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"
    spread = lambda v: f" \\[{number(min(v))}..{number(max(v))}]" if len(v) > 1 else ""
    cell = lambda v: number(statistics.median(v)) + spread(v) if v else ""
    quantities = dict.fromkeys(quantity for values in results.values() for quantity in values)
    cells = {who: [cell(values.get(quantity, [])) for quantity in quantities] for who, values in results.items()}
    across, down = list(results), dict(zip(quantities, zip(*cells.values(), strict=True), strict=True))
    if len(across) > len(down):  # many contestants: one per line
        across, down = list(quantities), cells
    table = rich.table.Table("median \\[min..max]", *across, title=f"{name}, {device}", box=rich.box.SIMPLE)
    for each, values in down.items():
        table.add_row(each, *values)
    rich.console.Console(width=120).print(table)

    summary = lambda v: {"median": statistics.median(v), "min": min(v), "max": max(v), "rounds": len(v)}
    record = {
        "settings": settings,
        "results": {who: {quantity: summary(v) for quantity, v in values.items()} for who, values in results.items()},
        "device": device,
    } | circumstances(("jax", "jaxlib", "equinox", "optax", "torch", "transformers", "grain", "datasets", "tokenizers"))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device}-{datetime.date.today()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"Written to {path}.")


def circumstances(packages: Iterable[str]) -> dict[str, Any]:
    """Returns the conditions of a result: the machine, its load, the commit, and the versions of packages."""
    commit, versions = "", {"python": platform.python_version()}
    with contextlib.suppress(FileNotFoundError):  # git may be missing
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "processor": cpuinfo.split("model name")[1].split("\n")[0].strip("\t :") if "model name" in cpuinfo else "",
        "cores": len(os.sched_getaffinity(0)),
        "load average": os.getloadavg(),  # a contestant counts as 1 or more; a load above the cores' number interfered
        "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
        "commit": commit,
        "versions": versions,
    }
