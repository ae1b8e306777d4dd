"""Speed of attention, forward and backward: kernels.attention against jax.nn.dot_product_attention and torch's SDPA.

    python -m benchmarks.attention --help

All use the same arrays, in the memory layout that a model's projections produce: [batch, seq, heads, dim].
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Literal

import numpy as np

from benchmarks.common import Contestant, alternate, ratios, report


Shape = tuple[int, int, int, int, int]  # batch, seq, heads, kv_heads, dim


def arrays(shape: Shape) -> list[np.ndarray]:
    """Returns q, k, v and the gradient of the output."""
    batch, seq, heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    return [rng.normal(size=(batch, seq, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads)]


def with_jax(attention: Callable, shape: Shape, dtype: str) -> Callable[[], list[np.ndarray]]:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def forward_and_backward(q, k, v, d_out):
        out, gradient = jax.vjp(attention, q, k, v)
        return out, *gradient(d_out)

    arguments = [jnp.asarray(x, dtype) for x in arrays(shape)]
    return lambda: [np.asarray(x)[:, ::16].astype(np.float32) for x in forward_and_backward(*arguments)]


def with_kernels(implementation: str, shape: Shape, dtype: str) -> Callable[[], list[np.ndarray]]:
    import kernels

    attention = functools.partial(kernels.attention, scale=shape[-1] ** -0.5, implementation=implementation)
    return with_jax(attention, shape, dtype)


def with_jax_nn(shape: Shape, dtype: str) -> Callable[[], list[np.ndarray]]:
    import jax

    return with_jax(functools.partial(jax.nn.dot_product_attention, is_causal=True), shape, dtype)


def with_torch(shape: Shape, dtype: str) -> Callable[[], list[np.ndarray]]:
    import torch

    q, k, v, d_out = (torch.tensor(x).to(getattr(torch, dtype)).transpose(1, 2) for x in arrays(shape))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward_and_backward() -> list[np.ndarray]:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        results = out.detach(), *torch.autograd.grad(out, leaves, d_out)
        return [x.transpose(1, 2)[:, ::16].float().numpy() for x in results]

    return forward_and_backward


def main(
    batch: int = 2,
    seq: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    dim: int = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 15,
    calls: int = 4,
) -> None:
    """Times causal self-attention with its gradients. The default is one layer of benchmarks.train_step.

    Args:
        batch: sequences.
        seq: tokens in each.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        dim: width of a head.
        dtype: dtype of the arrays.
        rounds: rounds in which all take turns, after a first call each.
        calls: calls in a turn.
    """
    shape = (batch, seq, heads, kv_heads, dim)
    builds = {
        "kernels, xla": functools.partial(with_kernels, "xla"),
        "kernels, reference": functools.partial(with_kernels, "reference"),
        "jax.nn": with_jax_nn,
        "torch SDPA": with_torch,
    }
    with contextlib.ExitStack() as running:
        contestants = {name: running.enter_context(Contestant(build, shape, dtype)) for name, build in builds.items()}
        first = {name: contestant.turn() for name, contestant in contestants.items()}
        for name, turn in first.items():
            for ours, theirs in zip(turn["outputs"][0], first["torch SDPA"]["outputs"][0], strict=True):
                different = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
                assert different < {"float32": 1e-5, "bfloat16": 2e-2}[dtype], f"{name} differs by {different:.1e}"
        turns = {name: functools.partial(contestant.turn, calls) for name, contestant in contestants.items()}
        taken = alternate(turns, rounds)

    times = lambda name, clock: [1e3 * turn[clock] for turn in taken[name]]
    results = {
        name: {
            "wall, ms": times(name, "wall"),
            "CPU time, ms": times(name, "cpu"),
            "wall / torch SDPA": ratios(times(name, "wall"), times("torch SDPA", "wall")),
            "CPU time / torch SDPA": ratios(times(name, "cpu"), times("torch SDPA", "cpu")),
            "wall / jax.nn": ratios(times(name, "wall"), times("jax.nn", "wall")),
            "CPU time / jax.nn": ratios(times(name, "cpu"), times("jax.nn", "cpu")),
            "first call, s": [first[name]["wall"]],
        }
        for name in builds
    }
    settings = dict(batch=batch, seq=seq, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, rounds=rounds)
    report("attention", "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
