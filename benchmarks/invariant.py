"""The price of `kernels.prefer("invariant")` on a CPU: tokens a second with and without it.

    python -m benchmarks.invariant --help

A prompt of 512 tokens is read at once into an empty cache, and tokens are decoded one at a time after it.
"""

import contextlib
import time
from typing import Any

import numpy as np

from benchmarks.common import REFERENCE, report


def main(rows: tuple[int, ...] = (1, 8), prompt: int = 512, new: int = 32, rounds: int = 3, layers: int = 8) -> None:
    """Measures reading and decoding with and without the preference, in bfloat16 and float32.

    Args:
        rows: rows of a batch.
        prompt: tokens that are read.
        new: tokens that are decoded.
        rounds: rounds, after a first one that compiles.
        layers: layers of the model.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import kernels
    from zoo import qwen3, surgery

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: REFERENCE[name] for name in (*names, "max_position_embeddings")}
    config = qwen3.Config(**sizes, num_hidden_layers=layers, tie_word_embeddings=False)
    model = jax.jit(lambda: qwen3.Model(config, key=jax.random.key(0)))()

    @eqx.filter_jit(donate="all-except-first")
    def decode(model: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        logits, cache = model.decode(tokens, cache, positions=positions)
        return logits[:, -1:].argmax(-1), cache

    def measure(model: Any, batch: int, dtype: Any) -> dict[str, float]:
        tokens = jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(batch, prompt)))
        cache = model.init_cache(batch, prompt + new, dtype)
        at = lambda start, end: jnp.broadcast_to(jnp.arange(start, end), (batch, end - start))
        begin = time.perf_counter()
        tokens, cache = jax.block_until_ready(decode(model, cache, tokens, at(0, prompt)))
        middle = time.perf_counter()
        for n in range(prompt, prompt + new):
            tokens, cache = decode(model, cache, tokens, at(n, n + 1))
        jax.block_until_ready(tokens)
        end = time.perf_counter()
        return {"read, tokens/s": batch * prompt / (middle - begin), "drawn, tokens/s": batch * new / (end - middle)}

    results: dict[str, dict[str, list[float]]] = {}
    for n in range(rounds + 1):
        for dtype in (jnp.bfloat16, jnp.float32):
            for batch in rows:
                for how in ("plain", "invariant"):
                    with kernels.prefer("invariant") if how == "invariant" else contextlib.nullcontext():
                        found = measure(surgery.cast(model, dtype), batch, dtype)
                    kind = results.setdefault(f"{jnp.dtype(dtype)}, {batch} rows, {how}", {})
                    for name, value in found.items() if n else ():
                        kind.setdefault(name, []).append(value)
    report("invariant", "cpu", dict(prompt=prompt, new=new, layers=layers), results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
