"""The cache of compiled programs, which commands keep in the user's cache folder."""

import hashlib
import os
import pathlib
import platform

import jax


MOST_BYTES = 4 << 30
SECONDS = 0.02  # a reply of a model on a CPU needs some thirty programs, of which few take half a second
CPU = pathlib.Path("/proc/cpuinfo")


def keep_programs() -> None:
    """Has JAX keep the programs that XLA compiles in 20 milliseconds or more, for later processes.

    They lie in equinox-zoo/jax-KEY in XDG_CACHE_HOME or ~/.cache, at most 4 GiB; the least recently used ones are
    removed. KEY stands for the CPU, since XLA only warns when it loads a program of another CPU.

    JAX's environment variables win: JAX_COMPILATION_CACHE_DIR for another folder, whose size only
    JAX_COMPILATION_CACHE_MAX_SIZE limits, and JAX_ENABLE_COMPILATION_CACHE=false for none.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = home / "equinox-zoo" / f"jax-{_key()}"
    _complete(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SECONDS)
    if jax.config.jax_compilation_cache_max_size < 0:
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)


def _complete(folder: pathlib.Path) -> None:
    """Gives each program that has no time of its last use the oldest one.

    JAX writes that time to a file of its own, behind the program. If a process is killed between the two, jax 0.10
    keeps no further program in the folder.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            used.write_bytes(bytes(8))


def _key() -> str:
    """Returns 16 digits that stand for the CPU and its instructions, as Linux describes them."""
    first = CPU.read_text().split("\n\n")[0].splitlines() if CPU.exists() else []
    said = [line for line in first if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *said]).encode()).hexdigest()[:16]
