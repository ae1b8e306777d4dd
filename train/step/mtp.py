"""Multi-token prediction while training: the loss of the token after the next (see `zoo.nn.mtp`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

import kernels
from train.state.mesh import next_token, positions_of
from zoo.nn.model import AbstractModel
from zoo.nn.mtp import module_of


def mtp_loss(
    model: AbstractModel,
    x: Float[Array, "batch seq embed"],
    batch: Mapping[str, Shaped[Array, "batch ..."]],
    losses: Callable[..., tuple[Float[Array, ""], dict[str, Array]]],
) -> tuple[Float[Array, ""], Float[Array, ""], Any]:
    """Computes the module's loss on every target whose next token is a target of the same document.

    Args:
        x: features of the batch's tokens.
        losses: `kernels.cross_entropy` of the model's head, from features, targets and the targets' weights.

    Returns the loss to learn from, the cross-entropy to report (both sums), and the report of the module's layer.

    Raises:
        ValueError: the batch has images, for which the module's positions, those of text, would be wrong.
    """
    if "patches" in batch:
        raise ValueError("--mtp-weight is not for chats with images (--vision): leave one of the two out.")
    targets, mask, segments = batch["targets"], batch["loss_mask"] != 0, batch["segments"]
    mtp, embed_tokens = module_of(model)
    y, _, report = mtp(x, embed_tokens(targets), None, kernels.Tokens(positions_of(batch), segments))
    both = mask & next_token(mask, batch) & (segments == next_token(segments, batch))
    total, found = losses(y, next_token(targets, batch), both.astype(jnp.int32))
    return total, found["loss"], report
