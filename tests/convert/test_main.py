"""`python -m convert`: a Hub folder to an Orbax checkpoint and back, bit for bit; and what it refuses."""

import subprocess
import sys

import pytest

from convert.tensors import open_tensors
from tests.zoo import tiny


def convert(*arguments, cwd, code=0):
    result = subprocess.run(
        [sys.executable, "-m", "convert", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("convert")
    tiny.write(folder / "hub", "qwen3-window-tail", torch_dtype="float32")
    tiny.write_tokenizer(folder / "hub")
    convert("to-orbax", folder / "hub", folder / "orbax", cwd=pytestconfig.rootpath)
    return folder


def test_there_and_back(folders, tmp_path, pytestconfig):
    output = convert("to-hub", folders / "orbax", tmp_path / "back", cwd=pytestconfig.rootpath)
    assert f'zoo.load("{tmp_path / "back"}")' in output
    before, after = open_tensors(folders / "hub"), open_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].view().tobytes() == after[name].view().tobytes() for name in before)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (folders / "hub" / "tokenizer.json").read_bytes()


def test_refusals(folders, tmp_path, pytestconfig):
    output = convert("to-orbax", folders / "hub", folders / "orbax", cwd=pytestconfig.rootpath, code=1)
    assert "orbax exists already" in output and "Traceback" not in output
    output = convert("to-hub", tmp_path, tmp_path / "out", cwd=pytestconfig.rootpath, code=1)
    assert f"{tmp_path} has no checkpoint" in output and "Traceback" not in output
    array = next(path for path in (folders / "orbax" / "arrays").rglob("*") if path.stat().st_size > 10_000)
    array.write_bytes(array.read_bytes()[:-1] + b"x")
    output = convert("to-hub", folders / "orbax", tmp_path / "out", cwd=pytestconfig.rootpath, code=1)
    assert f"{array} is not what was written" in output and not (tmp_path / "out").exists()
