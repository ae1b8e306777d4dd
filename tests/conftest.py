"""Set before jax starts: eight fake CPU devices, every way in which JAX can be strict about types and shapes, and
compilers that hurry (hurry.py).

What was compiled is kept in one cache, which all workers share and the next run finds; `pytest --cache-clear` empties
it.
"""

import collections
import gc
import importlib.util
import os
import pathlib
import shutil

import pytest

from tests import hurry


# What JAX and the tests bring with them is most of what there is, and stays: with Python's own thresholds a tenth of a
# run would be looking through it for garbage.
gc.set_threshold(10_000, 10, 10)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {hurry.FLAGS}"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads spin otherwise, and starve the other process

import jax
import jaxtyping

from tests.seconds import README, Seconds, read, tier
from tests.zoo import tiny


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
if hurry.HURRY:
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
    parser.addoption("--seconds", metavar="FILE", help="write the CPU seconds of each file and family to this file")


def pytest_configure(config):
    missing = [name for name in ("hypothesis", "pyarrow", "starlette", "uvicorn") if not importlib.util.find_spec(name)]
    if missing:
        raise pytest.UsageError(f"The tests need {', '.join(missing)}, which the extra has: pip install -e '.[test]'")
    if hurry.HURRY:
        config.pluginmanager.register(Seconds())
    if config.pluginmanager.has_plugin("cacheprovider"):
        cache = config.cache.mkdir("xla")
        if not hasattr(config, "workerinput") and sum(path.stat().st_size for path in cache.iterdir()) > 2**30:
            shutil.rmtree(cache)  # of which most are programs that the code no longer has
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if config.getoption("dist", "no") == "load":
        config.option.dist = "loadgroup"  # what shares programs and fixtures goes to one worker
        config.option.loadscopereorder = False  # but in the order below


@pytest.hookimpl(trylast=True)  # when those of other tiers are gone
def pytest_collection_modifyitems(config, items):
    """Tests of a family run on one worker, whatever file they are in, and those of a file: they share programs.

    What takes longest comes first, so that no worker is left with it when the others have ended.
    """
    groups = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            names = item.callspec.params.values() if hasattr(item, "callspec") else ()
            families = [tiny.FAMILIES[name] for name in names if isinstance(name, str) and name in tiny.FAMILIES]
            item.add_marker(pytest.mark.xdist_group(families[0] if families else item.location[0]))
        groups[item.get_closest_marker("xdist_group").args[0]].append(item)
    if hasattr(config, "workerinput"):
        counted = read(README.read_text())
        seconds = lambda group: max(counted.get((group, tier(item)), 0) for item in groups[group])
        order = sorted(groups, key=lambda group: (-seconds(group), -len(groups[group])))
        items[:] = [item for group in order for item in groups[group]]


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture
def untyped(monkeypatch):
    """As users run the code: without the types that are checked in tests, which would be the first to object."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_end_before_there_are_too_many():
    """Each holds memory maps, of which Linux gives a process 65,530."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
