"""attention compiles for every TPU: without spilling, and without logits or a mask in memory.

attention_tpu_cases.py has shapes of more models, of which this does not hold on every chip.
"""

import pytest

from kernels import sliding
from tests.kernels.attention_tpu_cases import case
from tests.kernels.tpu import CHIPS, complaints, needs_libtpu


CASES = {
    "DeepSeek V3": case(16, 16, 192, 128),  # an eighth of its heads
    "gpt-oss, local": case(64, 8, 64, mask=sliding(128), sinks=True),
    "gpt-oss, global": case(64, 8, 64, sinks=True),
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
