"""Set before jax starts: eight fake CPU devices, every way in which JAX can be strict about types and shapes, and
compilers that hurry (hurry.py). `JAX_PLATFORMS=cuda,cpu pytest tests/kernels -k triton` tests kernels on a GPU instead.

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

os.environ.setdefault("JAX_PLATFORMS", "cpu")
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


OF_NO_FAMILY = ("tests/zoo/test_engine.py", "tests/zoo/test_speculative.py")  # whatever checkpoint they take


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


@pytest.hookimpl(optionalhook=True)  # where xdist is not installed
def pytest_xdist_make_scheduler(config, log):
    """What shares programs and fixtures goes to one worker.

    xdist 3.8's own `loadgroup` sends each test alone: since pytest 9.2 it writes groups where nothing reads them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    if config.getvalue("dist") == "load":
        config.option.loadscopereorder = False  # but in the order below
        return Groups(config, log)


def group(nodeid: str) -> str:
    """The family of the tiny checkpoint that a test is about, or else its file."""
    file, _, case = nodeid.rstrip("]").partition("[")
    words = case.split("-") if not file.startswith(OF_NO_FAMILY) else []
    names = ("-".join(words[i:j]) for i in range(len(words)) for j in range(len(words), i, -1))
    return next((tiny.FAMILIES[name] for name in names if name in tiny.FAMILIES), file.split("::")[0])


@pytest.hookimpl(trylast=True)  # when those of other tiers are gone
def pytest_collection_modifyitems(config, items):
    """What takes longest comes first, so that no worker is left with it when the others have ended."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item.nodeid)))
    if hasattr(config, "workerinput"):
        groups = collections.defaultdict(list)
        for item in items:
            groups[group(item.nodeid)].append(item)
        counted = read(README.read_text())
        seconds = lambda name: max(counted.get((name, tier(item)), 0) for item in groups[name])
        order = sorted(groups, key=lambda name: (-seconds(name), -len(groups[name])))
        items[:] = [item for name in order for item in groups[name]]


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
