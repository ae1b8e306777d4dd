"""The part that FlashAttention implementations share: sinks, derivatives, and NaN, around two kernels.

An implementation brings a forward kernel, which also returns the log-sum-exp of each query's logits (`lse`), and a
backward kernel, which recomputes the weights from `lse`, and otherwise needs only `delta`, the dot product of each
output with its gradient (FlashAttention-2, arXiv:2307.08691).

Sinks never reach a kernel. A sink only adds to the denominator: lse' = log(exp(lse) + exp(sink)), and the output
shrinks by exp(lse - lse'). The same backward kernel, given lse', yields the exact gradients; that of the sink is
-sum(exp(sink - lse') * delta). Kernels whose softmax is in powers of two keep lse to base 2: converted to a natural
logarithm and back, it would no longer cancel with large logits.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels.attention.reference import LOWEST, finite, poison
from kernels.masks import Mask
from kernels.tokens import Tokens


# The name, for policies of jax.checkpoint, of all that the backward kernels need besides q, k and v. If a policy saves
# it, the forward kernel runs once.
SAVED = "attention_out"


class Formula(NamedTuple):
    """The arguments of attention that are not arrays."""

    scale: float
    mask: Mask
    softcap: float | None


def marked(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Returns q, k and v with NaN in all features of each query or key that is not finite or whose value is not."""
    return q + poison(q), jnp.where(jnp.isnan(poison(k) + poison(v)), jnp.nan, k), finite(v)


class Flash(NamedTuple):
    """The two kernels of an implementation; q is (batch, seq, heads, dim), lse and delta are (batch, heads, seq).

    `forward(formula, q, k, v, q_tokens, kv_tokens)` returns the output and lse. The output is in q's dtype or in
    float32, which takes twice the bytes and halves the error of bfloat16's dq and dk. lse is in float32. A query that
    sees nothing has an output of zeros and an lse of LOWEST; one that sees a NaN has NaN in both. A key that is not
    finite, or whose value is not, arrives with NaN in all its features and with a finite value. So kernels have to mask
    the logits before they use them.

    `backward(formula, q, k, v, q_tokens, kv_tokens, lse, out, d_out)` returns the gradients of q, k and v; most
    implementations use `delta_of(out, d_out)`. lse, out and d_out may hold NaN, so kernels have to mask the weights and
    the logits' gradients.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    features: int = 1  # features of a head are padded with zeros to a multiple of this
    base_2: bool = False  # lse is a logarithm to base 2, not a natural one
    marked: Callable[..., tuple[Array, Array, Array]] = marked  # makes the forward kernel's q, k and v


def attention(
    flash: Flash,
    formula: Formula,
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.attention` with these two kernels."""
    whole = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % flash.features)])
    out = _attention(flash, formula, whole(q), whole(k), whole(v), sinks, q_tokens, kv_tokens)
    return out[..., : v.shape[3]]


def delta_of(
    out: Float[Array, "batch seq heads v_dim"], d_out: Float[Array, "batch seq heads v_dim"]
) -> Float[Array, "batch heads seq"]:
    """Returns the dot product of each output with its gradient."""
    return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)


def where(condition: Callable[..., Array], flash: Flash, other: Flash) -> Flash:
    """Returns kernels that run those of `flash` if the condition holds, and else those of `other`.

    The condition gets the arrays and tokens that the kernel of `flash` gets. Both kernels are in the program, and a
    `lax.cond` decides at run time: a GPU waits for the decision, some 20 us a kernel.
    """
    unit = _unit(flash) / _unit(other)  # the ratio of the two kinds of lse

    def other_forward(formula: Formula, q: Array, k: Array, v: Array, *tokens: Tokens) -> tuple[Array, Array]:
        given = (q, k, v) if flash.marked is other.marked else other.marked(q, k, v)
        out, lse = other.forward(formula, *given, *tokens)
        return out, unit * lse

    def other_backward(*args: Any) -> tuple[Array, Array, Array]:
        *first, lse, out, d_out = args
        return other.backward(*first, lse / unit, out, d_out)

    def either(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
        def run(formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens, *rest: Any) -> Any:
            args = q, k, v, q_tokens, kv_tokens, *rest
            here_, elsewhere_ = (functools.partial(branch, formula) for branch in (here, elsewhere))
            like = jax.eval_shape(here_, *args)
            cast = lambda *args: jax.tree.map(lambda x, y: x.astype(y.dtype), elsewhere_(*args), like)
            return jax.lax.cond(condition(*args), here_, cast, *args)

        return run

    return flash._replace(forward=either(flash.forward, other_forward), backward=either(flash.backward, other_backward))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    flash: Flash,
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Array:
    return _forward(flash, formula, q, k, v, sinks, q_tokens, kv_tokens)[0]


def _forward(
    flash: Flash,
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> tuple[Array, tuple]:
    out, lse = flash.forward(formula, *flash.marked(q, k, v), q_tokens, kv_tokens)
    if sinks is not None:
        add, exp = (jnp.logaddexp2, jnp.exp2) if flash.base_2 else (jnp.logaddexp, jnp.exp)
        with_sink = add(lse, _column(flash, sinks))
        share = exp(lse - with_sink).swapaxes(1, 2)[..., None]
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
        lse = with_sink
    # A float32 output is kept as two numbers of q's dtype: the rounded output, which is returned, and the remainder.
    # Together they take no more memory than float32 does, and the next layer keeps the rounded output anyway.
    near = jax.lax.reduce_precision(out, jnp.finfo(q.dtype).nexp, jnp.finfo(q.dtype).nmant)  # XLA may skip a cast
    rounded = checkpoint_name(near.astype(q.dtype), SAVED)
    rest = None if out.dtype == q.dtype else checkpoint_name((out - near).astype(q.dtype), SAVED)
    return rounded, (q, k, v, sinks, q_tokens, kv_tokens, rounded, rest, checkpoint_name(lse, SAVED))


def _backward(flash: Flash, formula: Formula, residuals: tuple, d_out: Array) -> tuple:
    q, k, v, sinks, q_tokens, kv_tokens, rounded, rest, lse = residuals
    out = rounded if rest is None else rounded.astype(jnp.float32) + rest.astype(jnp.float32)
    dq, dk, dv = flash.backward(formula, *map(finite, (q, k, v)), q_tokens, kv_tokens, lse, out, d_out)
    d_sinks = None
    if sinks is not None:
        exp = jnp.exp2 if flash.base_2 else jnp.exp
        d_sinks = -jnp.sum(exp(_column(flash, sinks) - lse) * delta_of(out, d_out), axis=(0, 2)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None, None


_attention.defvjp(_forward, _backward)


def _column(flash: Flash, sinks: Float[Array, " heads"]) -> Float[Array, "1 heads 1"]:
    """Returns the sinks as logarithms to the base of lse."""
    return jnp.maximum(_unit(flash) * sinks.astype(jnp.float32), LOWEST)[None, :, None]


def _unit(flash: Flash) -> float:
    """Returns the factor from natural logarithms to logarithms to the base of lse."""
    return math.log2(math.e) if flash.base_2 else 1.0
