"""What importing zoo costs, what it must not pull in, and what happens where another package has one of our names."""

import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]


def python(code: str, *path: pathlib.Path, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True)


def test_cost(tmp_path):
    code = """
import resource, sys
import zoo
seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
heavy = ("torch", "transformers", "tensorflow", "pyarrow", "PIL", "grain")
print(seconds, [module for module in heavy if module in sys.modules])
"""
    seconds, heavy = python(code, ROOT, cwd=tmp_path).stdout.split(" ", 1)
    assert float(seconds) < 5
    assert heavy.strip() == "[]"


@pytest.mark.parametrize("name", ["kernels", "convert", "train"])
def test_shadowed(tmp_path, name):
    intruder = tmp_path / "site" / name
    intruder.mkdir(parents=True)
    (intruder / "__init__.py").write_text("")
    error = python("import zoo", tmp_path / "site", ROOT, cwd=tmp_path).stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: ") and str(intruder / "__init__.py") in error and "uninstall" in error


def test_overwritten(tmp_path):
    """Two distributions that have a package `kernels` were installed into one folder."""
    for package in ("zoo", "convert", "train", "kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_bytes((ROOT / package / "__init__.py").read_bytes())
    (tmp_path / "kernels-0.18.2.dist-info").mkdir()
    (tmp_path / "kernels-0.18.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.2\n")
    error = python("import zoo", tmp_path, cwd=tmp_path).stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: ") and "kernels 0.18.2" in error and "uninstall kernels" in error


@pytest.mark.live
def test_transformers_beside_us(tmp_path):
    """Hugging Face's own `kernels` is not installed here; transformers must not take ours for it."""
    pytest.importorskip("transformers", reason="needs transformers and torch")
    code = """
import kernels, zoo, torch, transformers
config = transformers.Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=1, num_key_value_heads=1, head_dim=8)
print(transformers.Qwen3ForCausalLM(config)(torch.zeros(1, 2, dtype=int)).logits.shape, kernels.attention.__module__)
"""
    result = python(code, ROOT, cwd=tmp_path)
    assert "torch.Size([1, 2, 8]) kernels" in result.stdout, result.stderr
