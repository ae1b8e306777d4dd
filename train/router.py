"""The losses of the routers of a mixture of experts, beside a batch's own: see `zoo.nn.moe.Routing`."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.nn.moe import Routing
from zoo.nn.stack import Reports


def routings_of(reports: Reports) -> list[Routing]:
    """What routers did, of all that a model's layers reported: one for each entry of the `Stack` that has a router."""
    is_routing = lambda report: isinstance(report, Routing)
    return [report for report in jax.tree.leaves(reports, is_leaf=is_routing) if is_routing(report)]


def router_loss(
    reports: Reports, tokens: Int[Array, ""], loads: Sequence[Array] = (), *, balance: float, z: float
) -> Float[Array, ""]:
    """The load-balancing loss and the router z-loss with these weights, each a mean over the layers.

    Of a part of a batch, its share: `tokens` are those of the whole batch, and `loads` those of its experts.
    """
    routings = [r.share_of(tokens, load) for r, load in itertools.zip_longest(routings_of(reports), loads)]
    return mean_of_layers([balance * r.balance_loss() + z * r.z_loss() for r in routings])


def mean_of_layers(values: Sequence[Float[Array, "*layers"]]) -> Float[Array, ""]:
    return jnp.mean(jnp.concatenate([value.reshape(-1) for value in values]))
