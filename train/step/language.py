"""The objective of language models: the cross-entropy of the next token."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

import kernels
from train.base.options import Group, OptionGroup, option
from train.state.mesh import positions_of
from train.step.mtp import mtp_loss
from train.step.step import Batch, Losses, Objective, Scalars
from zoo.nn.model import AbstractModel, Images
from zoo.nn.stack import Reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions(OptionGroup):
    """Options for learning to predict the next token."""

    help_group: ClassVar[Group] = Group.METHOD

    z_loss: float = option(0.0, rare=True)
    """Weight of log(Z)^2 in the loss, which keeps logits from growing; 1e-4 in PaLM. 0: without this term."""
    mtp_weight: float = option(0.0, rare=True)
    """Weight of the loss of the token after the next, for which models with the part "mtp" have a module; 0.3, then 0.1
    in DeepSeek V3's paper. 0: without that module."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names the optional parts of the model that the loss needs, see `zoo.load`."""
        return ("mtp",) * bool(self.mtp_weight)

    def objective(self) -> Objective:
        return functools.partial(cross_entropy, z_loss=self.z_loss, mtp_weight=self.mtp_weight)


def features(model: AbstractModel, batch: Batch) -> tuple[Float[Array, "batch seq embed"], Reports]:
    """Returns the features of a batch's tokens, and the reports of the layers."""
    places = {"positions": positions_of(batch), "segments": batch["segments"], "branches": batch.get("branches")}
    at: Any = places | _images_of(batch)
    x, _, reports = model.hidden(batch["tokens"], **at)
    return x, reports


def _images_of(batch: Batch) -> dict[str, Images]:
    """Returns the `images` of a batch on the devices, with the pictures of all rows in one axis. {} without images."""
    if "patches" not in batch:
        return {}
    patches, grids, image = batch["patches"], batch["grids"], batch["image"]
    rows, slots = patches.shape[:2]
    number = jnp.where(image < 0, -1, image + slots * jnp.arange(rows)[:, None])
    patches, grids = patches.reshape(-1, *patches.shape[2:]), grids.reshape(-1, 2)
    return {"images": Images(patches, grids, number, batch["feature"])}


def cross_entropy(
    model: AbstractModel,
    batch: Batch,
    reference: None = None,
    means: Scalars | None = None,
    *,
    chunk: int = 0,
    z_loss: float = 0.0,
    mtp_weight: float = 0.0,
) -> Losses:
    """Computes the objective of language models: `kernels.cross_entropy` (`chunk`, `z_loss`) of a batch's targets.

    A `chunk` of 0 means 2,048 tokens, or three times the model's width if that is more. Each chunk reads and writes the
    head's gradients, which then take 2/3 of the bytes of its logits. The sums are "loss", in nats, and "accuracy", the
    number of targets whose logit is largest. `mtp_weight` times the sum "mtp_loss" is added to the total.
    """
    x, reports = features(model, batch)
    losses = functools.partial(kernels.cross_entropy, model.unembed, chunk=chunk or max(2048, 3 * x.shape[-1]))
    total, found = losses(x, batch["targets"], batch["loss_mask"], z_loss=z_loss)
    sums = {"loss": found["loss"], "accuracy": found["correct"]}
    if mtp_weight:
        more, sums["mtp_loss"], report = mtp_loss(model, x, batch, losses)
        total, reports = total + mtp_weight * more, (*reports, (report,))
    return total, jnp.sum(batch["loss_mask"] != 0), sums, reports
