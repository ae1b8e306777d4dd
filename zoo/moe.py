"""Mixtures of experts: tokens grouped by expert and back, without dropping any, and what routers did, for the losses.

Which experts a token goes to, and with what weight, is each family's own few lines.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Groups(eqx.Module):
    """Every (token, choice) pair as one row, sorted by the expert that was chosen: what experts' linears work on."""

    order: Int[Array, " rows"]  # row -> index of its pair, token by token
    sizes: Int[Array, " experts"]  # rows of each expert
    choices: int = eqx.field(static=True)  # a token's

    def __init__(self, chosen: Int[Array, "tokens choices"], experts: int):
        """`chosen`: the experts of each token, out of so many."""
        self.order = jnp.argsort(chosen.reshape(-1), stable=True)
        self.sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        self.choices = chosen.shape[1]

    def rows(self, x: Float[Array, "tokens embed"]) -> Float[Array, "rows embed"]:
        """Each row's token."""
        return x[self.order // self.choices]

    def each(self, values: Float[Array, "tokens choices"]) -> Float[Array, "rows 1"]:
        """Each row's value, such as its weight."""
        return values.reshape(-1)[self.order][:, None]

    def sum(self, y: Float[Array, "rows embed"]) -> Float[Array, "tokens embed"]:
        """For each token the sum over its rows, in float32."""
        pairs = y[jnp.argsort(self.order)].reshape(-1, self.choices, y.shape[-1])
        return jnp.sum(pairs.astype(jnp.float32), axis=1).astype(y.dtype)


class Routing(eqx.Module):
    """What one router did with the tokens that count, or those of a stack of layers: sums over the tokens."""

    tokens: Float[Array, "*layers"]
    load: Float[Array, "*layers experts"]  # tokens that chose each expert
    probability: Float[Array, "*layers experts"]  # what each token gives to each expert, chosen or not; 1 in all
    squared_log_z: Float[Array, "*layers"]  # log of the sum of the exponentials of a token's logits, squared

    @classmethod
    def of(
        cls,
        logits: Float[Array, "tokens experts"],
        probability: Float[Array, "tokens experts"],
        chosen: Int[Array, "tokens choices"],
        counts: Bool[Array, " tokens"] | None,
    ) -> "Routing":
        """`counts`: which tokens do, None for all; padding does not."""
        counted = jnp.ones(len(logits)) if counts is None else counts.astype(jnp.float32)
        pairs = jnp.repeat(counted, chosen.shape[1])
        return cls(
            jnp.sum(counted),
            jnp.zeros(logits.shape[1]).at[chosen.reshape(-1)].add(pairs),
            counted @ probability.astype(jnp.float32),
            counted @ jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)),
        )

    def balance_loss(self) -> Float[Array, "*layers"]:
        """The load-balancing loss of Switch Transformers (arXiv:2101.03961, section 2.2): 1 where all is even.

        The number of experts times the sum, over them, of the share of the choices and of the mean probability. Only
        the latter has a gradient.
        """
        share = self.load / jnp.maximum(jnp.sum(self.load, axis=-1, keepdims=True), 1)
        mean = self.probability / jnp.maximum(self.tokens, 1)[..., None]
        return self.load.shape[-1] * jnp.sum(share * mean, axis=-1)

    def z_loss(self) -> Float[Array, "*layers"]:
        """The router z-loss of ST-MoE (arXiv:2202.08906, section 4): the mean of the squared log of Z."""
        return self.squared_log_z / jnp.maximum(self.tokens, 1)
