"""The size and the memory of a step: its options, and the values that each --remat saves for the backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
from jax.ad_checkpoint import checkpoint_policies

from kernels.attention import QKV
from kernels.attention import shared as flash
from kernels.delta_rule import shared as delta_rule
from kernels.quantized_matmul import shared as matmul
from kernels.ragged_dot import SAVED as EXPERTS
from train.base.options import Group, OptionGroup, option
from zoo.nn.block import LAYER_INPUT
from zoo.nn.layers import MLP_GATE, MLP_UP
from zoo.nn.routing import LOGITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(OptionGroup):
    """Options for the size of a step, its data types, its memory, and its mesh."""

    help_group: ClassVar[Group] = Group.STEP

    seq_len: int = 0
    """Number of tokens of a row. 0: as many as the model has positions, at most 2,048."""
    batch: int = 4
    """Number of rows of a step."""
    microbatches: int = option(1, identity=False)
    """Number of parts in which a step computes its rows, one after another, to save memory. The update is the same.
    With --router-balance, and for the kto loss, each part needs one more forward pass."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the forward and backward pass; for weights see --weights-dtype. auto: bfloat16, but float32 on a
    CPU."""
    matmul: Literal["float", "int8", "fp8", "mxfp8"] = option("float", rare=True)
    """Data type in which the layers' linear maps are multiplied. float: --compute-dtype. int8 and fp8: weights and
    activations are rounded row by row; fp8 rounds the backward pass, too, with one scale a tensor. mxfp8: both
    passes have a scale for 32 neighbours, as Blackwell multiplies them, and experts are as with fp8. The weights are
    kept in --weights-dtype. Embedding, head and routers are not rounded, nor are the gradients of experts."""
    remat: str = option("dots", identity=False)
    """Values that the backward pass recomputes to save memory. none: nothing. dots: all but matrix products, attention
    and recurrences. attention: whole layers but attention. full: whole layers. offload: whole layers, whose inputs are
    kept in the memory of a GPU's or TPU's host. Or names of arrays, such as attention_out=keep,mlp_up=offload: all but
    these, which are kept on the device or in the host's memory (docs/plan.md lists the names). auto: the fastest that
    is estimated to fit the device, with at least --microbatches parts; a line prints the choice."""
    mesh: str = option("fsdp=-1", group=Group.DEVICES, identity=False)
    """Number of devices along each axis, such as fsdp=4,tensor=2; -1 takes what is left. replica splits the batch; fsdp
    the batch and the parameters; tensor the work on each token; context the tokens of a row; expert a mixture's
    experts; stage the layers."""


# Arrays that layers name (`jax.ad_checkpoint.checkpoint_name`), for --remat.
IN_KERNELS = (flash.SAVED, delta_rule.OUT, delta_rule.STATES, EXPERTS, matmul.SAVED)  # whose products no policy sees
NAMES = (QKV, MLP_GATE, MLP_UP, LOGITS, *IN_KERNELS, LAYER_INPUT)
# Policy -> a function that wraps a layer, and saves less the further down it stands.
REMAT: dict[str, Callable[..., Callable] | None] = {
    "none": None,
    # Saves the results of matrix products with weights, of attention and of recurrences, with the states that a
    # recurrence's backward pass needs. Elementwise operations are recomputed.
    "dots": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_from_both_policies(
            checkpoint_policies.dots_with_no_batch_dims_saveable,
            checkpoint_policies.save_only_these_names(*IN_KERNELS),
        ),
    ),
    # Saves the layer's input, and the values that attention's backward kernel needs: with long rows, these save much
    # recomputing.
    "attention": functools.partial(
        jax.checkpoint, policy=checkpoint_policies.save_only_these_names(flash.SAVED), prevent_cse=False
    ),
    # Saves the layer's input only: costs one more forward pass, a third more work.
    "full": jax.checkpoint,
    # Saves the same in the host's memory: only the traffic over PCIe grows with the depth of the model.
    "offload": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}


def remat_of(text: str) -> Callable[..., Callable] | None:
    """Returns the function that wraps a layer, for --remat: one of `REMAT`, or one for names of arrays.

    Raises:
        ValueError: `text` is neither a policy nor a list such as "attention_out=keep,mlp_up=offload".
    """
    if text in REMAT:
        return REMAT[text]
    places = {place: kept_names(text, place) for place in ("keep", "offload")}
    policy = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=places["keep"], names_which_can_be_offloaded=places["offload"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return functools.partial(jax.checkpoint, policy=policy)


def kept_names(text: str, place: Literal["keep", "offload"]) -> list[str]:
    """Returns the names that a list for --remat has with "keep" or "offload".

    Raises:
        ValueError: as `remat_of` does.
    """
    found = []
    for part in text.split(","):
        name, _, where = part.strip().partition("=")
        if name not in NAMES or where not in ("keep", "offload"):
            raise ValueError(
                f"--remat {text}: write {', '.join(REMAT)}, in training also auto, or keep or offload for each name of "
                f"an array, as in attention_out=keep,mlp_up=offload; the names are {', '.join(NAMES)}."
            )
        found += [name] if where == place else []
    return found
