"""Speed of the gated delta rule on a CPU, forward and backward: kernels.delta_rule against transformers' torch path.

    python -m benchmarks.delta_rule --help

All use the same arrays, in the memory layout that a model's projections produce: [batch, seq, heads, dim]. For a GPU
`benchmarks.kernels --only "states*"` has the same three recurrences, against flash-linear-attention and mamba_ssm.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.common import Contestant, alternate, import_transformers, ratios, report


class Rule(NamedTuple):
    """A recurrence, with all or some of the heads of a layer of the model."""

    heads: int  # heads of queries and keys
    v_heads: int
    dim: int
    v_dim: int
    by_channel: bool = False  # each channel of the keys has a decay of its own
    erase: bool = True


RULES = {
    "Qwen3-Next": Rule(4, 8, 128, 128),
    "Kimi Linear": Rule(8, 8, 128, 128, by_channel=True),
    "Mamba-2": Rule(1, 16, 128, 64, erase=False),
}
Shape = tuple[int, int]  # batch, seq


def arrays(rule: Rule, shape: Shape) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns q, k, v, decay and beta, distributed about as in models, and the gradient of the output.

    Mamba-2's beta is the step of a head. Its decay is left out: it is minus the head's number times the step.
    """
    rng, r = np.random.default_rng(0), rule
    normal = lambda *each: rng.normal(size=(*shape, *each)).astype(np.float32)
    given = dict(q=normal(r.heads, r.dim), k=normal(r.heads, r.dim), v=normal(r.v_heads, r.v_dim))
    if r.erase:
        for name in ("q", "k"):
            given[name] /= np.linalg.norm(given[name], axis=-1, keepdims=True)
        given["decay"] = -0.1 * normal(r.v_heads, *[r.dim] * r.by_channel) ** 2
        given["beta"] = 1 / (1 + np.exp(-normal(r.v_heads)))
    else:
        given["beta"] = np.exp(rng.uniform(np.log(0.001), np.log(0.1), (*shape, r.v_heads))).astype(np.float32)
    return given, normal(r.v_heads, r.v_dim)


def with_kernels(rule: Rule, shape: Shape) -> Callable[[], list[np.ndarray]]:
    import jax
    import jax.numpy as jnp

    import kernels

    given, d_out = jax.tree.map(jnp.asarray, arrays(rule, shape))
    scale = rule.dim**-0.5 if rule.erase else 1.0

    def run(given: dict[str, Any]) -> Any:
        decay = {} if rule.erase else {"decay": given["beta"] * -jnp.arange(1.0, rule.v_heads + 1)}
        return kernels.delta_rule(**given, **decay, scale=scale, erase=rule.erase, implementation="xla")[0]

    @jax.jit
    def forward_and_backward(given: dict[str, Any], d_out: Any) -> list[Any]:
        out, gradient = jax.vjp(run, given)
        (gradients,) = gradient(d_out)
        return [out, *(gradients[name] for name in sorted(given))]

    return lambda: [np.asarray(x)[:, ::16] for x in forward_and_backward(given, d_out)]


def with_transformers(rule: Rule, shape: Shape) -> Callable[[], list[np.ndarray]]:
    import_transformers()
    import torch
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given, d_out = arrays(rule, shape)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in sorted(given.items())}
    d_out, rates = torch.tensor(d_out), -torch.arange(1.0, rule.v_heads + 1)

    def run(q: Any, k: Any, v: Any, beta: Any, decay: Any = None) -> Any:
        if not rule.erase:
            return mamba2_chunk_scan(v, beta, rates, k, q, chunk_size=256)  # for Mamba-2 and Nemotron-H
        chunks = chunk_kimi_delta_attention if rule.by_channel else torch_chunk_gated_delta_rule
        return chunks(q, k, v, decay, beta)[0]

    def forward_and_backward() -> list[np.ndarray]:
        out = run(**leaves)
        gradients = torch.autograd.grad(out, tuple(leaves.values()), d_out)
        return [x.numpy()[:, ::16] for x in (out.detach(), *gradients)]

    return forward_and_backward


def main(
    batch: int = 1,
    seq: int = 1024,
    rules: tuple[Literal["Qwen3-Next", "Kimi Linear", "Mamba-2"], ...] = ("Qwen3-Next", "Kimi Linear", "Mamba-2"),
    rounds: int = 9,
    calls: int = 2,
) -> None:
    """Times the recurrence with its gradients, in float32, with some of the heads of real layers.

    Args:
        batch: sequences.
        seq: tokens in each.
        rules: a decay for each head, a decay for each channel, and a rule without erasing.
        rounds: rounds in which both take turns, after a first call each.
        calls: calls in a turn.
    """
    builds = {"kernels, xla": with_kernels, "transformers": with_transformers}
    results: dict[str, dict[str, list[float]]] = {name: {} for name in builds}
    for rule in rules:
        with contextlib.ExitStack() as running:
            contestants = {
                name: running.enter_context(Contestant(build, RULES[rule], (batch, seq)))
                for name, build in builds.items()
            }
            first = {name: contestant.turn() for name, contestant in contestants.items()}
            for ours, theirs in zip(*(turn["outputs"][0] for turn in first.values()), strict=True):
                different = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
                assert different < 1e-5, f"{rule}: they differ by {different:.1e}"
            turns = {name: functools.partial(contestant.turn, calls) for name, contestant in contestants.items()}
            taken = alternate(turns, rounds)
        times = lambda name, clock, taken=taken: [1e3 * turn[clock] for turn in taken[name]]
        for name, found in results.items():
            for clock, label in (("wall", "wall"), ("cpu", "CPU time")):
                found[f"{rule}: {label}, ms"] = times(name, clock)
                found[f"{rule}: {label} / transformers"] = ratios(times(name, clock), times("transformers", clock))
            found[f"{rule}: first call, s"] = [first[name]["wall"]]
            found[f"{rule}: most memory, GB"] = [taken[name][-1]["peak"] / 1e9]
    settings = dict(batch=batch, seq=seq, rules={rule: RULES[rule]._asdict() for rule in rules}, rounds=rounds)
    report("delta_rule", "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
