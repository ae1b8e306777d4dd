"""A new user's first steps, with whatever is installed: load, generate, train, export, and transformers beside zoo.

The file needs nothing of this checkout: `.ci/run` runs a copy of it, elsewhere, against the wheel that it has built.
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import kernels
import zoo


def test_version():
    assert zoo.__version__ == importlib.metadata.version("equinox-zoo")


def test_data_is_installed():
    """Files that are not Python are installed: the embedded model, its instructions, the kernels' block sizes."""
    import train.tiny

    assert zoo.config("tiny").vocab_size == zoo.load("tiny").embed_tokens.weight.shape[0]
    assert train.tiny.INSTRUCTIONS.is_file()
    assert list(pathlib.Path(kernels.__file__).parent.glob("*/*.json"))


@pytest.mark.thorough
def test_training_ends_with_a_model_that_generates(tmp_path):
    command = [sys.executable, "-m", "train.sft", "--steps", "2", "--batch", "8", "--seq-len", "64", "--out", "run"]
    as_users = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=as_users)
    assert run.returncode == 0, run.stdout + run.stderr
    folder = tmp_path / "run" / "model"
    (text,) = zoo.generate(zoo.load(folder), zoo.tokenizer(folder), ["The module"], max_new_tokens=4)
    assert text


@pytest.mark.live
def test_transformers_reads_the_export(tmp_path):
    """transformers looks for a package `kernels` by Hugging Face, and must not take ours for it."""
    transformers = pytest.importorskip("transformers", reason="needs transformers and torch")
    import torch
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()
    model, tokens = zoo.load("tiny", dtype="float32"), np.arange(3, 19)[None]
    zoo.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    expected = theirs(torch.from_numpy(tokens)).logits.detach().numpy()
    assert np.abs(np.asarray(model(jnp.asarray(tokens))) - expected).max() < 1e-4 * np.abs(expected).max()
