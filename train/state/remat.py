"""How a step fits into memory: the options that say so, and what each --remat keeps for the backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
from jax.ad_checkpoint import checkpoint_policies

from kernels.attention import shared as flash
from kernels.delta_rule import shared as delta_rule
from kernels.quantized_matmul import shared as matmul
from train.base.help import Group, option
from train.base.program import ProgramOptions
from train.state.offload import OffloadOptions
from train.state.rounding import WeightsOptions
from zoo.nn.stack import LAYER_INPUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(OffloadOptions, WeightsOptions, ProgramOptions):
    """The size of a step, and what it computes in and where, in `Options`."""

    help_group: ClassVar[Group] = Group.STEP

    seq_len: int = 0
    """Number of tokens of a row. 0: as many as the model has positions, at most 2,048."""
    batch: int = 4
    """Number of rows of a step."""
    microbatches: int = 1
    """Number of parts in which a step computes its rows, one after another, to save memory. The update is the same.
    With --router-balance, and for the kto loss, each part needs one more forward pass."""
    full_processes: int = option(0, group=Group.DEVICES, rare=True)
    """Number of processes when none is lost, which train.launch --elastic sets. While there are fewer, a step has more
    microbatches, so that a device has no more rows at a time."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the forward and backward pass; for weights see --weights-dtype. auto: bfloat16, but float32 on a
    CPU."""
    matmul: Literal["float", "int8", "fp8"] = option("float", rare=True)
    """Data type in which the layers' linear maps are multiplied. float: --compute-dtype. int8 and fp8: weights and
    activations are rounded row by row; fp8 rounds the backward pass too, with one scale a tensor. Weights are kept as
    --weights-dtype says. Embedding, head and routers are not rounded, nor are the gradients of experts."""
    remat: Literal["auto", "none", "dots", "attention", "full", "offload"] = "dots"
    """What the backward pass computes again to save memory. none: nothing. dots: all but matrix products, attention and
    recurrences. attention: whole layers but attention. full: whole layers. offload: whole layers, whose inputs are kept
    in the memory of a GPU's or TPU's host. auto: the fastest of these that is estimated to fit the device, with at
    least --microbatches parts; it says which."""
    freeze: tuple[str, ...] = option((), group=Group.MODEL, rare=True)
    """Patterns of the paths of weights that are not trained, such as vision.* for a tower that sees, or embed_tokens.*
    and *norm*. They need no gradients and nothing of the optimizer. Layers of one kind have one path, and so are frozen
    together."""
    mesh: str = option("fsdp=-1", group=Group.DEVICES)
    """Number of devices along each axis, such as fsdp=4,tensor=2; -1 takes what is left. replica splits the batch; fsdp
    the batch and the parameters; tensor the work on each token; context the tokens of a row; expert a mixture's
    experts; stage the layers."""


# What is kept of each layer, from most memory to least: a function around it.
REMAT: dict[str, Callable[..., Callable] | None] = {
    "none": None,
    # The results of matrix products with weights, of attention and of recurrences, with the states that a recurrence's
    # backward pass needs; what is elementwise is computed again.
    "dots": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_from_both_policies(
            checkpoint_policies.dots_with_no_batch_dims_saveable,
            checkpoint_policies.save_only_these_names(matmul.SAVED, flash.SAVED, delta_rule.SAVED),
        ),
    ),
    # The layer's input, and what attention's backward kernel needs of its forward one: with long rows much is saved.
    "attention": functools.partial(
        jax.checkpoint, policy=checkpoint_policies.save_only_these_names(flash.SAVED), prevent_cse=False
    ),
    # The layer's input only: one more forward pass, a third more work.
    "full": jax.checkpoint,
    # The same, kept in the host's memory: nothing grows with the depth of the model but what crosses PCIe.
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
