"""The matrix products of a training step on a CPU by themselves: XLA's against torch's.

    python -m benchmarks.products --help

They are those of `benchmarks.train_step`, forward and backward, so what a step takes beside them is its own.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import REFERENCE, Contestant, alternate, ratios, report


Shape = tuple[int, int, int]  # in, out, and how many such matrices the model has


def shapes(layers: int) -> dict[str, Shape]:
    """Returns the matrices of the model."""
    width, hidden, dim = (REFERENCE[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = (REFERENCE[name] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        "q": (width, heads * dim, layers),
        "k and v": (width, kv_heads * dim, 2 * layers),
        "o": (heads * dim, width, layers),
        "gate and up": (width, hidden, 2 * layers),
        "down": (hidden, width, layers),
        "head": (width, REFERENCE["vocab_size"], 1),
    }


def arrays(shape: Shape, tokens: int) -> list[np.ndarray]:
    """Returns inputs [tokens, in], the matrix [out, in], and the gradient of outputs [tokens, out]."""
    ins, outs, _ = shape
    rng = np.random.default_rng(0)
    return [rng.normal(size=size).astype(np.float32) for size in ((tokens, ins), (outs, ins), (tokens, outs))]


def with_xla(shape: Shape, tokens: int) -> Callable[[], list[np.ndarray]]:
    import jax
    import jax.numpy as jnp

    x, w, d_y = map(jnp.asarray, arrays(shape, tokens))
    product = lambda equation: jax.jit(functools.partial(jnp.einsum, equation))
    forward, d_input, d_matrix = (product(equation) for equation in ("ti,oi->to", "to,oi->ti", "to,ti->oi"))
    return lambda: [np.asarray(y)[::16] for y in (forward(x, w), d_input(d_y, w), d_matrix(d_y, x))]


def with_torch(shape: Shape, tokens: int) -> Callable[[], list[np.ndarray]]:
    import torch

    x, w, d_y = map(torch.from_numpy, arrays(shape, tokens))
    return lambda: [y.numpy()[::16] for y in (x @ w.T, d_y @ w, d_y.T @ x)]


def main(tokens: int = 1024, layers: int = 8, rounds: int = 9, calls: int = 8) -> None:
    """Times three products of each matrix in float32: the output, and the gradients of input and matrix.

    Args:
        tokens: rows of the inputs.
        layers: layers of the model, for the sum over a step.
        rounds: rounds in which both take turns.
        calls: calls in a turn.
    """
    builds: dict[str, Callable[..., Any]] = {"XLA": with_xla, "torch": with_torch}
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for matrix, shape in shapes(layers).items():
        with contextlib.ExitStack() as running:
            both = {name: running.enter_context(Contestant(build, shape, tokens)) for name, build in builds.items()}
            first = [contestant.turn()["outputs"][0] for contestant in both.values()]
            for ours, theirs in zip(*first, strict=True):
                assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs), f"{matrix}: they differ"
            turns = {name: functools.partial(contestant.turn, calls) for name, contestant in both.items()}
            taken |= {(name, matrix): turn for name, turn in alternate(turns, rounds).items()}

    def of_step(name: str, clock: str) -> list[float]:
        counts = {m: count for m, (_, _, count) in shapes(layers).items()}
        return [sum(count * taken[name, m][n][clock] for m, count in counts.items()) for n in range(rounds)]

    cpu = lambda name, matrix: [turn["cpu"] for turn in taken[name, matrix]]
    results = {
        name: {
            "of a step, s": of_step(name, "wall"),
            "of a step, CPU s": of_step(name, "cpu"),
            "CPU time / torch": ratios(of_step(name, "cpu"), of_step("torch", "cpu")),
            **{f"{m}: CPU time / torch": ratios(cpu(name, m), cpu("torch", m)) for m in shapes(layers)},
        }
        for name in builds
    }
    report("products", "cpu", dict(tokens=tokens, layers=layers, rounds=rounds, calls=calls), results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
