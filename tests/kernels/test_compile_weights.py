"""A decode step does not copy its weights. This is read from the step's compiled program, for two layers of real
models.

Mistral, SmolLM3 and DeepSeek-V2 have the same products as Llama and DeepSeek-V3; GPT-3 differs only by its biases.
"""

import pytest

import zoo
from tests.kernels.decode_step import Step, measure, needs_gpu_compiler
from tests.kernels.tpu import needs_libtpu


# Caches are short, because they have a gate of their own (test_compile_caches.py).
step = lambda model, batch=1, **options: Step(model, batch, 128, **options)
STEPS = {
    "h200": [
        step("llama3.1-8b", batch=8),
        step("qwen2.5-7b"),
        step("qwen3-8b", quantize="int8"),
        step("qwen3-30b-a3b"),
        step("mixtral-8x7b"),
        step("gpt-oss-20b"),
        step("gemma-7b"),
        step("gemma2-9b"),
        step("gemma3-12b"),
        step("llama4-scout"),
        step("deepseek-v3"),
    ],
    "v6e": [
        step("qwen3-8b", quantize="int8"),
        step("qwen3-30b-a3b"),
        step("gpt-oss-20b"),
        step("deepseek-v2-lite"),
    ],
}


# Weights as they are stored, with all layers.
STORED = {
    "h200": [
        step("qwen3-8b", batch=2, layers=36, quantize="fp8_blocks"),
        step("qwen3-8b", batch=2, layers=36, quantize="int8"),
        step("qwen3-8b", batch=2, layers=36, quantize="nf4"),
        step("qwen3-30b-a3b", batch=2, layers=48, quantize="fp8_blocks"),
        step("gpt-oss-20b", batch=2, layers=24, quantize="mxfp4"),
    ],
    "v6e": [  # XLA would move all layers of a short cache into fast memory
        Step("qwen3-8b", 8, 8192, 36, quantize="fp8_blocks"),
        Step("qwen3-8b", 8, 8192, 36, quantize="nf4"),
        step("gpt-oss-20b", layers=24, quantize="mxfp4"),
    ],
}

# Arrays that may be as large as a matrix. XLA makes them, not our kernels.
# - MLA's decode multiplies by the two halves of kv_b_proj, which are stored head by head. At batch 1 XLA writes out the
#   products with one half before it sums them, on a TPU. (On a GPU `kernels.head_products` reads them.)
MADE = {"deepseek-v2-lite": "[16,512,128]"}

# The most kernels of a layer, of a step with 8 rows: the mean of the layers that the second number has more.
KERNELS = {
    ("llama3.1-8b", 2, 4): 11,
    ("qwen3-8b", 2, 4): 11,
    ("gemma3-12b", 6, 12): 12,
    ("qwen3-30b-a3b", 2, 4): 15,
    ("gpt-oss-20b", 2, 4): 20,
    ("deepseek-v3", 2, 4): 20,
}


@pytest.mark.parametrize(
    "chip", [pytest.param("h200", marks=needs_gpu_compiler), pytest.param("v6e", marks=needs_libtpu)]
)
def test_no_copy_of_a_matrix(chip):
    """No result is as large as a matrix or a layer's experts. The step moves hardly more than weights and cache."""
    faults = []
    for each, compiled in zip(STEPS[chip], measure(chip, *STEPS[chip]), strict=True):
        made = MADE.get(each.model, "no other")
        found = [x for x in compiled.results if x.bytes >= compiled.matrix and made not in x.shape]
        if found or compiled.moved > 1.15 * compiled.needed:
            faults.append((each.model, round(compiled.moved / compiled.needed, 3), found))
    assert not faults


@needs_gpu_compiler
def test_a_layer_starts_few_kernels():
    steps = [Step(model, 8, 8192, layers) for model, *both in KERNELS for layers in both]
    started = [compiled.kernels for compiled in measure("h200", *steps)]
    found = {
        (model, few, many): (more - less) / (many - few)
        for (model, few, many), less, more in zip(KERNELS, started[::2], started[1::2], strict=True)
    }
    assert all(found[case] <= most for case, most in KERNELS.items()), found


@pytest.mark.parametrize(
    "chip", [pytest.param("h200", marks=needs_gpu_compiler), pytest.param("v6e", marks=needs_libtpu)]
)
def test_weights_are_multiplied_as_they_are_stored(chip):
    """No result is as large as a matrix in few bits, and the step moves at most 1.02 times these and the cache."""
    faults = []
    for each, compiled in zip(STORED[chip], measure(chip, *STORED[chip]), strict=True):
        logits = f"{zoo.config(each.model).vocab_size}]"
        large = [x for x in compiled.results if x.bytes >= compiled.matrix and logits not in x.shape]
        if large or compiled.moved > 1.02 * compiled.needed:
            faults.append((each.model, each.quantize, round(compiled.moved / compiled.needed, 3), large))
    assert not faults
