"""Speed and accuracy of the kernels on this machine's GPU, against cuDNN, XLA and torch in the same run.

    python -m benchmarks.kernels --help

It goes through `benchmarks.cases` in order. For each case, all our implementations that do not refuse it, and all
opponents, compute on fresh random data. Their results are compared with float32, and then they are timed. JAX and torch
have a process each, which is replaced if a kernel fails or never ends. A wrong result of ours makes the run fail.
"""

import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import CASES, Case, Grouped
from benchmarks.gpu import Failed, Target, Worker, device, folder, matches, prepare, ratio, report


BY_NAME: dict[str, Any] = {case.name: case for case in CASES}
PATIENCE = 120  # seconds that one contestant may take for one case


class Results:
    """The rows of the table: one for each case, pass and contestant."""

    def __init__(self):
        self.rows: list[dict[str, Any]] = []

    def add(self, case: Case, which: str, name: str, ours: bool, **values: Any) -> None:
        row = {"case": case.name, "pass": which, "by": name, "ours": ours, **values}
        if "ms" in row:
            row["ms"], row["all ms"] = statistics.median(row["ms"]), row["ms"]
            row["TFLOP/s"] = case.flops(which) / row["ms"] / 1e9
            if least := case.bytes():
                row["TB/s"] = least / row["ms"] / 1e9
        self.rows.append(row)

    def best(self, case: str, which: str, **who: Any) -> dict[str, Any] | None:
        """Returns the fastest correct row with these values; None if there is none."""
        wanted = {"case": BY_NAME[case].name, "pass": which, "note": ""} | who
        rows = [row for row in self.rows if "ms" in row and wanted.items() <= {k: row[k] for k in wanted}.items()]
        return min(rows, key=lambda row: row["ms"], default=None)

    def matmul_rate(self) -> float | None:
        return rate(self.best("bf16 matmul 8192^3", "forward"))


def rate(row: dict[str, Any] | None) -> float | None:
    return None if row is None else row["TFLOP/s"]


def targets(r: Results) -> list[Target]:
    """Returns the goals for one H200, computed from the run's own numbers."""
    plain, ours = "causal D128 T8k", dict(ours=True)
    cudnn, triton = rate(r.best(plain, "forward", by="jax.nn cudnn")), r.best(plain, "forward", by="triton")
    own = [rate(r.best(plain, "backward", by=name)) or 0 for name in ("triton", "mosaic")]
    d256 = rate(r.best("causal D256 T8k", "backward", **ours))
    found = [
        Target("attention forward D128 T8k, triton / cuDNN", ratio(rate(triton), cudnn), 0.55, 0.65),
        Target("... best of ours / cuDNN", ratio(rate(r.best(plain, "forward", **ours)), cudnn), 1, 1),
        Target("... backward, own / best known", ratio(max(own), rate(r.best(plain, "backward"))), 0.8, 1),
        Target("attention backward D256 T8k, ours / 201 TFLOP/s", ratio(d256, 201), 1, 2),
    ]
    documents = ("8 documents D128 T8k", "8 documents with positions D128 T8k")
    for name in ("sinks D128 T8k", "softcap D128 T8k", *documents, "window 1024 D128 T8k"):
        for which in ("forward", "backward"):
            # The number of 128 x 128 blocks that must be visited, divided by the time.
            speeds = []
            for case in (name, plain):
                row = r.best(case, which, by="triton")
                speeds.append(BY_NAME[case].pairs(128) / row["ms"] if row else None)
            goals = (0.8, 0.9) if name.startswith("window") else (0.9, 0.97)
            found.append(Target(f"triton {which}, {name} / plain, by visible blocks", ratio(*speeds), *goals))
    for which, *goals in (("forward", 0.60, 0.75), ("dx", 0.50, 0.65), ("dw", 0.70, 0.85)):
        for case in (case.name for case in CASES if type(case) is Grouped and not case.int8):
            value = ratio(rate(r.best(case, which, **ours)), r.matmul_rate())
            found.append(Target(f"grouped {which}, {case} / dense bf16 rate", value, *goals))
    speeds = (rate(r.best("Qwen3-30B-A3B experts", "all", **who)) for who in (ours, dict(by="lax.ragged_dot")))
    found.append(Target("128 experts, forward and backward, ours / lax.ragged_dot", ratio(*speeds), 20, 60))
    found.append(Target("fp8 blocks, TFLOP/s", rate(r.best("fp8 blocks 8192^3", "forward", **ours)), 900, 1200))
    loss = "cross-entropy of 152k words, 32k tokens"
    chunked, whole = r.best(loss, "all", **ours), r.best(loss, "all", by="whole logits")
    memory = ratio(BY_NAME[loss].logits_bytes(), chunked["memory"] if chunked else None)
    found.append(Target("cross-entropy, float32 logits / its memory", memory, 8, 8))
    found.append(Target("... its speed / that of whole logits", ratio(rate(chunked), rate(whole)), 1 / 1.3, 1))
    return found


def contest(case: Case, by: Sequence[str], jax: Worker, torch: Worker, results: Results, **timing: Any) -> None:
    """Adds the rows of a case: one for each contestant whose name matches one of the patterns `by`."""
    contestants = [(jax, "in_jax", name, False) for name in case.in_jax]
    contestants += [(torch, "in_torch", name, False) for name in case.in_torch]
    try:
        refusals = jax("benchmarks.in_jax.refusals", case, patience=PATIENCE)
    except Failed as failure:
        refusals = {}
        results.add(case, "", "ours", True, note=str(failure))
    for name, refusal in refusals.items():
        if refusal:
            results.add(case, "", name, True, note=f"refuses: {refusal}")
        else:
            contestants.append((jax, "in_jax", name, True))
    contestants = [contestant for contestant in contestants if matches(contestant[2], by)]
    for which in case.passes:
        for worker, module, name, ours in contestants:
            try:
                values = worker(f"benchmarks.{module}.measure", case, name, which, patience=PATIENCE, **timing)
                wrong = "" if values["error"] <= values.get("bound", 3e-2) else "WRONG"  # a NaN is wrong, too
                results.add(case, which, name, ours, note=wrong, **values)
            except Failed as failure:
                results.add(case, which, name, ours, note=str(failure))


def main(
    only: tuple[str, ...] = ("*",),
    by: tuple[str, ...] = ("*",),
    seconds: float = 540,
    regions: int = 7,
    region: float = 20,
    rehearse: bool = False,
    out: pathlib.Path | None = None,
) -> None:
    """Measures errors and times of all our kernels on this machine's GPU, beside those of others.

    Args:
        only: cases whose names one of these patterns matches, such as "*D128*" "gpt-oss*".
        by: contestants whose names one of these patterns matches, such as triton mosaic "torch*".
        seconds: no case starts later than this; skipped cases are listed.
        regions: measurements of each time; the table has the median, and the file all of them.
        region: least milliseconds of a measurement.
        rehearse: on the CPU, one case of each kind, very small, with interpreted kernels: shows that it runs.
        out: folder for the file with the results; None: benchmarks/results, or of a rehearsal a temporary one.
    """
    begin = time.monotonic()
    prepare(rehearse, memory=0.7)
    chosen = [case for case in CASES if matches(case.name, only)]
    if rehearse:
        chosen = [case.tiny() for case in {type(case): case for case in reversed(chosen)}.values()][::-1]
        regions, region = 2, 1
    results, skipped = Results(), []
    with Worker() as jax, Worker() as torch:
        card = device(jax, rehearse)
        for case in chosen:
            if time.monotonic() - begin > seconds:
                skipped.append(case.name)
                continue
            contest(case, by, jax, torch, results, seconds=region / 1e3, count=regions)
            print(f"{time.monotonic() - begin:4.0f} s  {case.name}", flush=True)

    def against(row: dict[str, Any]) -> float | None:
        return ratio(row.get("TFLOP/s"), rate(results.best(row["case"], row["pass"], ours=False)))

    def of_matmul(row: dict[str, Any]) -> float | None:
        share = ratio(row.get("TFLOP/s"), results.matmul_rate())
        return share and 100 * share

    shown = {name: lambda row, name=name: row.get(name) for name in ("case", "pass", "by", "ms", "TFLOP/s", "TB/s")}
    shown |= {"speed / best opponent": against, "% of matmul": of_matmul}
    shown |= {name: lambda row, name=name: row.get(name) for name in ("error", "note")}
    settings = dict(only=only, by=by, seconds=seconds, regions=regions, region_ms=region, skipped=skipped)
    out = folder(out, rehearse)
    report("kernels", card, out, columns=shown, rows=results.rows, targets=targets(results), settings=settings)
    print(f"{time.monotonic() - begin:.0f} s. Left out, as there was no more time: {', '.join(skipped) or 'nothing'}.")
    if wrong := [row for row in results.rows if row["ours"] and row["note"] == "WRONG"]:
        raise SystemExit("WRONG: " + "; ".join(f"{row['by']} in {row['case']}, {row['pass']}" for row in wrong))


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
