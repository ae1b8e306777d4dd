"""A decode step does not copy a layer's cache: read in the step's compiled program, two layers of real models."""

import re

import pytest

from tests.kernels.decode_step import Step, measure, needs_gpu_compiler
from tests.kernels.tpu import needs_libtpu


BATCH = 24  # no axis of these models' weights has this size
STEPS = {
    "h200": [
        Step("qwen3-8b", BATCH, 8192),
        Step("qwen3-8b", BATCH, 8192, queries=5),
        Step("gpt-oss-20b", BATCH, 8192),  # a layer with a window and one without
        Step("deepseek-v3", BATCH, 8192),
    ],
    "v6e": [Step("qwen3-8b", BATCH, 8192), Step("gemma3-27b", BATCH, 8192)],
}


@pytest.mark.parametrize(
    "chip", [pytest.param("h200", marks=needs_gpu_compiler), pytest.param("v6e", marks=needs_libtpu)]
)
def test_no_copy_of_a_layers_cache(chip):
    for step, compiled in zip(STEPS[chip], measure(chip, *STEPS[chip]), strict=True):
        of_rows = [x for x in compiled.results if re.search(rf"\[(1,)?{BATCH},\d+,", x.shape)]
        assert of_rows, "there are none with the batch in front"
        assert [x for x in of_rows if x.kind != "custom-call" and x.bytes >= compiled.cache] == [], step
