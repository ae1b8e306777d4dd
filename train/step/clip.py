"""QK-clip (Kimi K2, arXiv:2507.20534, section 2.1): keeps attention logits from growing, by the weights of their heads.

A step records the largest logit of each head. After its update the weights of each head whose largest logit exceeds a
threshold are scaled, so that the logit would be the threshold. Layers report the logits beside what they report anyway.
"""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import Tokens
from kernels.attention import logits
from kernels.tokens import padding
from zoo.lora import combine
from zoo.nn.block import AbstractBlock, AbstractSharingBlock, Report, Shared, run_block
from zoo.nn.cache import AbstractCache
from zoo.nn.clip import AbstractScalableAttention, scaled
from zoo.nn.pipeline import Largest
from zoo.nn.stack import Reports
from zoo.registry import family_of
from zoo.surgery import modules


M = TypeVar("M")


class Logits(eqx.Module):
    """A layer's report: the largest attention logit of each head, before a softcap, beside the layer's own report."""

    report: Report
    largest: Largest  # [*layers, heads]


class Recorded(AbstractSharingBlock):
    """A layer that reports its `Logits`."""

    block: AbstractBlock

    def run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
        own: Float[Array, "batch seq dim"] | None,
        shared: Shared,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
        with logits.recorded() as found:
            x, cache, report, left = run_block(self.block, x, cache, at, own, shared)
        (each,) = found
        real = ~padding(at, x.shape[:2])
        largest = jnp.max(jnp.where(real[..., None], each, -jnp.inf), axis=(0, 1))
        return x, cache, Logits(report, Largest(largest)), left


def check_qk_clip(threshold: float, trained: Any, frozen: Any = None) -> None:
    """Raises a ValueError if a model can't be trained with this --qk-clip; 0 is without it.

    Args:
        trained, frozen: the two parts of the model, or their shapes.
    """
    if not threshold:
        return
    if threshold < 0:
        raise ValueError(f"--qk-clip {threshold:g}: give a logit above 0, such as 100; 0 is without clipping.")
    model = combine(trained, frozen)
    attentions = list(modules(model, AbstractScalableAttention))
    if not attentions:
        raise ValueError(
            f"--qk-clip {threshold:g}: the attention of {family_of(model).name} can't be clipped: it norms queries and "
            "keys, which bounds its logits, or has no softmax. docs/optimizers.md lists the families that can be."
        )
    heads = jax.ShapeDtypeStruct((model.config.num_attention_heads,), jnp.float32)
    for (path, attention), (_, part) in zip(attentions, modules(trained, AbstractScalableAttention), strict=True):
        for name in jax.eval_shape(attention.row_factors, heads):  # computes nothing: a plan's devices are not here
            if jax.tree.structure(getattr(part, name)) != jax.tree.structure(getattr(attention, name)):
                raise ValueError(
                    f"--qk-clip {threshold:g} scales {path}.{name}, which is not trained: leave it out, or train all "
                    "queries and keys, without adapters."
                )


def recorded(model: M) -> M:
    """Returns the model with layers that report their `Logits`, where these can be scaled."""
    is_block = lambda m: isinstance(m, AbstractBlock)
    scalable = lambda m: is_block(m) and any(modules(m, AbstractScalableAttention))
    return jax.tree.map(lambda m: Recorded(m) if scalable(m) else m, model, is_leaf=is_block)


def largest_of(reports: Reports) -> list[Float[Array, "*layers heads"]]:
    """Picks the largest logits from the reports of all layers."""
    is_logits = lambda report: isinstance(report, Logits)
    return [each.largest.value for each in jax.tree.leaves(reports, is_leaf=is_logits) if is_logits(each)]


def logit_metrics(reports: Reports) -> dict[str, Float[Array, ""]]:
    """Returns "attention_logit", the largest of all heads and layers, if they were recorded."""
    found = largest_of(reports)
    return {"attention_logit": jnp.max(jnp.stack([jnp.max(each) for each in found]))} if found else {}


def clipped(parameters: M, reports: Reports, threshold: float) -> M:
    """Scales the attention of each head whose largest logit exceeds the threshold, by threshold / logit.

    Args:
        parameters: the updated ones.
        reports: those of the step, which hold the `Logits` of the attention modules in their order in the model.
    """
    attentions = lambda tree: [attention for _, attention in modules(tree, AbstractScalableAttention)]

    def clip(attention: AbstractScalableAttention, largest: Float[Array, "*layers heads"]) -> Any:
        factor = jnp.where(largest > threshold, threshold / largest, 1.0)
        return (eqx.filter_vmap(scaled) if factor.ndim > 1 else scaled)(attention, factor)

    new = [clip(*each) for each in zip(attentions(parameters), largest_of(reports), strict=True)]
    return eqx.tree_at(attentions, parameters, new)
