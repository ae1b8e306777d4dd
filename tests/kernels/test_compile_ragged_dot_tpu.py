"""The TPU's ragged_dot compiles at the shapes of real models without spilling, and does not grow."""

import jax.numpy as jnp
import pytest

from kernels.ragged_dot import tpu
from tests.kernels.experts import DECODE, EXPERTS, fixed_matrices, training
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


def case(product, step=training, w_dtype=jnp.bfloat16, chips=()):
    """Returns a case in which no array may exceed the arguments, as one with a row for each token and group would."""
    return Case(step(tpu.ragged_dot), product.arguments(w_dtype), product.largest + 1, chips or tuple(CHIPS))


# Each product is on two of the chips, in turn, so that each chip has half of each model's.
CASES = {
    f"ragged_dot {name}": case(product, chips=tuple(CHIPS)[n % 2 :: 2])
    for n, (name, product) in enumerate(EXPERTS.items())
} | {
    "ragged_dot int8": case(EXPERTS["Qwen3 30B-A3B up"], fixed_matrices, jnp.int8),
    "ragged_dot decode": case(DECODE),
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
