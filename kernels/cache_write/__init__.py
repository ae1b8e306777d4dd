"""Writing of new tokens' keys and values into a cache, in place."""

import numpy as np
from jaxtyping import Array, Int, Shaped

from kernels import dispatch


def cache_write(
    stores: tuple[Shaped[Array, "layers rows slots ..."], ...],
    new: tuple[Shaped[Array, "batch seq ..."], ...],
    layer: Int[Array, ""],
    row: Int[Array | np.ndarray, "batch _"],
    slot: Int[Array, "batch seq"],
    *,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "layers rows slots ..."], ...]:
    """Returns each of `stores`, such as keys and values, with its new vectors at `[layer, row, slot]`.

    Vectors are cast to the dtype of their store. A row or a slot that there is not, from the axis's length on, is not
    written. No two tokens may have the same place. `row` has one number for each token, or for all of a row's tokens.

    `implementation` is one of

    - "reference": a scatter by XLA for each of `stores`.
    - "triton": for NVIDIA GPUs, up to 16 tokens in each row: one kernel for all of `stores`.
    - "tpu": on TPUs, for vectors that XLA stores with heads before slots (`kernels.by_head`), up to 128 tokens in all.

    None chooses "triton" on a GPU and "tpu" on a TPU, and "reference" for what these refuse.

    Raises:
        ValueError: the implementation asked for cannot take these arguments.
    """
    return dispatch.run("cache_write", implementation, stores, new, layer, row, slot)
