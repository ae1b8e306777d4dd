"""Speed of generation on this machine's GPU, against the least time for reading the weights and the cache.

    python -m benchmarks.serve --help

Models have real shapes and random weights, made on the device. `zoo.Engine` fills its batch with prompts and decodes
them; the time of a step is the caller's waiting time. Each token needs the weights once for all rows, and each row's
cache. The device's memory speed is measured in the same process, by copying an array.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any, Literal

import numpy as np

from benchmarks.gpu import Failed, Target, Worker, device, folder, matches, prepare, ratio, report
from benchmarks.train import Model


PATIENCE = 400  # seconds for one case
STRIDE = 32  # tokens of each row in one step of the engine


@dataclasses.dataclass(frozen=True)
class Serving:
    model: Model
    batch: int
    prompt: int = 1024
    room: int = 4096  # the cache's capacity in tokens of a row, prompt included
    weights: Literal["bf16", "int8"] = "bf16"

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.weights}, batch {self.batch}"


DENSE, EXPERTS = Model("qwen3-8b"), Model("qwen3-30b-a3b", layers=8)

# The most important come first, because a run that is out of time skips the end.
CASES = (
    Serving(DENSE, 1),
    Serving(EXPERTS, 1),
    Serving(DENSE, 64),
    Serving(DENSE, 1, weights="int8"),
    Serving(EXPERTS, 64),
    Serving(DENSE, 64, weights="int8"),
    Serving(DENSE, 256, prompt=256, room=1024),
    Serving(EXPERTS, 16),
    Serving(EXPERTS, 256, prompt=256, room=1024),
)


def measured(case: Serving, steps: int) -> dict[str, Any]:
    """Measures a case in a process of its own.

    Returns milliseconds of a "prefill" of one prompt, and of a token of all rows ("ms", a list). Also returns the bytes
    that a token must read ("weights" and "cache"), and the bytes per second that a copy reads and writes.
    """
    import jax
    import jax.numpy as jnp

    import kernels
    import zoo
    from zoo import quantized, surgery
    from zoo.nn.layers import AbstractExpertLinear
    from zoo.registry import family_of

    config = case.model.config()

    def make(key: jax.Array) -> Any:
        net = surgery.cast(family_of(config).Model(config, key=key), jnp.bfloat16)
        return quantized.quantize(net, "int8") if case.weights == "int8" else net

    model = jax.jit(make)(jax.random.key(time.time_ns() % 2**32))
    random, tokens = np.random.default_rng(), case.batch * case.prompt
    prompts = random.integers(config.vocab_size, size=(case.batch, case.prompt))

    engine = zoo.Engine(model, batch=case.batch, max_tokens=case.room, stride=STRIDE)
    new = zoo.Sampling(max_new_tokens=case.room - case.prompt)
    completions = [engine.submit(prompt.tolist(), new)[0] for prompt in prompts]
    begin = time.perf_counter()
    engine.step()  # compiles, prefills the prompts, and decodes the first tokens
    first = time.perf_counter() - begin
    ms = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        ms.append(1e3 * (time.perf_counter() - begin) / STRIDE)

    for completion in completions:
        engine.cancel(completion)
    for _ in range(2):  # the first call compiles
        engine.submit(prompts[0].tolist(), zoo.Sampling(max_new_tokens=1))
        begin = time.perf_counter()
        engine.step()
        prefilled = 1e3 * (time.perf_counter() - begin) - statistics.median(ms)

    size = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree) if hasattr(a, "dtype"))
    # Counts the experts that some row's token goes to, if routers choose all equally often.
    is_experts = lambda node: isinstance(node, AbstractExpertLinear)
    experts = size([node for node in jax.tree.leaves(model, is_leaf=is_experts) if is_experts(node)])
    embedding = size(model.embed_tokens) * (model.lm_head is not None)  # one row of it for each token
    weights = size(model) - experts - embedding
    if experts:
        weights += experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** case.batch)
    seen = case.prompt + round(STRIDE * (1 + (steps + 1) / 2))  # positions, on average over the timed steps
    cache = size(jax.eval_shape(lambda: model.init_cache(case.batch, seen, jnp.bfloat16)))
    engine = None  # frees the cache
    rate = _copy_rate()
    at = jnp.zeros((case.batch, 1), jnp.int32)
    cached = jax.eval_shape(lambda: model.init_cache(case.batch, case.room, jnp.bfloat16))
    choices = kernels.explain(lambda model, cache: model.decode(at, cache, positions=at), model, cached)
    how = ", ".join(sorted({f"{choice.operation}: {choice.implementation}" for choice in choices}))
    return {
        "ms": ms, "prefill": prefilled, "first": first, "weights": weights, "cache": cache, "rate": rate,
        "prompt tokens": tokens, "how": how,
    }  # fmt: skip


def _copy_rate(gigabytes: float = 2.0) -> float:
    """Returns the bytes per second that the device reads and writes while it copies an array."""
    import jax
    import jax.numpy as jnp

    on_cpu = jax.default_backend() == "cpu"
    x = jnp.ones(int(gigabytes * 1e9 / 4) // (100 if on_cpu else 1), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(copy(x))
        times.append(time.perf_counter() - begin)
    return 2 * x.nbytes / statistics.median(times)


def main(
    only: tuple[str, ...] = ("*",),
    seconds: float = 540,
    steps: int = 8,
    rehearse: bool = False,
    out: pathlib.Path | None = None,
) -> None:
    """Measures tokens per second of zoo.Engine on this machine's GPU, and the share of the time that memory explains.

    Args:
        only: cases whose names one of these patterns matches, such as "qwen3-8b*" "*batch 1".
        seconds: no case starts later than this; skipped cases are listed.
        steps: timed steps of the engine, each of 32 tokens for every row.
        rehearse: on the CPU, very small models: shows that it runs.
        out: folder for the file with the results; None: benchmarks/results, or of a rehearsal a temporary one.
    """
    begin = time.monotonic()
    prepare(rehearse, memory=0.9)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    with Worker() as worker:
        card = device(worker, rehearse)
    for case in (case for case in CASES if matches(case.name, only)):
        if time.monotonic() - begin > seconds:
            skipped.append(case.name)
            continue
        row: dict[str, Any] = {"case": case.name, "note": ""}
        rows.append(row)
        run, count = case, steps
        if rehearse:
            model = dataclasses.replace(case.model, tiny=True, layers=2)
            run, count = dataclasses.replace(case, model=model, batch=min(case.batch, 2), prompt=16, room=128), 1
        try:
            with Worker() as worker:
                row |= worker("benchmarks.serve.measured", run, count, patience=PATIENCE)
        except Failed as failure:
            row["note"] = str(failure)
            continue
        row["ms"], row["all ms"] = statistics.median(row["ms"]), row["ms"]
        row["tokens/s"] = 1e3 * run.batch / row["ms"]
        row["GB"] = (row["weights"] + row["cache"]) / 1e9
        row["ms by bytes"] = 1e3 * (row["weights"] + row["cache"]) / row["rate"]
        row["share"] = row["ms by bytes"] / row["ms"]
        print(f"{time.monotonic() - begin:4.0f} s  {case.name}", flush=True)

    def value(name: str, quantity: str) -> float | None:
        return next((row.get(quantity) for row in rows if row["case"] == name), None)

    by = {case.name: case for case in CASES}
    targets = [Target(f"{name}, ms by bytes / ms", value(name, "share"), 0.6, 0.8) for name in by]
    int8 = (value(f"qwen3-8b, {weights}, batch 1", "tokens/s") for weights in ("int8", "bf16"))
    targets.append(Target("qwen3-8b, batch 1, int8 / bf16", ratio(*int8), 1.4, 1.8))
    columns = {name: lambda row, name=name: row.get(name) for name in ("case", "ms", "tokens/s", "GB", "ms by bytes")}
    columns |= {"share": lambda row: row.get("share"), "prefill of one, ms": lambda row: row.get("prefill")}
    columns |= {"first step, s": lambda row: row.get("first"), "how": lambda row: row["note"] or row["how"]}
    settings = dict(only=only, seconds=seconds, steps=steps, stride=STRIDE, skipped=skipped)
    report("serve", card, folder(out, rehearse), columns=columns, rows=rows, targets=targets, settings=settings)
    print(f"{time.monotonic() - begin:.0f} s. Left out, as there was no more time: {', '.join(skipped) or 'nothing'}.")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
