"""The delta rule's two kernels compile for TPUs without spilling, and do not grow.

The float32 kernels, whose products take six passes each, do spill some registers, and are not tested here.
"""

import pytest

from kernels.delta_rule import tpu
from tests.kernels.test_compile_delta_gpu import scans
from tests.kernels.tpu import Case, complaints, needs_libtpu


def case(dim, v_dim, **options):
    """Returns a case with a limit on arrays: they are those of a chunk, smaller than two of all states."""
    function, arguments, *_ = scans(tpu, dim, v_dim, **options)
    return Case(function, arguments, 1 + 2 * 4 * 2 * max(dim, 128) * max(v_dim, 128), ("v6e",))


CASES = {
    "delta rule": case(128, 128),
    "delta rule, no erasing": case(128, 64, erase=False),
}


@needs_libtpu
@pytest.mark.parametrize("chip", ["v6e"])
def test_tpu(chip):
    assert not complaints(chip, __file__)
