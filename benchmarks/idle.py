"""Share of the time in which the device waits for the engine's host, with and without overlap of steps.

    python -m benchmarks.idle --help

The device has work from when a program is given to it until the last one that it was given is done. A thread waits for
the tokens of each step, and notes when they are there.
"""

import queue
import threading
import time
from typing import Any

import numpy as np

from benchmarks.common import REFERENCE, report


def idle(model: Any, overlap: bool, *, requests: int, batch: int, prompt: int, new: int, stride: int) -> dict[str, Any]:
    """Decodes requests, and returns the "idle" share of the time, the tokens, and the milliseconds of a step."""
    import jax

    import zoo
    from zoo.generation import decoding, engine

    given, done, steps = [], [], queue.SimpleQueue()

    def wait() -> None:
        while (counts := steps.get()) is not None:
            jax.block_until_ready(counts)
            done.append(time.perf_counter())

    def advance(*arguments: Any) -> Any:
        pending.append(time.perf_counter())
        result = advances(*arguments)
        given.append(min(pending))
        pending.clear()
        steps.put(result[1].count)
        return result

    def read(*arguments: Any) -> Any:
        pending.append(time.perf_counter())
        return reads(*arguments)

    pending: list[float] = []
    advances, reads = decoding.advance, engine.read
    decoding.advance, engine.read = advance, read
    try:
        random, watcher = np.random.default_rng(0), threading.Thread(target=wait, daemon=True)
        watcher.start()
        served = zoo.Engine(model, batch=batch, max_tokens=prompt + new, stride=stride, overlap=overlap)
        completions = []
        for _ in range(requests):
            ids = random.integers(model.config.vocab_size, size=random.integers(8, prompt + 1)).tolist()
            length = round(new / 4 ** random.random())
            completions += served.submit(ids, zoo.Sampling(max_new_tokens=length, temperature=1.0))
        while not served.idle:
            served.step()
        steps.put(None)
        watcher.join()
    finally:
        decoding.advance, engine.read = advances, reads
    waits = sum(max(0.0, begin - end) for begin, end in zip(given[1:], done, strict=False))
    wall = done[-1] - given[0]
    tokens = sum(len(completion.tokens) for completion in completions)
    return {"idle": waits / wall, "tokens/s": tokens / wall, "ms": 1e3 * wall / len(done)}


def main(
    batch: int = 32,
    requests: int = 96,
    prompt: int = 64,
    new: int = 128,
    strides: tuple[int, ...] = (16, 8),
    rounds: int = 3,
    layers: int = 8,
) -> None:
    """Measures the share of the time in which this machine's CPU, as a device, waits for the host.

    Args:
        batch: rows.
        requests: prompts of 8 to `prompt` tokens, with `new` / 4 to `new` drawn tokens.
        prompt: tokens of the longest prompt.
        new: tokens of the longest completion.
        strides: tokens of a step.
        rounds: rounds, after a first one that compiles.
        layers: layers of the model.
    """
    import jax
    import jax.numpy as jnp

    from zoo import qwen3, surgery

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: REFERENCE[name] for name in (*names, "max_position_embeddings")}
    config = qwen3.Config(**sizes, num_hidden_layers=layers, tie_word_embeddings=False)
    model = surgery.cast(jax.jit(lambda: qwen3.Model(config, key=jax.random.key(0)))(), jnp.float32)
    kinds = {f"{'overlap' if o else 'no overlap'}, stride {s}": (o, s) for s in strides for o in (False, True)}
    results: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for n in range(rounds + 1):
        for kind, (overlap, stride) in kinds.items():
            found = idle(model, overlap, requests=requests, batch=batch, prompt=prompt, new=new, stride=stride)
            for name, value in found.items() if n else ():
                results[kind].setdefault(name, []).append(value)
    report("idle", "cpu", dict(batch=batch, requests=requests, prompt=prompt, new=new, layers=layers), results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
