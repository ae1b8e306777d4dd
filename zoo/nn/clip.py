"""Attention whose logits can be scaled by its weights, for QK-clip (Kimi K2, arXiv:2507.20534, section 2.1).

A family says by the type of its attention that this is possible. A norm of queries or keys rules it out: it undoes what
is done to the weights before it. Such logits are bounded by the norms' weights.
"""

import abc
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.nn.layers import AbstractLinear


A = TypeVar("A", bound="AbstractScalableAttention")


class AbstractScalableAttention(eqx.Module):
    """Softmax attention whose queries and keys are rows of its linear maps times features, possibly rotated."""

    @abc.abstractmethod
    def row_factors(self, factor: Float[Array, " heads"]) -> dict[str, Float[Array, " rows"]]:
        """Returns name of a linear map -> factors of its rows, which multiply the logits of each head by `factor`.

        Logits of a head whose factor is 1 stay as they are, bit for bit: what heads share is not scaled.
        """


class AbstractGroupedAttention(AbstractScalableAttention):
    """Attention with maps of queries and of keys, each of which has the rows of one head after another."""

    q_proj: eqx.AbstractVar[AbstractLinear]
    k_proj: eqx.AbstractVar[AbstractLinear]
    head_dim: eqx.AbstractVar[int]

    def row_factors(self, factor: Float[Array, " heads"]) -> dict[str, Float[Array, " rows"]]:
        rows = lambda factor: jnp.repeat(factor, self.head_dim)
        if self.k_proj.shape[-2] < self.q_proj.shape[-2]:
            # Several heads read a key. To scale it would scale the logits of all of them.
            return {"q_proj": rows(factor)}
        return {"q_proj": rows(jnp.sqrt(factor)), "k_proj": rows(jnp.sqrt(factor))}


def scaled(attention: A, factor: Float[Array, " heads"]) -> A:
    """Returns the attention with other weights, whose logits are those of before times the factor of each head."""
    for name, rows in attention.row_factors(factor).items():
        column = lambda a, rows=rows: rows.reshape(-1, *(1,) * (a.ndim - 1))
        linear = jax.tree.map(lambda a, column=column: a * column(a), getattr(attention, name))  # a bias, too
        attention = eqx.tree_at(lambda m, name=name: getattr(m, name), attention, linear)
    return attention
