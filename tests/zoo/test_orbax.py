"""`python -m zoo to-orbax` and `to-hub`: a Hub folder as an Orbax checkpoint and back, bit for bit; and refusals."""

import pytest

from convert.tensors import open_tensors
from tests.train.conftest import command
from tests.zoo import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    tiny.write(folder / "hub", "qwen3-window-tail", torch_dtype="float32")
    tiny.write_tokenizer(folder / "hub")
    command("zoo", "to-orbax", folder / "hub", folder / "orbax")
    return folder


def test_there_and_back(folders, tmp_path, capsys):
    command("zoo", "to-hub", folders / "orbax", tmp_path / "back")
    assert f'zoo.load("{tmp_path / "back"}")' in capsys.readouterr().out
    before, after = open_tensors(folders / "hub"), open_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].view().tobytes() == after[name].view().tobytes() for name in before)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (folders / "hub" / "tokenizer.json").read_bytes()


def refused(*arguments):
    """Returns the message that it ends with."""
    with pytest.raises(SystemExit) as end:
        command("zoo", *arguments)
    assert isinstance(end.value.code, str) and "Traceback" not in end.value.code
    return end.value.code


def test_refusals(folders, tmp_path):
    assert "orbax exists already" in refused("to-orbax", folders / "hub", folders / "orbax")
    assert f"{tmp_path} has no checkpoint" in refused("to-hub", tmp_path, tmp_path / "out")
    array = next(path for path in (folders / "orbax" / "arrays").rglob("*") if path.stat().st_size > 10_000)
    array.write_bytes(array.read_bytes()[:-1] + b"x")
    assert f"{array} is not what was written" in refused("to-hub", folders / "orbax", tmp_path / "out")
    assert not (tmp_path / "out").exists()
