"""In the data benchmark, contestants make and read the same tokens, and simulated processes read each row once."""

import importlib.util

import pytest

from benchmarks import data


def test_preparing(tmp_path):
    path = tmp_path / "text.jsonl"
    data.write_text(path, 20_000)
    tokens = data.prepares(str(path), 128, "concat")()
    assert tokens > 4_000 and data.prepares(str(path), 128, "fit")() == tokens


@pytest.mark.thorough
@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="needs datasets and transformers")
def test_datasets_prepares_the_same(tmp_path):
    path = tmp_path / "text.jsonl"
    data.write_text(path, 20_000)
    records = len(path.read_text().splitlines())
    tokens = data.prepares(str(path), 128, "concat")() + records  # a document's last token is only a target
    assert data.maps(str(path), 128, packed=False)() == data.maps(str(path), 128, packed=True)() == tokens


@pytest.mark.thorough
def test_reading(tmp_path):
    data.write_store(tmp_path / "store", 64, 48 * 64)
    args = (str(tmp_path / "store"), 64, 8)
    assert data.reads(*args)() == data.grain_reads(*args)() == 48 * 64
    if importlib.util.find_spec("torch"):
        assert data.torch_reads(*args, workers=0)() == 48 * 64
    found = data.of_processes(str(tmp_path / "store"), 64, 16, 16)
    assert found["rows read once"] == [48] and found["rows read otherwise"] == [0]
    assert len(found["kB of a process"]) == 16 and min(found["kB of a process"]) > 0
