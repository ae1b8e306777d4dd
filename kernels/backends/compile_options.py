"""XLA's options for whole programs, in one table by purpose and platform, with the reasons.

    jax.jit(step, compiler_options=compile_options("decode"))

Those for training are the same for all NVIDIA GPUs: with them a compiled step of two layers moves 8 % fewer bytes on
an A100 and on an RTX 4090, in the same memory (docs/plan.md has an H200's).

JAX applies the options of the outermost `jax.jit` only. A platform accepts only its own, so the choice is by device.
"""

from typing import Any, Literal

from kernels.backends.device import device


OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "train": {
        "gpu": {
            # XLA's own matrix kernels read whole arrays: each layer's weights would be copied out of the stack, and
            # their gradients into it. cuBLAS reads and writes a part of an array.
            "xla_gpu_enable_triton_gemm": False,
            # Otherwise products that share an input are merged, for which weights and gradients are concatenated.
            "xla_gpu_dot_merger_threshold_mb": 0,
            # Above some four fifths of a card's memory XLA begins to recompute values, matrix products among them. It
            # cannot drop what layers keep: for Llama 3.1 8B on an H200, it recomputed half of the products and saved
            # 0.3 of 122 GiB. This raises its limit, which is in percent of the memory that is left free.
            "xla_gpu_memory_limit_slop_factor": 1000,
        },
    },
    "decode": {
        "gpu": {
            # XLA's own matrix kernels read whole arrays: each layer's weights would be copied out of the stack, at
            # every token. cuBLAS reads a part of the stack.
            "xla_gpu_enable_triton_gemm": False,
            # Otherwise products that share an input (those of q, k and v) are merged, and their weights concatenated:
            # at every token, in every layer, the weights would be read and written once more than needed.
            "xla_gpu_dot_merger_threshold_mb": 0,
        },
    },
}


def compile_options(program: Literal["train", "decode"]) -> dict[str, Any]:
    """Returns the options for such a program on the device in use (`kernels.backends.device`); {} if there are none."""
    return OPTIONS[program].get(device().platform, {})
