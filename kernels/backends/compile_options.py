"""XLA's options for whole programs, in one table with the reasons: what a program is for, the platform, its options.

    jax.jit(step, compiler_options=compile_options("decode"))

Those for training are the same for all NVIDIA GPUs: a compiled step of two layers moves 8 % fewer bytes with them on
an A100 and on an RTX 4090, in as much memory (docs/plan.md has an H200's).

JAX passes options on for the outermost `jax.jit` alone. A platform knows its own only, so the choice is by device.
"""

from typing import Any, Literal

from kernels.backends.device import device


OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "train": {
        "gpu": {
            # XLA's own kernels for products read arrays, and cuBLAS a part of one: by them each layer's weights are
            # copied out of the stack, and their gradients into it. With cuBLAS they are not.
            "xla_gpu_enable_triton_gemm": False,
            # Products that share an input become one otherwise, for which weights and gradients are concatenated.
            "xla_gpu_dot_merger_threshold_mb": 0,
            # Above some four fifths of a card's memory XLA begins to compute values again by itself, matrix products
            # among them. What layers keep is not in its reach: for Llama 3.1 8B on an H200, that took half as many
            # products again, and saved 0.3 of 122 GiB. This is how far it may go, in percent of what that leaves free.
            "xla_gpu_memory_limit_slop_factor": 1000,
        },
    },
    "decode": {
        "gpu": {
            # XLA's own kernels for products read arrays, so each layer's weights would be copied out of the stack for
            # them, at every token. cuBLAS reads a part of the stack.
            "xla_gpu_enable_triton_gemm": False,
            # Products that share an input (those of q, k and v) become one, of weights that are concatenated for it: at
            # every token, in every layer, that reads and writes them once more than needed.
            "xla_gpu_dot_merger_threshold_mb": 0,
        },
    },
}


def compile_options(program: Literal["train", "decode"]) -> dict[str, Any]:
    """Returns the options for such a program on the device in use (`kernels.backends.device`), or {} if it has none."""
    return OPTIONS[program].get(device().platform, {})
