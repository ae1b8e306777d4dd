"""Ways to fit a step into a device's memory, for `--remat auto`: by estimates, since compiling takes minutes."""

import functools
import itertools
import math
from collections import Counter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from kernels.attention import QKV
from kernels.attention.shared import SAVED as OUT
from kernels.delta_rule import shared as delta_rule
from kernels.mesh import BATCH, CONTEXT, STAGE, TENSOR
from kernels.ragged_dot import SAVED as EXPERTS
from train.base.flops import Products, products_per_token
from train.state.remat import StepOptions, kept_names
from train.state.state import StateOptions, Trained
from zoo.mesh import make_mesh
from zoo.nn.layers import MLP_GATE, MLP_UP
from zoo.nn.model import AbstractConfig
from zoo.nn.routing import LOGITS
from zoo.registry import family_of
from zoo.surgery import cast
from zoo.weights.checkpoint import skeleton


REMATS = ("none", "dots", "attention", "full", "offload")  # from most memory to least
# Names to keep, between "dots" and "attention": the results of the widest matrices; and of all but the narrowest.
WIDE = (OUT, delta_rule.OUT, delta_rule.STATES, MLP_GATE, MLP_UP)
BY_NAME = (WIDE, (*WIDE, QKV, EXPERTS))
TRACED = 256  # tokens of a traced forward pass: enough for the kernels of long rows
MARGIN = 0.92  # share of the memory that a step may be estimated to need
HOST = 14_000.0  # FLOPs of an H200 in the time in which a byte crosses PCIe
# The cost of a microbatch for each parameter, in FLOPs of the same time: the parameter's gradient is read and added to
# a sum in float32, which moves 10 bytes, while an H200 computes 167 FLOPs a byte.
SUM = 1670.0


class Candidate(NamedTuple):
    """A remat and a number of microbatches for a step, with their estimated cost."""

    remat: str
    microbatches: int
    needed: float  # bytes of a device, estimated
    work: float  # FLOPs of a device, to compare candidates

    def __str__(self) -> str:
        return f"--remat {self.remat} --microbatches {self.microbatches}"


def saved_bytes(config: AbstractConfig, mesh: Mesh, *, rows: float | int, seq: int, remat: str) -> float:
    """Estimates the bytes that a device saves of `rows` rows, in all layers, for the backward pass."""
    tokens = rows * seq / math.prod(mesh.shape[axis] for axis in (*BATCH, CONTEXT))
    inputs = 2.0 * tokens * config.hidden_size * config.num_hidden_layers
    inputs /= mesh.shape[TENSOR] if mesh.shape[CONTEXT] == mesh.shape[STAGE] == 1 else 1  # nn.block.spread_tokens
    # The results of products: a product has, for each token, about as many numbers as it has weights / model width.
    results = 2 * tokens * products_per_token(config, seq).layers / config.hidden_size / mesh.shape[TENSOR]
    outputs = 2 * tokens * products_per_token(config, 1).attention / mesh.shape[TENSOR]  # attention's outputs
    named = bytes_by_name(config, mesh.devices.flat[0])
    states = tokens * named.get(delta_rule.STATES, 0.0) / mesh.shape[TENSOR]  # of recurrences, before each chunk
    by_remat = {
        "none": inputs + 2 * results + states,
        "dots": inputs + results + states,
        "attention": inputs + outputs,
        "full": inputs,
    }
    if remat in (*by_remat, "offload"):
        return by_remat.get(remat, 0.0)
    kept = sum(named.get(name, 0.0) for name in kept_names(remat, "keep"))
    return inputs + tokens * kept / mesh.shape[TENSOR]


@functools.lru_cache
def bytes_by_name(config: AbstractConfig, device: Any = None) -> dict[str, float]:
    """Counts the bytes that all layers have of a token under each name for --remat, in bfloat16.

    It traces a forward pass of `TRACED` tokens, or as many as there are positions, before a backward pass.

    Args:
        device: one of the devices, whose kernels may keep an array in another dtype. None: JAX's default device.
    """
    tokens = min(TRACED, config.max_position_embeddings)
    model = eqx.filter_eval_shape(lambda model: cast(model, jnp.bfloat16), skeleton(family_of(config), config))
    trained, rest = eqx.partition(model, lambda array: jnp.issubdtype(array.dtype, jnp.inexact))
    forward = lambda trained, rest, ids: jax.vjp(lambda m: eqx.combine(m, rest).hidden(ids)[0], trained)[0]
    with jax.set_mesh(make_mesh(devices=[device or jax.devices()[0]])):
        traced = jax.make_jaxpr(forward)(trained, rest, jax.ShapeDtypeStruct((1, tokens), jnp.int32))
    return {name: size / tokens for name, size in _named_in(traced.jaxpr).items()}


def _named_in(jaxpr: Any) -> Counter[str]:
    """Sums the bytes of a traced function's named arrays, by name."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            array = equation.outvars[0].aval
            found[equation.params["name"]] += math.prod(array.shape) * array.dtype.itemsize
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            found.update({name: times * size for name, size in _named_in(inner).items()})
    return found


def recomputed(config: AbstractConfig, seq: int, remat: str) -> float:
    """Counts the multiply-adds of a token that the backward pass computes again.

    An array that is kept by its name saves a product with the features of a layer; attention's output saves attention.
    """
    p = products_per_token(config, seq)
    if remat in REMATS:
        return recomputed_of(p, remat)
    kept, named = kept_names(remat, "keep") + kept_names(remat, "offload"), bytes_by_name(config)
    results = sum(named.get(name, 0.0) / 2 for name in kept if name in (QKV, MLP_GATE, MLP_UP, LOGITS, EXPERTS))
    return max(0.0, p.layers - results * config.hidden_size) + p.attention * (OUT not in kept)


def recomputed_of(p: Products, remat: str) -> float:
    """Counts those of the multiply-adds `p` that the backward pass computes again, with one of `REMATS`."""
    return {"none": 0.0, "dots": 0.0, "attention": p.layers}.get(remat, p.layers + p.attention)


def candidates(
    step: StepOptions, kept: StateOptions, trained: Trained, mesh: Mesh, held: float | int
) -> list[Candidate]:
    """Lists every remat with every number of microbatches that the mesh allows, the least work first.

    Remat "none" is left out: in compiled steps "dots" is as fast, and takes less memory. Of lists of names there are
    those of `BY_NAME`; to compute a product again is faster than to fetch its result from the host's memory.

    Args:
        step: gives the rows and the least number of microbatches.
        trained: its abstract arrays have shardings.
        held: bytes of a device before a step: the state, and all arrays that are not trained.
    """
    config, frozen, rows, seq = trained.config, trained.adapters, step.batch, step.seq_len
    copied = kept.needs_copy(step.compute_dtype)
    shape, p, found = mesh.shape, products_per_token(config, seq), []
    itemsize = jax.numpy.dtype(step.compute_dtype).itemsize
    shares = math.prod(shape[axis] for axis in BATCH)
    leaves = jax.tree.leaves(trained.abstract)
    parameters = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in leaves)
    head = config.vocab_size * config.hidden_size / shape[TENSOR]
    has = lambda names: [name for name in names if name in bytes_by_name(config)]
    by_name = [",".join(f"{name}=keep" for name in has(names)) for names in BY_NAME]
    for remat, parts in itertools.product((*REMATS[1:], *by_name), range(step.microbatches, rows // shares + 1)):
        if rows % parts or rows // parts % shares:
            continue
        tokens = rows // parts * seq / shares / shape[CONTEXT]
        # Gradients. With several parts there are also one part's gradients in float32, beside their sum.
        sums, first = parameters * (itemsize + 8 * (parts > 1)), 4 * parameters * (parts > 1)
        chunk = min(tokens, max(2048, 3 * config.hidden_size))  # see `train.step.language.cross_entropy`
        logits = chunk * config.vocab_size / shape[TENSOR] * (2 * itemsize + 4 * (itemsize > 2))
        weights = head * itemsize if frozen else head * (2 * itemsize + 4)  # with a chunk's gradient, and their sum
        # One layer: its gathered weights, its recomputed activations, and the gradients of these.
        layer = itemsize * p.layers / config.num_hidden_layers * (2 + 3 * tokens / config.hidden_size) / shape[TENSOR]
        doubled = "none" if frozen and remat == "dots" else remat  # an adapter's result is kept beside its product's
        keeps = itemsize / 2 * saved_bytes(config, mesh, rows=rows / parts, seq=seq, remat=doubled)
        copies = float(parameters * itemsize * copied)
        needed = held + copies + keeps + max(first + logits + weights, sums + layer)
        weights_work = (2 if frozen else 3) * (p.layers + p.head)
        products = weights_work + 3 * p.attention + recomputed(config, seq, remat)
        work = 2 * parts * tokens * products / shape[TENSOR] + SUM * parameters * (parts - 1)
        if remat == "offload":
            work += 2 * HOST * saved_bytes(config, mesh, rows=rows, seq=seq, remat="full")
        found.append(Candidate(remat, parts, needed, work))
    return sorted(found, key=lambda each: each.work)
