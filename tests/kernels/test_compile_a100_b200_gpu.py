"""The GPU kernels for which an A100 or a B200 has sizes of its own, compiled for it: see test_compile_4090_gpu.py."""

from tests.kernels.gpu import complaints, needs_compiler
from tests.kernels.test_compile_4090_gpu import DEEP, attention, ragged_dot
from tests.kernels.test_compile_gpu import OF_WIDE_HEADS


CASES = {
    "A100, D128, forward": attention("a100", 128, backward=()),
    "A100, D256": attention("a100", 256, OF_WIDE_HEADS, softcap=50.0),
    "A100, ragged_dot": ragged_dot("a100", DEEP),
    "B200, D128": attention("b200", 128),
    "B200, D192": attention("b200", 192, v_dim=128),
    "B200, D256": attention("b200", 256, OF_WIDE_HEADS, softcap=50.0),
}


@needs_compiler
def test_gpu():
    assert not complaints(__file__)
