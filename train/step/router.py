"""Training of a mixture's routers, beside the objective: their losses, and their biases."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from train.base.options import Group, OptionGroup, option
from zoo.nn.model import Family
from zoo.nn.moe import Routing
from zoo.nn.stack import Reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterOptions(OptionGroup):
    """Options for keeping the routers of a mixture of experts balanced."""

    help_group: ClassVar[Group] = Group.METHOD

    router_balance: float = option(0.0, rare=True)
    """Weight of the load-balancing loss in a mixture of experts, on the scale of transformers' router_aux_loss_coef. If
    all experts are used alike, this loss is the number of experts that a token chooses. 0.01 in Switch Transformers,
    0.001 in Qwen3. 0: without this loss."""
    router_sequence: float = option(0.0, rare=True)
    """Weight of the sequence-wise balance loss in a mixture of experts, which is 1 for each row whose experts are used
    alike; 0.0001 in DeepSeek V3. 0: without this loss."""
    router_z: float = option(0.0, rare=True)
    """Weight of the router z-loss in a mixture of experts, which keeps the routers' logits from growing; 0.001 in
    ST-MoE. 0: without this loss."""
    router_bias_rate: float = option(0.0, rare=True)
    """Amount by which each step moves the biases of routers, in models that have such biases, towards an even load;
    0.001 in DeepSeek V3's paper. 0: the biases stay as they are."""


def rebalancing(options: RouterOptions, family: Family, *, adapters: bool) -> Callable[[Any, Any], Any] | None:
    """Returns the family's `rebalance` with the rate --router-bias-rate; None without that option.

    Raises:
        ValueError: the routers have no biases, or only adapters are trained.
    """
    if not options.router_bias_rate:
        return None
    if adapters or family.rebalance is None:
        why = "adapters leave routers alone" if adapters else f"the routers of {family.name} have no biases"
        raise ValueError(f"--router-bias-rate {options.router_bias_rate}, but {why}.")
    return functools.partial(family.rebalance, rate=options.router_bias_rate)


def routings_of(reports: Reports) -> list[Routing]:
    """Picks the routers' reports from the reports of all layers: one for each entry of the `Stack` with a router."""
    is_routing = lambda report: isinstance(report, Routing)
    return [report for report in jax.tree.leaves(reports, is_leaf=is_routing) if is_routing(report)]


def router_loss(
    reports: Reports, tokens: Int[Array, ""], loads: Sequence[Array] = (), *, balance: float, sequence: float, z: float
) -> Float[Array, ""]:
    """Computes the two balance losses plus the router z-loss, with these weights, each a mean over the layers.

    If the reports are of a part of a batch, the result is the part's share: `tokens` is the number of tokens of the
    whole batch, and `loads` are the loads of its experts.
    """
    routings = [r.share_of(tokens, load) for r, load in itertools.zip_longest(routings_of(reports), loads)]
    weighted = lambda r: balance * r.balance_loss() + sequence * r.sequence_loss() + z * r.z_loss()
    return mean_of_layers([weighted(routing) for routing in routings])


def router_metrics(reports: Reports) -> dict[str, Float[Array, ""]]:
    """Returns "balance", the mean of the layers' `Routing.imbalance`, if any layer has a router."""
    routings = routings_of(reports)
    return {"balance": mean_of_layers([routing.imbalance() for routing in routings])} if routings else {}


def mean_of_layers(values: Sequence[Float[Array, "*layers"]]) -> Float[Array, ""]:
    return jnp.mean(jnp.concatenate([value.reshape(-1) for value in values]))
