"""Tests of importing zoo: its cost, what it must not import, and other packages with the name of one of ours."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.train.conftest import command


ROOT = pathlib.Path(__file__).parents[1]


def python(code: str, *path: pathlib.Path, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True)


def run(script: pathlib.Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)


def test_scripts_in_tests_leave_no_instrumented_bytecode(monkeypatch, capsys):
    """`python -m train.sft` would otherwise run the instrumented bytecode the next time."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with pytest.raises(SystemExit):
        command("train.sft", "--help")
    code = pathlib.Path(importlib.util.cache_from_source(str(ROOT / "train" / "sft.py")))
    assert not code.exists() or b"_import_hook" not in code.read_bytes()


IMPORTS = """
import resource, sys
import zoo
seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
heavy = ("torch", "transformers", "tensorflow", "pyarrow", "PIL", "grain", "orbax", "optax", "tyro")
families = lambda: [module for module in sys.modules if module.startswith("zoo.models.")]
print(seconds, [module for module in heavy if module in sys.modules] + families())
configs = zoo.config("qwen3-8b"), zoo.config("tiny")
assert [zoo.registry.family_of(config) for config in configs] == [zoo.qwen3.FAMILY] * 2
print(families(), {"qwen3", "gemma3"} - {*dir(zoo)})
"""


def test_nothing_heavy_is_imported(tmp_path):
    """A family is imported when it is needed, and alone."""
    first, second = python(IMPORTS, ROOT, cwd=tmp_path).stdout.splitlines()
    assert first.split(" ", 1)[1] == "[]" and second == "['zoo.models.qwen3'] set()"


def test_libtpu_is_quiet_unless_the_user_asks(tmp_path, monkeypatch):
    """libtpu reads its log levels when jax loads it, so they must be set before."""
    code = "import sys, os; sys.modules['jax'] = None\ntry: import zoo\nexcept ImportError: pass\n"
    code += "print(os.environ['TPU_MIN_LOG_LEVEL'], os.environ['TPU_STDERR_LOG_LEVEL'])"
    monkeypatch.delenv("TPU_MIN_LOG_LEVEL", raising=False)
    monkeypatch.setenv("TPU_STDERR_LOG_LEVEL", "0")
    assert python(code, ROOT, cwd=tmp_path).stdout.split() == ["3", "0"]


@pytest.mark.thorough
def test_cost(tmp_path):
    assert float(python(IMPORTS, ROOT, cwd=tmp_path).stdout.split(" ", 1)[0]) < 5


# Imitates an editable install: our packages are found after everything on the path, folders without code included.
EDITABLE = f"""
import importlib.machinery, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if path is None and name in ("zoo", "kernels", "convert", "train"):
            return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}])
sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder) + 1, Finder)
"""


@pytest.mark.thorough
def test_beside_a_users_files(tmp_path):
    """zoo imports its own packages, names the one that is hidden from the user, and never looks at train."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.jsonl").touch()
    (tmp_path / "train.py").write_text("raise SystemExit('train.py was run')")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mine.cu").touch()
    (tmp_path / "convert.py").write_text("raise SystemExit('convert.py was run')")
    (tmp_path / "script.py").write_text(EDITABLE + "import zoo, kernels, convert.hub; print(kernels, convert)")
    result = run(tmp_path / "script.py")
    assert str(ROOT / "kernels") in result.stdout and str(ROOT / "convert") in result.stdout, result.stderr
    (warning,) = [line for line in result.stderr.splitlines() if "Warning" in line]
    assert str(tmp_path / "convert.py") in warning and "rename it" in warning and "script.py" in warning


@pytest.mark.parametrize("name", ["kernels", "convert"])
def test_imported_before_zoo(tmp_path, name):
    """A second package of the same name is refused, and the message names a remedy that works."""
    theirs = tmp_path / f"{name}.py"
    theirs.touch()
    (tmp_path / "script.py").write_text(f"{EDITABLE}import {name}, zoo")
    error = run(tmp_path / "script.py").stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: ") and str(theirs) in error and "rename" in error


def test_a_script_of_such_a_name(tmp_path):
    """A script with the name of one of our packages runs without a message, because nobody imports it."""
    # This test needs nothing after our packages, and importing jax takes a second.
    code = "import sys; sys.modules['jax'] = None\ntry:\n    import zoo\nexcept ImportError as error: print(error)"
    (tmp_path / "convert.py").write_text(EDITABLE + code)
    result = run(tmp_path / "convert.py")
    assert "jax" in result.stdout and result.stderr == ""


def test_overwritten(tmp_path):
    """zoo reports that another distribution overwrote its package `kernels` in the same folder."""
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
