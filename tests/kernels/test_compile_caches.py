"""A decode step does not copy a layer's cache. This is read from the step's compiled program, for two layers of real
models.

Recurrent states are read once and written once. Their cases have only recurrent layers, narrow MLPs and a small
vocabulary, so that states are most of the bytes that the step moves, and that they compile in seconds.
"""

import re

import pytest

import zoo
from tests.kernels.decode_step import Step, measure, needs_gpu_compiler
from tests.kernels.tpu import needs_libtpu


BATCH = 24  # no axis of these models' weights has this size
STEPS = {
    "h200": [
        Step("qwen3-8b", BATCH, 8192),
        Step("qwen3-8b", BATCH, 8192, queries=5),
        Step("gpt-oss-20b", BATCH, 8192),  # a layer with a window and one without
        Step("deepseek-v3", BATCH, 8192),
        Step("qwen3-8b", BATCH, 8192, cache="int8"),
        Step("deepseek-v3", BATCH, 8192, cache="int8"),
    ],
    "v6e": [
        Step("qwen3-8b", BATCH, 8192),
        Step("gemma3-27b", BATCH, 8192),
        Step("gemma3-4b", BATCH, 8192, 6),  # 4 heads of 256 features
        Step("gpt-oss-20b", BATCH, 8100),  # no multiple of 128: the cache has 8192 slots
        Step("llama3.2-1b", BATCH, 8192, queries=5),
        Step("phi4-14b", BATCH, 8192),  # 10 heads of 128 features
        Step("deepseek-v2-lite", BATCH, 8100),
        Step("qwen3-8b", BATCH, 8192, cache="int8", quantize="int8"),
        Step("gpt-oss-20b", BATCH, 8192, cache="int8"),
        Step("gemma3-1b", BATCH, 8192, 6, cache="int8"),  # one head of 256
        Step("deepseek-v2-lite", BATCH, 8192, cache="int8"),
    ],
}

PAGES = 3001  # no other axis has this size
KEYS = [Step("qwen3-8b", BATCH, 8192, cache=cache, pages=PAGES) for cache in ("bfloat16", "int8")]
LATENTS, WINDOW = (Step(name, BATCH, 8192, pages=PAGES) for name in ("deepseek-v3", "gpt-oss-20b"))
SMALLER = LATENTS._replace(model="deepseek-v2-lite")  # which fits in a v6e
PAGED = {"h200": [*KEYS, LATENTS, WINDOW], "v6e": [*KEYS, SMALLER, SMALLER._replace(cache="int8"), WINDOW]}

FEW = dict(vocab_size=512)
DELTA = Step("qwen3-next-80b-a3b", BATCH, 64, changes=FEW | dict(
    layer_types=["linear_attention"] * 2, mlp_only_layers=[0, 1], intermediate_size=1024,
))  # fmt: skip
CHANNELS = Step("kimi-linear-48b-a3b", BATCH, 64, changes=FEW | dict(
    linear_attn_config=dict(full_attn_layers=[], kda_layers=[1, 2]), first_k_dense_replace=2, intermediate_size=1024,
))  # fmt: skip
MAMBA = Step("granite4-h-micro", BATCH, 64, changes=FEW | dict(
    layer_types=["mamba"] * 2, shared_intermediate_size=1024,
))  # fmt: skip
RECURRENT = {"h200": [DELTA, CHANNELS, MAMBA, DELTA._replace(widen=4)], "v6e": [DELTA, MAMBA]}
# Multiples of the needed bytes. XLA for TPUs brings a small matrix of both layers into fast memory for each of the two.
MOST = {"h200": 1.15, "v6e": 1.2}


@pytest.mark.parametrize(
    "chip", [pytest.param("h200", marks=needs_gpu_compiler), pytest.param("v6e", marks=needs_libtpu)]
)
def test_no_copy_of_a_layers_cache(chip):
    """No result is as large as a layer's cache. With an 8-bit cache, the step moves hardly more than integers, scales
    and weights.
    """
    for step, compiled in zip(STEPS[chip], measure(chip, *STEPS[chip]), strict=True):
        of_rows = [x for x in compiled.results if re.search(rf"\[(1,)?{BATCH},\d+,", x.shape)]
        assert of_rows, "there are none with the batch in front"
        logits = f",{zoo.config(step.model).vocab_size}]"
        of_rows = [x for x in of_rows if logits not in x.shape]  # more than a small window's cache
        assert [x for x in of_rows if x.kind != "custom-call" and x.bytes >= compiled.cache] == [], step
        assert step.cache != "int8" or compiled.moved < 1.15 * compiled.needed, (step, compiled.moved, compiled.needed)


@pytest.mark.parametrize(
    "chip", [pytest.param("h200", marks=needs_gpu_compiler), pytest.param("v6e", marks=needs_libtpu)]
)
def test_pages_are_read_and_written_in_place(chip):
    """No result is as large as a layer's pages, and a step moves hardly more than all pages and the weights."""
    for step, compiled in zip(PAGED[chip], measure(chip, *PAGED[chip]), strict=True):
        large = [x for x in compiled.results if x.bytes >= compiled.cache]
        assert [x for x in large if x.kind != "custom-call" or str(PAGES) in x.shape] == [], step
        assert compiled.temporary < compiled.cache, step
        assert compiled.moved < 1.10 * compiled.needed, (step, compiled.moved, compiled.needed)


@pytest.mark.parametrize(
    "chip", [pytest.param("h200", marks=needs_gpu_compiler), pytest.param("v6e", marks=needs_libtpu)]
)
def test_states_are_read_and_written_once(chip):
    for step, compiled in zip(RECURRENT[chip], measure(chip, *RECURRENT[chip]), strict=True):
        assert compiled.state > 50e6
        assert [x for x in compiled.results if x.kind != "custom-call" and x.bytes >= compiled.state] == [], step
        # Kernels count with all slots of a layer, since the program does not say which slots they read.
        assert step.widen or compiled.moved <= MOST[chip] * compiled.needed, (step, compiled.moved / compiled.needed)
