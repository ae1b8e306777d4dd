"""The cache of compiled programs that commands keep: its folder, its size, and the user's own choice."""

import pathlib

import jax
import pytest
from jax._src.lru_cache import LRUCache

from kernels.backends import program_cache


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Records what is set, in the place of JAX's configuration, in which no folder is chosen."""
    found = {"jax_compilation_cache_dir": None, "jax_compilation_cache_max_size": -1}

    class Config:
        update = staticmethod(found.__setitem__)
        __getattr__ = lambda self, name: found[name]

    monkeypatch.setattr(jax, "config", Config())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def test_programs_are_kept_in_a_folder_of_the_cpu(settings, tmp_path, monkeypatch):
    program_cache.keep_programs()
    first = settings["jax_compilation_cache_dir"]
    assert (
        first.startswith(str(tmp_path / "equinox-zoo" / "jax-"))
        and settings["jax_compilation_cache_max_size"] == 4 << 30
    )
    monkeypatch.setattr(program_cache, "CPU", tmp_path / "cpuinfo")
    program_cache.CPU.write_text("processor: 0\nflags: avx\n\nprocessor: 1\n")
    settings["jax_compilation_cache_dir"] = None
    program_cache.keep_programs()
    assert settings["jax_compilation_cache_dir"] != first


def test_the_users_choice_wins(settings):
    settings["jax_compilation_cache_dir"] = "mine"
    program_cache.keep_programs()
    assert settings == {"jax_compilation_cache_dir": "mine", "jax_compilation_cache_max_size": -1}
    settings |= {"jax_compilation_cache_dir": None, "jax_compilation_cache_max_size": 1000}
    program_cache.keep_programs()
    assert settings["jax_compilation_cache_max_size"] == 1000


def test_a_process_was_killed_while_it_kept_a_program(settings):
    program_cache.keep_programs()
    folder = pathlib.Path(settings["jax_compilation_cache_dir"])
    folder.mkdir(parents=True)
    (folder / "first-cache").write_bytes(b"program")  # and nothing about its last use
    settings["jax_compilation_cache_dir"] = None
    program_cache.keep_programs()
    cache = LRUCache(str(folder), max_size=10)
    cache.put("second", b"another")  # beside which the first has no room
    assert cache.get("first") is None and cache.get("second") == b"another"
