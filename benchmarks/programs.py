"""The cases of `benchmarks.cases` in JAX: arrays, implementations, and the parts on which results are checked."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels
from benchmarks.cases import Case
from kernels import Causal, Chunk, Full, Mask, Window
from kernels.quantized_matmul.quantize import quantize


Arrays = tuple[Any, ...]


class Program:
    """A case in JAX. `arguments` returns arrays, and `function(name)` an implementation that computes with them.

    `gradients` lists the arguments by which each pass differentiates. `part` returns a part of the arguments. Its
    outputs, and its gradients for the arguments in `checked`, equal the same parts of the whole result.
    """

    gradients: Mapping[str, tuple[int, ...]] = types.MappingProxyType({})
    checked: tuple[int, ...] = ()

    def __init__(self, case: Any):
        self.case = case

    def arguments(self, key: jax.Array) -> Arrays:
        raise NotImplementedError

    def function(self, name: str | None) -> Callable[..., Any]:
        raise NotImplementedError

    def part(self, arguments: Arrays) -> Arrays:
        return arguments

    def part_of_output(self, out: Any) -> Any:
        return out


class Dense(Program):
    def arguments(self, key: jax.Array) -> Arrays:
        shape = (self.case.size, self.case.size)
        return tuple(jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(key))

    def function(self, name: str | None) -> Callable[..., Any]:
        return lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(x.dtype)

    def part(self, arguments: Arrays) -> Arrays:
        return arguments[0][-64:], arguments[1]

    def part_of_output(self, out: Any) -> Any:
        return out[-64:]


class Attention(Program):
    checked = (0, 1, 2)  # sinks' gradients are sums over all sequences

    @property
    def gradients(self) -> dict[str, tuple[int, ...]]:
        return {"backward": (0, 1, 2, 3) if self.case.sinks else (0, 1, 2)}

    def mask(self) -> Mask:
        c = self.case
        mask: Mask = Causal() if c.causal else Full()
        mask = mask & Window(c.window) if c.window else mask
        return mask & Chunk(c.chunk) if c.chunk else mask

    def arguments(self, key: jax.Array) -> Arrays:
        c, (q, k, v, sinks) = self.case, jax.random.split(key, 4)
        normal = lambda key, heads, dim: jax.random.normal(key, (c.batch, c.seq, heads, dim), c.dtype)
        sinks = jax.random.normal(sinks, (c.heads,)) if c.sinks else None
        return normal(q, c.heads, c.dim), normal(k, c.kv_heads, c.dim), normal(v, c.kv_heads, c.v_dim), sinks

    def function(self, name: str | None) -> Callable[..., Any]:
        c = self.case
        if name == "jax.nn cudnn":
            return lambda q, k, v, _: jax.nn.dot_product_attention(
                q, k, v, scale=c.dim**-0.5, is_causal=c.causal, implementation="cudnn",
                local_window_size=(c.window - 1, 0) if c.window else None,
            )  # fmt: skip

        def attention(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            length, index = c.seq // max(c.documents, 1), jnp.arange(c.seq)
            ids = jnp.broadcast_to(index // length, q.shape[:2]) if c.documents else None
            positions = jnp.broadcast_to(index % length, q.shape[:2]) if c.positions else None
            return kernels.attention(
                q, k, v, kernels.Tokens(positions, ids), scale=c.dim**-0.5, mask=self.mask(),
                softcap=c.softcap or None, sinks=sinks, implementation=name,
            )  # fmt: skip

        return attention

    def part(self, arguments: Arrays) -> Arrays:
        """Returns the last sequence's last key/value head, with the query heads that share it."""
        q, k, v, sinks = arguments
        group = self.case.heads // self.case.kv_heads
        return q[-1:, :, -group:], k[-1:, :, -1:], v[-1:, :, -1:], None if sinks is None else sinks[-group:]

    def part_of_output(self, out: Any) -> Any:
        return out[-1:, :, -(self.case.heads // self.case.kv_heads) :]


class Decode(Program):
    def arguments(self, key: jax.Array) -> Arrays:
        c, keys = self.case, jax.random.split(key, 3)
        q = jax.random.normal(keys[0], (c.batch, c.heads, c.dim), jnp.bfloat16)
        k, v = (jax.random.normal(k, (c.batch, c.kv_seq, c.kv_heads, c.dim), jnp.bfloat16) for k in keys[1:])
        return q, k, v, jnp.asarray(c.lengths() - 1)

    def function(self, name: str | None) -> Callable[..., Any]:
        scale = self.case.dim**-0.5
        return lambda q, k, v, last: kernels.decode_attention(
            q[:, None], k, v, kernels.Tokens(last[:, None]), scale=scale, implementation=name
        )[:, 0]

    def part(self, arguments: Arrays) -> Arrays:
        q, k, v, last = arguments
        return self.part_of_output(q), k[-1:, :, -1:], v[-1:, :, -1:], last[-1:]

    def part_of_output(self, out: Any) -> Any:
        return out[-1:, -(self.case.heads // self.case.kv_heads) :]


class Grouped(Program):
    gradients = types.MappingProxyType({"dx": (0,), "dw": (1,)})
    checked = (0, 1)

    def arguments(self, key: jax.Array) -> Arrays:
        c, (x, w) = self.case, jax.random.split(key)
        w = jax.random.normal(w, (c.groups, c.outs, c.ins), jnp.bfloat16) * c.ins**-0.5
        w = quantize(w, jnp.int8, "channel").values if c.int8 else w
        return jax.random.normal(x, (c.rows, c.ins), jnp.bfloat16), w, jnp.asarray(c.group_sizes())

    def product(self, name: str | None) -> Callable[..., Any]:
        if name == "lax.ragged_dot":
            return lambda x, w, sizes: lax.ragged_dot(x, w.astype(x.dtype).swapaxes(1, 2), sizes)
        return functools.partial(kernels.ragged_dot, implementation=name)

    def function(self, name: str | None) -> Callable[..., Any]:
        return self.product(name)

    def part(self, arguments: Arrays) -> Arrays:
        """Returns the last group with rows, and its rows."""
        x, *matrices, sizes = arguments
        group, rows = self._last()
        return x[rows], *(w[group : group + 1] for w in matrices), sizes[group : group + 1]

    def part_of_output(self, out: Any) -> Any:
        return out[self._last()[1]]

    def _last(self) -> tuple[int, slice]:
        sizes = self.case.group_sizes()
        group = int(np.flatnonzero(sizes)[-1])
        return group, slice(int(sizes[:group].sum()), int(sizes[: group + 1].sum()))


class Experts(Grouped):
    gradients = types.MappingProxyType({"all": (0, 1, 2, 3)})
    checked = (0, 1, 2, 3)

    def arguments(self, key: jax.Array) -> Arrays:
        c, keys = self.case, jax.random.split(key, 4)
        wide, narrow = (c.groups, c.outs, c.ins), (c.groups, c.ins, c.outs)
        matrix = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[2] ** -0.5
        gate, up, down = map(matrix, keys, (wide, wide, narrow))
        return jax.random.normal(keys[3], (c.rows, c.ins), jnp.bfloat16), gate, up, down, jnp.asarray(c.group_sizes())

    def function(self, name: str | None) -> Callable[..., Any]:
        dot = self.product(name)
        return lambda x, gate, up, down, sizes: dot(jax.nn.silu(dot(x, gate, sizes)) * dot(x, up, sizes), down, sizes)


class Gated(Grouped):
    def arguments(self, key: jax.Array) -> Arrays:
        c, keys = self.case, jax.random.split(key, 3)
        shape = (*([c.groups] if c.groups else []), c.outs, c.ins)
        gate, up = (jax.random.normal(key, shape, jnp.bfloat16) * c.ins**-0.5 for key in keys[:2])
        sizes = [jnp.asarray(c.group_sizes())] if c.groups else []
        return jax.random.normal(keys[2], (c.rows, c.ins), jnp.bfloat16), gate, up, *sizes

    def function(self, name: str | None) -> Callable[..., Any]:
        formula = lambda gate, up: jax.nn.silu(gate) * up
        if name != "two products":
            return lambda *arrays: kernels.gated_products(*arrays[:3], formula, *arrays[3:], implementation=name)
        one, several = (lambda x, w: x @ w.T), self.product("lax.ragged_dot")
        product = several if self.case.groups else one
        return lambda x, gate, up, *sizes: formula(product(x, gate, *sizes), product(x, up, *sizes))

    def part(self, arguments: Arrays) -> Arrays:
        return super().part(arguments) if self.case.groups else arguments

    def part_of_output(self, out: Any) -> Any:
        return super().part_of_output(out) if self.case.groups else out


class Quantized(Program):
    gradients = types.MappingProxyType({"all": (0, 1)})
    checked = (0, 1)

    def arguments(self, key: jax.Array) -> Arrays:
        c, (x, w) = self.case, jax.random.split(key)
        x = jax.random.normal(x, (c.rows, c.ins), jnp.bfloat16)
        w = jax.random.normal(w, (c.outs, c.ins), jnp.bfloat16) * c.ins**-0.5
        return (x, w, None) if c.training else (x, *quantize(w, self._dtype(), c.granularity))

    def function(self, name: str | None) -> Callable[..., Any]:
        c = self.case
        options = dict(activations=c.activations, gradients="quantized" if c.training else "float")
        matmul = kernels.fp8_matmul if c.dtype == "fp8" else kernels.int8_matmul
        return functools.partial(matmul, granularity=c.granularity, implementation=name, **options)

    def _dtype(self) -> Any:
        return jnp.int8 if self.case.dtype == "int8" else jnp.float8_e4m3fn


class CrossEntropy(Program):
    gradients = types.MappingProxyType({"all": (0, 1)})
    checked = (0,)  # the matrix's gradients are sums over all tokens

    def arguments(self, key: jax.Array) -> Arrays:
        c, keys = self.case, jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (c.batch, c.seq, c.embed), jnp.bfloat16)
        w = jax.random.normal(keys[1], (c.vocab, c.embed), jnp.bfloat16) * c.embed**-0.5
        return x, w, jax.random.randint(keys[2], (c.batch, c.seq), 0, c.vocab)

    def function(self, name: str | None) -> Callable[..., Any]:
        def loss(x: Any, w: Any, targets: Any) -> Any:
            unembed = lambda x: jnp.einsum("bse,ve->bsv", x, w)
            implementation = "reference" if name == "whole logits" else name
            return kernels.cross_entropy(unembed, x, targets, jnp.ones_like(targets), implementation=implementation)[0]

        return loss

    def part(self, arguments: Arrays) -> Arrays:
        x, w, targets = arguments
        return x[-1:, -256:], w, targets[-1:, -256:]


class DeltaRule(Program):
    gradients = types.MappingProxyType({"backward": (0, 1, 2, 3, 4)})
    checked = (0, 1, 2, 4)  # the decays' gradients are small differences of long sums

    def arguments(self, key: jax.Array) -> Arrays:
        """Returns q, k, v, decay and beta, distributed as in models. For Mamba-2, decay is A, and beta the step."""
        c, keys = self.case, jax.random.split(key, 5)
        normal = lambda key, *shape: jax.random.normal(key, (c.batch, c.seq, *shape))
        q, k, v = normal(keys[0], c.heads, c.dim), normal(keys[1], c.heads, c.dim), normal(keys[2], c.v_heads, c.v_dim)
        if c.erase:
            q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
            decay = jax.nn.log_sigmoid(normal(keys[3], c.v_heads, *[c.dim] * c.by_channel)) / 16
            beta = jax.nn.sigmoid(normal(keys[4], c.v_heads))
        else:
            decay = -1 - jnp.arange(c.v_heads) % 16.0
            beta = jnp.exp(jax.random.uniform(keys[4], (c.batch, c.seq, c.v_heads), minval=-7, maxval=-2.3))
        return *(x.astype(jnp.bfloat16) for x in (q, k, v)), decay, beta

    def function(self, name: str | None) -> Callable[..., Any]:
        c = self.case

        def delta_rule(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
            decay = decay if c.erase else decay * beta
            scale = c.dim**-0.5 if c.erase else 1.0
            return kernels.delta_rule(q, k, v, decay, beta, scale=scale, erase=c.erase, implementation=name)[0]

        return delta_rule

    def part(self, arguments: Arrays) -> Arrays:
        """Returns the last sequence's last query/key head, with the value heads that share it."""
        q, k, v, decay, beta = arguments
        group = self.case.v_heads // self.case.heads
        decay = decay[-1:, :, -group:] if self.case.erase else decay[-group:]
        return q[-1:, :, -1:], k[-1:, :, -1:], v[-1:, :, -group:], decay, beta[-1:, :, -group:]

    def part_of_output(self, out: Any) -> Any:
        return out[-1:, :, -(self.case.v_heads // self.case.heads) :]


class NotQuantized(Quantized):
    """The same product in bfloat16, with which a `Quantized` is compared."""

    def arguments(self, key: jax.Array) -> Arrays:
        c, (x, w) = self.case, jax.random.split(key)
        x = jax.random.normal(x, (c.rows, c.ins), jnp.bfloat16)
        return x, jax.random.normal(w, (c.outs, c.ins), jnp.bfloat16) * c.ins**-0.5

    def function(self, name: str | None) -> Callable[..., Any]:
        return lambda x, w: jnp.einsum("ri,oi->ro", x, w)


def program_of(case: Case, name: str | None = None) -> Program:
    return NotQuantized(case) if name == "bf16 matmul" else globals()[type(case).__name__](case)
