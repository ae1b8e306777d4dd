"""The first minutes on a GPU: programs that are likelier than others to fail on a card, before anything is timed.

    python -m benchmarks.first --help

- Attention of packed rows by cuDNN and by Triton, in a loop over layers as a model has it. XLA puts cuDNN's calls into
  a CUDA graph, as a conditional. A program's first call runs without the graph, so there are three, each on other
  numbers. Before each, memory is filled with NaN, and the padding's results are compared, too: XLA may leave results of
  tokens that belong to no sequence unwritten (openxla/xla#46500).
- The first training step: the memory that it took, beside the memory that the compiler has counted.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import Failed, Worker, device, folder, prepare, report


LAYERS, CALLS = 4, 3
PATIENCE = 280  # seconds for a kernel's calls, or for the step


def attention(name: str, tiny: bool) -> list[dict[str, Any]]:
    """Compares each call of an implementation with the reference in float32.

    Returns, for each call, the relative errors of "out", "dq", "dk" and "dv" in the Frobenius norm, the largest of
    those of the padding alone ("padding"), and a "note" that names what is wrong.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kernels
    from benchmarks.in_jax import BOUNDS

    batch, seq, heads, dim = (2, 80, 4, 16) if tiny else (2, 2000, 16, 128)
    documents = np.array([[3, 9, 5, 7, 8], [20, 1, 1, 4, 6]]) * seq // 40  # the rest is padding
    segments = np.array([np.repeat([1, 2, 3, 4, 5, 0], [*row, seq - row.sum()]) for row in documents], np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str, arrays: Sequence[jax.Array], segments: jax.Array) -> list[jax.Array]:
        attend = functools.partial(
            kernels.attention, scale=dim**-0.5, mask=kernels.Causal(), implementation=implementation
        )

        def layer(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            *qkv, d_out = arrays
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, kernels.Tokens(None, segments)), *qkv)
            return [out, *pull(d_out)]

        return jax.lax.map(layer, arrays)

    @jax.jit
    def make(key: jax.Array) -> list[jax.Array]:
        numbers = (heads, heads // 4, heads // 4, heads)
        normal = lambda key, heads: jax.random.normal(key, (LAYERS, batch, seq, heads, dim), jnp.bfloat16)
        return [normal(*each) for each in zip(jax.random.split(key, 4), numbers, strict=True)]

    rows = []
    for call in range(CALLS):
        arrays = make(jax.random.key(call))
        with jax.default_matmul_precision("highest"):
            true = run("reference", [x.astype(jnp.float32) for x in arrays], segments)
        jax.block_until_ready(jnp.full(2**10 if tiny else 2**30, jnp.nan))  # and freed, for results to lie there
        found = run(name, arrays, segments)
        row: dict[str, Any] = {"call": call + 1, "padding": 0.0, "note": ""}
        for part, *both in zip(("out", "dq", "dk", "dv"), found, true, strict=True):
            ours, exact = (np.asarray(x, np.float64) for x in both)
            error = lambda where, a=ours, b=exact: np.linalg.norm((a - b)[:, where]) / np.linalg.norm(b[:, where])
            row[part], of_padding = float(error(segments >= 0)), float(error(segments == 0))
            row["padding"] = float(np.maximum(row["padding"], of_padding))
            bound = BOUNDS["bfloat16"][part != "out"]
            if not (row[part] <= bound and of_padding <= bound):  # a NaN is wrong, too
                row["note"] = f"{row['note'] or 'WRONG:'} {part}"
        rows.append(row)
    return rows


def step(tiny: bool) -> list[dict[str, Any]]:
    """Takes one training step of Llama 3.2 1B, with 8,192 tokens.

    Returns a row with the bytes of a device that the compiler has "counted", the "peak" that the device reports (None:
    it reports none), and in "how" which implementations serve.
    """
    import jax

    from benchmarks.train import SMALL, zoo_steps

    queue, known = zoo_steps(dataclasses.replace(SMALL, tiny=tiny), "bf16", 1, 64 if tiny else 8192, "dots")
    queue(1)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return [{"counted": known["counted"], "peak": peak, "how": known["how"], "note": ""}]


def main(
    only: tuple[str, ...] = ("attention", "step"), rehearse: bool = False, out: pathlib.Path | None = None
) -> None:
    """Checks what is likeliest to fail on this machine's GPU. Exits with an error if something is wrong.

    Args:
        only: the checks to make, of attention and step.
        rehearse: on the CPU, very small, with XLA in the place of cuDNN: shows that it runs.
        out: folder for the file with the results; None: benchmarks/results, or of a rehearsal a temporary one.
    """
    prepare(rehearse, memory=0.9)
    with Worker() as worker:
        card = device(worker, rehearse)
    checks = [("attention", "xla" if rehearse else "cudnn"), ("attention", "triton"), ("step",)]
    rows: list[dict[str, Any]] = []
    for function, *arguments in (check for check in checks if check[0] in only):
        what = {"check": " by ".join((function, *arguments))}
        try:
            with Worker() as worker:
                found = worker(f"benchmarks.first.{function}", *arguments, rehearse, patience=PATIENCE)
            rows += [what | row for row in found]
        except Failed as failure:
            rows.append(what | {"note": f"FAILED: {failure}"})
    gigabytes = lambda row, name: row[name] / 1e9 if row.get(name) else None
    shown = ("check", "call", "out", "dq", "dk", "dv", "padding")
    columns = {name: lambda row, name=name: row.get(name) for name in shown}
    columns |= {f"{name}, GB": lambda row, name=name: gigabytes(row, name) for name in ("counted", "peak")}
    columns |= {"note": lambda row: row["note"] or row.get("how", "")}
    report(
        "first", card, folder(out, rehearse), columns=columns, rows=rows, targets=[],
        settings=dict(only=only, layers=LAYERS, calls=CALLS),
    )  # fmt: skip
    if any(row["note"] for row in rows):
        raise SystemExit(
            "Something is wrong; docs/kernels.md#packed-rows-on-a-gpu has what to do about cuDNN's attention: first "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer=, and if that does not mend it, kernels.prefer('triton')."
        )


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
