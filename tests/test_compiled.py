"""Compiled programs are found by CPU and versions, and their folders heal and stay small."""

import os
import zlib

import pytest

from tests import compiled


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_folder_for_each_cpu_and_version(tmp_path, monkeypatch):
    """A program that was compiled on one CPU is never loaded on another."""
    monkeypatch.setattr(compiled, "CPU", tmp_path / "cpuinfo")
    one = "processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t: 2000.1\nflags\t\t: avx2 avx512f\n"
    folders = []
    for text in (one, one.replace(" avx512f", ""), one.replace("Xeon", "EPYC"), one.replace("2000.1", "3000.2")):
        compiled.CPU.write_text(f"{text}\n{text.replace(': 0', ': 1')}")
        folders.append(compiled.folder())
    assert all(folder.is_dir() and folder.parent == tmp_path / "equinox-zoo" / "tests" for folder in folders)
    assert len(set(folders)) == 3 and folders[3] == folders[0]  # differs from the first in its clock only
    monkeypatch.setattr(compiled.jax, "__version__", "0.1")
    assert compiled.folder() not in folders


def test_parts_and_the_oldest_are_removed(monkeypatch):
    folder, program = compiled.folder(), zlib.compress(os.urandom(1000))
    for n, (name, text) in enumerate({"old": program, "used": program, "cut": program[:-9], "empty": b""}.items()):
        path = folder / f"jit_{name}-cache"
        path.write_bytes(text)
        os.utime(path, (1e9 + 10 * n, 1e9 + n))
    left = lambda: sorted(path.name for path in folder.glob("jit_*"))
    compiled.tidy()
    assert left() == ["jit_old-cache", "jit_used-cache"]
    monkeypatch.setattr(compiled, "MOST_BYTES", len(program))
    compiled.tidy()
    assert left() == ["jit_used-cache"]
    compiled.clear()
    assert left() == [] and folder.is_dir()
