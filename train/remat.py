"""What the backward pass computes again, to save memory: the values of --remat."""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_policies

from kernels.matmul import SAVED
from zoo.nn.stack import LAYER_INPUT


# What is kept of each layer, from most memory to least: a function around the body of the layers' scan.
# In a scan nothing can be merged with the forward pass anyway, so `prevent_cse` would only hold back the compiler.
REMAT: dict[str, Callable[[Callable], Callable] | None] = {
    "none": None,
    # The results of matrix products with weights; attention and what is elementwise is computed again.
    "dots": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_from_both_policies(
            checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(SAVED)
        ),
        prevent_cse=False,
    ),
    # The layer's input only: one more forward pass, a third more work.
    "full": functools.partial(jax.checkpoint, prevent_cse=False),
    # The same, kept in the host's memory: nothing grows with the depth of the model but what crosses PCIe.
    "offload": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        prevent_cse=False,
    ),
}
