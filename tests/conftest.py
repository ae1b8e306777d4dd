"""Settings that must precede the start of jax: eight fake CPU devices, all of JAX's strict checks of types and shapes,
and fast compilation (hurry.py). `JAX_PLATFORMS=cuda,cpu pytest tests/kernels -k triton` tests kernels on a GPU instead.

Compiled programs are kept in the user's cache folder (compiled.py), which all workers and all checkouts share; `pytest
--cache-clear` empties it. JAXTYPING_DISABLE=0 checks the types of arguments and results (typed.py).
"""

import gc
import importlib.util
import os

import pytest

from tests import hurry


# Most objects come from importing JAX and the tests, and stay. With Python's default thresholds a tenth of a run would
# be spent on searching them for garbage.
gc.set_threshold(10_000, 10, 10)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {hurry.FLAGS}"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads spin otherwise, and starve the other process

import jax
import jaxtyping

from tests import compiled, typed
from tests.memory import Memory
from tests.seconds import Seconds


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
if hurry.HURRY:
    jax.config.update("jax_disable_most_optimizations", True)


PLUGINS = ("tests.groups", "tests.affected", "tests.flaky", "tests.margins")  # they import zoo, and those before them


def pytest_addoption(parser, pluginmanager):
    # pytest calls this hook first, and so before other conftest.py files import our packages.
    if typed.wanted():
        typed.install()
    for plugin in PLUGINS:
        pluginmanager.import_plugin(plugin)
    parser.addoption("--seconds", metavar="FILE", help="write the CPU seconds of each file and family to this file")


def pytest_configure(config):
    missing = [name for name in ("hypothesis", "pyarrow", "starlette", "uvicorn") if not importlib.util.find_spec(name)]
    if missing:
        raise pytest.UsageError(f"The tests need {', '.join(missing)}, which the extra has: pip install -e '.[test]'")
    config.pluginmanager.register(Memory())
    if hurry.HURRY:
        config.pluginmanager.register(Seconds())
    if config.pluginmanager.has_plugin("cacheprovider"):
        if not hasattr(config, "workerinput"):
            compiled.clear() if config.getoption("cacheclear") else compiled.tidy()
        jax.config.update("jax_compilation_cache_dir", str(compiled.folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("libtpu") and jax.__version_info__ < (0, 11):
        from tests.kernels.tpu import needs_libtpu

        cannot = pytest.mark.skip(reason="jax 0.10's libtpu takes no topology of one chip, for which these compile")
        for item in items:
            if needs_libtpu.mark in item.iter_markers("skipif"):
                item.add_marker(cannot)


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture
def untyped(monkeypatch):
    """Disables runtime type checks, as for users. In tests the checks would otherwise raise before our own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
