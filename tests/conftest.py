"""Set before jax starts: eight fake CPU devices, and every way in which JAX can be strict about types and shapes."""

import os


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads spin otherwise, and starve the other process

import jax
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    # Most of a test is LLVM optimising programs that run once: without, the suite takes a third less. Processes of
    # their own, which train as users do or compile for GPUs and TPUs, keep all optimisations.
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_end_with_their_module():
    """Each holds memory maps, of which Linux gives a process 65,530: a whole suite's would be too many."""
    yield
    jax.clear_caches()
