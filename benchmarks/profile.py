"""Time of our training steps on this machine's GPU, kernel by kernel.

    python -m benchmarks.profile --help

It takes three steps under JAX's profiler and adds up the events on the device. A kernel's name tells its kind. Kernels
whose names differ only in a number, such as XLA's fusions, share a row. The profiler itself slows steps down a little.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu import Failed, Worker, device, folder, matches, prepare, report
from benchmarks.train import EXPERTS, LORA, MIDDLE, SMALL, Arithmetic, Model


STEPS = 3
LEAST = 0.002  # of the kernels' time: kernels below this count only in the sum of their kind
PATIENCE = 400  # seconds for one model, mostly for compiling
MODELS = (MIDDLE, EXPERTS, LORA, SMALL)

# Kinds of kernels, by the first pattern that matches the name. cuBLAS calls its kernels nvjet, cutlass or xmma.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa|dkv|^dq",
    "grouped products": r"ragged|matrices|grouped|sums_of_products",
    "products": r"gemm|cublas|cutlass|nvjet|xmma|cudnn.*matmul|^dot|dot_fusion|ynn_|products",
    "collectives": r"nccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|permute_",
    "scatters": r"scatter",
    "sorts": r"sort|top_?k",
    "copies": r"memcpy|memset|copy|transpose|slice|concatenate|broadcast|pad|iota",
    "reductions": r"reduce",
    "elementwise": r"fusion|loop_|input_|wrapped|convert|add|multiply|select|exponential",
}


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    start: float  # ns
    duration: float  # ns


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def of_one_thread(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Yields each event's name, and its time without the events nested in it, such as those of a loop's body."""
    open_: list[list[Any]] = []  # [event, nanoseconds of the events within it]
    for event in (*sorted(events, key=lambda event: (event.start, -event.duration)), Event("", float("inf"), 0)):
        while open_ and open_[-1][0].start + open_[-1][0].duration <= event.start:
            done, within = open_.pop()
            yield done.name, done.duration - within
        if open_:
            open_[-1][1] += event.duration
        open_.append([event, 0.0])


def device_events(trace: pathlib.Path) -> Iterator[list[Event]]:
    """Yields the events of each stream of a GPU in the profiler's file, or of each CPU thread that ran parts of
    programs.

    Raises:
        FileNotFoundError: if the profiler has written none.
    """
    from jax.profiler import ProfileData

    files = sorted(trace.glob("**/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"The profiler has left no *.xplane.pb in {trace}.")
    planes = list(ProfileData.from_file(str(files[-1])).planes)
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in on_gpu or planes:
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue  # such lines repeat the streams' events, by module or by operation
            events = [e for e in line.events if on_gpu or any(name == "hlo_op" for name, _ in e.stats)]
            yield [Event(event.name, event.start_ns, event.duration_ns) for event in events]


def summed(lines: Iterable[list[Event]], steps: int) -> list[dict[str, Any]]:
    """Returns the kernels, the longest first: "kernel", "kind", "calls" and "ms" of a step, and "share" of all time."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for line in lines:
        for name, ns in of_one_thread(line):
            times[re.sub(r"([._]\d+)+", "", name)].append(ns / 1e6)
    total = sum(map(sum, times.values()))
    rows = [
        {"kernel": name, "kind": kind(name), "calls": len(ms) / steps, "ms": sum(ms) / steps, "share": sum(ms) / total}
        for name, ms in times.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def profiled(model: Model, arithmetic: Arithmetic, batch: int, seq: int, remat: str) -> dict[str, Any]:
    """Profiles steps in a process of its own.

    Returns the "rows" of `summed`, milliseconds of a step by the host's clock without the profiler ("ms") and with it
    ("profiled"), and "how" kernels serve.
    """
    import jax

    from benchmarks.train import zoo_steps

    queue, known = zoo_steps(model, arithmetic, batch, seq, remat)
    queue(2)
    plain = queue(STEPS)
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            seconds = queue(STEPS)
        rows = summed(device_events(pathlib.Path(trace)), STEPS)
    return {"rows": rows, "ms": 1e3 * plain / STEPS, "profiled": 1e3 * seconds / STEPS, "how": known["how"]}


def main(
    only: tuple[str, ...] = (MIDDLE.name,),
    arithmetic: Arithmetic = "bf16",
    tokens: int = 8192,
    seq: int = 8192,
    remat: str = "dots",
    rehearse: bool = False,
    out: pathlib.Path | None = None,
) -> None:
    """Measures milliseconds of our training steps by kernel, under JAX's profiler, on this machine's GPU.

    Args:
        only: models whose names one of these patterns matches, of llama3.2-3b, llama3.2-1b, qwen3-8b with LoRA, and six
            layers of qwen3-30b-a3b.
        arithmetic: bf16, int8 or fp8.
        tokens: tokens of a step.
        seq: tokens of a sequence.
        remat: how much is recomputed to save memory: none, dots or full.
        rehearse: on the CPU, very small models: shows that it runs.
        out: folder for the file with the results; None: benchmarks/results, or of a rehearsal a temporary one.
    """
    prepare(rehearse, memory=0.95)
    if rehearse:
        tokens, seq = 128, 64
    rows: list[dict[str, Any]] = []
    with Worker() as worker:
        card = device(worker, rehearse)
    for model in (model for model in MODELS if matches(model.name, only)):
        try:
            with Worker() as worker:
                arguments = dataclasses.replace(model, tiny=rehearse), arithmetic, tokens // seq, seq, remat
                found = worker("benchmarks.profile.profiled", *arguments, patience=PATIENCE)
        except Failed as failure:
            rows.append({"model": model.name, "kernel": "", "note": str(failure)})
            continue
        kernels = found["rows"]
        busy = sum(row["ms"] for row in kernels)
        note = f"{found['ms']:.1f} ms a step, {found['profiled']:.1f} under the profiler; {found['how']}"
        rows.append({"model": model.name, "kernel": "all", "ms": busy, "share": 1.0, "note": note})
        for each in sorted({row["kind"] for row in kernels}):
            of_kind = [row for row in kernels if row["kind"] == each]
            sums = {name: sum(row[name] for row in of_kind) for name in ("calls", "ms", "share")}
            rows.append({"model": model.name, "kernel": f"all {each}", "kind": each, **sums})
        rows += [{"model": model.name, **row} for row in kernels if row["share"] >= LEAST]
    shown = ("model", "kind", "kernel", "calls", "ms", "share", "note")
    columns = {name: lambda row, name=name: row.get(name) for name in shown}
    settings = dict(only=only, arithmetic=arithmetic, tokens=tokens, seq=seq, remat=remat)
    report("profile", card, folder(out, rehearse), columns=columns, rows=rows, targets=[], settings=settings)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
