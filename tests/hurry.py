"""Fast compilation for the suite: most of a test's time is XLA compiling programs that then run for milliseconds.

JAX_DISABLE_MOST_OPTIMIZATIONS=0 in pytest's environment keeps all optimisations, as for users. So does a platform other
than the CPU in JAX_PLATFORMS.
"""

import importlib.metadata
import os


HURRY = "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu"
FLAGS = ""
if HURRY:
    FLAGS = "--xla_cpu_parallel_codegen_split_count=1"  # one LLVM module a program, not 32
    if importlib.metadata.version("jaxlib") < "0.11":
        FLAGS += " --xla_cpu_use_fusion_emitters=false"  # these take longer than LLVM; newer versions have no choice
FLAGS = f"{FLAGS} {os.environ.get('TESTS_XLA_FLAGS', '')}".strip()  # tests/margins.py sets some


def environment(*, devices: int = 1) -> dict[str, str]:
    """Returns the environment for a process with fake devices that compiles alike and shares the suite's cache."""
    import jax  # must not start before conftest.py has set the variables that it reads

    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FLAGS}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(HURRY)),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "COLUMNS": "200",  # or messages are wrapped
    }
