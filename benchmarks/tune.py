"""Fills the tables of block sizes in kernels/ for this machine's GPU: the fastest sizes, found by trying.

    python -m benchmarks.tune --help

It runs `benchmarks.cases` in order, and records which sizes their kernels look up. There is one search for each new
combination of kernel, bytes of an element and class of shapes. The search starts from the sizes in use, and moves from
the best sizes to their neighbours, until none is better: one side of a block, or the number of warps, doubled or
halved, or one stage more or less. A candidate that does not compile, fails on the device or is wrong is skipped, and
its process replaced. Sizes that beat those in use by more than chance are written for the card's compute capability.
All else in the files stays.
"""

import contextlib
import functools
import json
import math
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.gpu import Failed, Worker, device, matches, prepare


Lookup = tuple[str, str, str, str]  # module within kernels, kernel, bytes of an element, class of shapes
Sizes = dict[str, int]

TABLES = pathlib.Path(__file__).parents[1] / "kernels"
SHORTLIST = pathlib.Path(__file__).with_name("shortlist.json")
PATIENCE = 60  # seconds for one candidate
GAIN = 0.02  # of the time; a smaller gain may be chance


@contextlib.contextmanager
def watched(sizes: Mapping[Lookup, Sizes]) -> Iterator[dict[Lookup, Sizes]]:
    """Runs in a worker. Replaces sizes of the tables with `sizes`, and yields the sizes that are looked up."""
    import jax

    from kernels.backends import blocks

    used: dict[Lookup, Sizes] = {}
    look_up = blocks.sizes

    def replaced(module: str, kernel: str, dtype: Any, shape_class: str) -> Sizes:
        key = module.removeprefix("kernels."), kernel, blocks.width(dtype), shape_class
        used[key] = sizes.get(key) or look_up(module, kernel, dtype, shape_class)
        return used[key]

    jax.clear_caches()  # otherwise nothing would be looked up again
    blocks.sizes = replaced
    try:
        yield used
    finally:
        blocks.sizes = look_up


def row() -> str:
    """Runs in a worker. Returns the name of the rows to write, which cards of one compute capability share."""
    from kernels.backends import blocks
    from kernels.backends.device import device

    return blocks.chips(device())[1]


def lookups(case: Case, name: str, which: str) -> dict[Lookup, Sizes]:
    """Runs in a worker. Returns the sizes that a pass looks up, without running it."""
    import jax
    import jax.numpy as jnp

    from benchmarks.in_jax import pull_back
    from benchmarks.programs import program_of

    program = program_of(case)
    function = program.function(name)

    def run(arguments: Any) -> Any:
        if which == "forward":
            return function(*arguments)
        out, pull = pull_back(program, function, which, arguments)
        return pull(jnp.ones_like(out))

    with watched({}) as used:
        jax.eval_shape(run, jax.eval_shape(lambda: program.arguments(jax.random.key(0))))
    return used


def trial(case: Case, name: str, which: str, lookup: Lookup, sizes: Sizes, timing: dict[str, Any]) -> dict[str, Any]:
    """Runs in a worker. Returns `in_jax.measure` with these sizes."""
    from benchmarks import in_jax

    with watched({lookup: sizes}):
        return in_jax.measure(case, name, which, **timing)


def neighbours(sizes: Sizes) -> list[Sizes]:
    """Returns the sizes that differ in one value by one step."""
    found = []
    for name, value in sizes.items():
        if name.endswith(("stages", "slots")):
            steps, least, most = (value - 1, value + 1), 1, 6
        else:
            steps, least, most = (value // 2, value * 2), *((4, 8) if name == "warps" else (16, 256))
        found += [sizes | {name: step} for step in steps if least <= step <= most]
    return found


def search(milliseconds: Callable[[Sizes], float], start: Sizes, candidates: int) -> tuple[Sizes, float]:
    """Returns the best sizes, and their time relative to that of `start`; both are measured again for it."""
    times = {json.dumps(start): milliseconds(start)}
    best, moved = start, True
    while moved:
        for sizes in neighbours(best):
            if json.dumps(sizes) not in times and len(times) <= candidates:
                times[json.dumps(sizes)] = milliseconds(sizes)
        leader = json.loads(min(times, key=lambda key: times[key]))
        best, moved = leader, leader != best
    return best, 1.0 if best == start else milliseconds(best) / milliseconds(start)


def quickest(milliseconds: Callable[[Sizes], float], start: Sizes, candidates: Sequence[Sizes]) -> tuple[Sizes, float]:
    """Returns the same as `search`, but tries only these candidates."""
    times = {json.dumps(sizes): milliseconds(sizes) for sizes in (start, *candidates)}
    best = json.loads(min(times, key=lambda key: times[key]))
    return best, 1.0 if best == start else milliseconds(best) / milliseconds(start)


def write(folder: pathlib.Path, chip: str, lookup: Lookup, sizes: Sizes) -> None:
    """Writes one row into its file."""
    module, kernel, width, shape_class = lookup
    name = pathlib.Path(*module.split(".")).with_suffix(".json")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads((path if path.exists() else TABLES / name).read_text())
    table[kernel].setdefault(chip, {}).setdefault(width, {})[shape_class] = sizes
    innermost = re.compile(r"\{\s*([^{}]*?)\s*\}")  # on one line
    text = innermost.sub(lambda found: "{" + " ".join(found[1].split()) + "}", json.dumps(table, indent=1))
    path.write_text(text + "\n")


def main(
    only: tuple[str, ...] = ("*",),
    kernels: tuple[str, ...] = ("*",),
    candidates: int = 40,
    shortlist: bool = False,
    seconds: float = 1500,
    regions: int = 5,
    region: float = 20,
    rehearse: bool = False,
    out: pathlib.Path = TABLES,
) -> None:
    """Tries block sizes on this machine's GPU, and writes the best into the tables that the kernels read.

    Args:
        only: cases whose names one of these patterns matches, such as "causal*".
        kernels: kernels to tune, as patterns of module.kernel, such as "attention.triton.*" or "*.dkv".
        candidates: most candidates for each kernel, bytes of an element and class of shapes.
        shortlist: tries only the sizes in benchmarks/shortlist.json. `python -m benchmarks.shortlist` writes there the
            sizes that compile for an H200 without spilled registers; other kernels stay as they are.
        seconds: no candidate is tried later than this.
        regions: measurements of each candidate's time, of which the median counts.
        region: least milliseconds of a measurement.
        rehearse: on the CPU, with interpreted kernels and very small cases: shows that it runs. Give `out` with it.
        out: folder of the tables, each in the folder of its operation.
    """
    if rehearse and out == TABLES:
        raise SystemExit("A rehearsal would write what means nothing into the tables: give another folder as --out.")
    end = time.monotonic() + seconds
    prepare(rehearse, memory=0.9)
    timing = dict(seconds=region / 1e3, count=regions)
    chosen = [case.tiny() if rehearse else case for case in CASES if matches(case.name, only)]
    seen: set[Lookup] = set()
    listed: dict[str, list[Sizes]] = json.loads(SHORTLIST.read_text()) if shortlist else {}
    with Worker() as worker:
        chip = device(worker, rehearse)
        if not rehearse:
            chip = worker("benchmarks.tune.row", patience=120)

        def ask(function: str, *arguments: Any) -> dict[Any, Any]:
            """Calls a function in the worker. Returns its result, or {} after printing the failure."""
            try:
                return worker(f"benchmarks.{function}", *arguments, patience=PATIENCE)
            except Failed as failure:
                print(f"    {function}: {failure}", flush=True)
                return {}

        def milliseconds(case: Case, name: str, which: str, lookup: Lookup, sizes: Sizes) -> float:
            result = ask("tune.trial", case, name, which, lookup, sizes, timing) if time.monotonic() < end else {}
            right = bool(result) and result["error"] <= result["bound"]
            ms = statistics.median(result["ms"]) if right else math.inf
            wrong = f", WRONG: {result['error']:.1e}" if result and not right else ""
            print(f"    {sizes}: {ms:.4g} ms{wrong}", flush=True)
            return ms

        for case in chosen:
            refusals = ask("in_jax.refusals", case)
            for name, which in (
                (name, w) for name, refusal in refusals.items() if refusal is None for w in case.passes
            ):
                for lookup, start in ask("tune.lookups", case, name, which).items():
                    wanted = matches(".".join(lookup[:2]), kernels)
                    if lookup in seen or not wanted or time.monotonic() > end:
                        continue
                    seen.add(lookup)
                    if shortlist and " ".join(lookup) not in listed:
                        continue
                    print(f"{' '.join(lookup)}, by {case.name}, {which}")
                    time_of = functools.partial(milliseconds, case, name, which, lookup)
                    if shortlist:
                        best, part = quickest(time_of, start, listed[" ".join(lookup)])
                    else:
                        best, part = search(time_of, start, candidates)
                    if part < 1 - GAIN:
                        write(out, chip, lookup, best)
                        print(f"  {start} -> {best}: {part:.3f} of the time", flush=True)
                    else:
                        print("  stays", flush=True)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
