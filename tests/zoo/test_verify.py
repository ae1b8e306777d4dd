"""The report on a checkpoint: correct ones pass, and errors are found and located."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import zoo.__main__
from tests.zoo import tiny
from zoo import verify
from zoo.source import Source


NAME = "qwen3-window-tail"  # eight layers


@pytest.fixture
def folder(tmp_path):
    return tiny.write(tmp_path / "model", NAME)


@pytest.fixture
def small(tmp_path):
    """Writes a checkpoint whose layers are all alike, so that little compiles."""
    return tiny.write(tmp_path / "model", "qwen3")


def found(folder, **options):
    checks, tables = verify.verify(str(folder), **{"tokens": 24, "seed": 0} | options)
    return {check.what: check for check in checks}, tables


@pytest.mark.live
def test_a_right_one(folder, tmp_path):
    pytest.importorskip("transformers", reason="the comparison needs transformers and torch")
    command = [sys.executable, "-m", "zoo", "verify", str(folder), "--tokens", "24", "--html", str(tmp_path / "x.html")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "x.html").read_text()
    for words in (
        "sliding_window",
        "used, stored as float32",
        "7, and the final norm",
        "Kullback-Leibler",
        "same hash",
    ):
        assert words in page and words in run.stdout


@pytest.mark.live
def test_the_first_layer_that_diverges(folder, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the comparison needs transformers and torch")
    other = tiny.write(tmp_path / "other", NAME)
    tensors = tiny.tensors(NAME)
    tensors["model.layers.3.mlp.up_proj.weight"][0] += 0.1
    safetensors.numpy.save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    reference = verify.reference
    monkeypatch.setattr(verify, "reference", lambda _, ids, packed: reference(Source.open(other), ids, packed=packed))
    checks, _ = found(folder)
    assert checks["first layer that diverges"].found == "3"
    failed = {what for what, check in checks.items() if check.passed is False}
    assert {"logits", "first layer that diverges"} <= failed
    assert not failed & {"config.json", "tensors", "decoding", "round trip"}


@pytest.mark.live
def test_a_model_type_and_a_format_that_transformers_does_not_know(tmp_path):
    pytest.importorskip("transformers", reason="the comparison needs transformers and torch")
    folder = tiny.write(tmp_path / "model", "deepseek3-kimi", model_type="kimi_k2")
    assert all(check.passed for check in found(folder)[0].values())
    verify.zoo.save(verify.zoo.load(folder), tmp_path / "fp8", fp8=True)  # as Kimi is published
    checks, tables = found(tmp_path / "fp8")
    assert all(check.passed for check in checks.values())
    assert "used, stored as float8_e4m3fn" in list(tables[1].columns[0].cells)


def test_without_transformers(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    checks, _ = found(small)
    assert checks["logits"].passed is None
    assert all(check.passed for what, check in checks.items() if what != "logits")


@pytest.mark.thorough
def test_a_broken_decode_and_a_broken_export(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("zoo.nn.cache.KV.update", lambda self, k, v, at: (self, k, v, at))
    save = verify.zoo.save

    def altered(model, folder):
        save(model, folder)
        tensors = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        tensors["model.norm.weight"] = np.nextafter(tensors["model.norm.weight"], 2, dtype=np.float32)
        safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")

    monkeypatch.setattr(verify.zoo, "save", altered)
    checks, _ = found(small)
    assert not checks["decoding"].passed
    assert checks["round trip"].found == "35 of 36 tensors have the same hash; not model.norm.weight"


def test_where_the_report_goes(folder, tmp_path, monkeypatch):
    """The report is written beside a verified folder, or here for a name."""
    went = []
    monkeypatch.setattr(zoo.__main__, "report", lambda source, html, **_: went.append(html) or True)
    monkeypatch.chdir(folder)
    for source in (str(folder), ".", "tiny", "org/name"):
        with pytest.raises(SystemExit):
            zoo.__main__.verify(source)
    beside = tmp_path / "model-verify.html"
    assert went == [beside, beside, pathlib.Path("tiny-verify.html"), pathlib.Path("name-verify.html")]
