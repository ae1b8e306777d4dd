"""Tiny checkpoints and their models, each written and loaded once. Tests share them, and must not change them."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.zoo import make_golden, tiny


class Folders(dict[str, pathlib.Path]):
    """Name of a tiny checkpoint -> its folder, which is written on first use."""

    def __init__(self, root: pathlib.Path, write: Callable[[pathlib.Path, str], pathlib.Path] = tiny.write):
        self.root, self.write = root, write

    def __missing__(self, name: str) -> pathlib.Path:
        self[name] = self.write(self.root / name, name)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Folders:
    return Folders(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def load(folders) -> Callable[..., Any]:
    """Returns a function that loads a tiny checkpoint by its name, and the same model again in later calls."""
    return functools.cache(lambda name, **options: zoo.load(folders[name], **options))


@pytest.fixture(scope="session")
def vision_folders(tmp_path_factory) -> Folders:
    """Returns a `Folders` of the checkpoints with a tower."""
    return Folders(tmp_path_factory.mktemp("towers"), lambda folder, name: tiny.SEEING[name].write(folder))


@pytest.fixture(scope="session")
def load_vision(vision_folders) -> Callable[[str], Any]:
    """Returns a function that loads a checkpoint with its tower by its name."""
    return functools.cache(lambda name: zoo.load(vision_folders[name], parts=("vision",)))


@pytest.fixture(scope="session")
def theirs(folders) -> Callable[[str], Any]:
    """Returns a function that loads a tiny checkpoint with transformers, if that is installed."""
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    return functools.cache(lambda name: make_golden.load(folders[name]))


@pytest.fixture(scope="session")
def further_tensors() -> dict[str, np.ndarray]:
    """Returns the tensors of the checkpoint "deepseek3", including those of its MTP module."""
    family, tensors, random = tiny.MODULES["deepseek3"], tiny.tensors("deepseek3"), np.random.RandomState(2)
    shapes = sorted(family.further_shapes(tiny.CONFIGS["deepseek3"]).items())
    tensors |= {n: family.values(n, random.standard_normal(shape)).astype(np.float32) for n, shape in shapes}
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    return tensors


@pytest.fixture(scope="session")
def with_further(tmp_path_factory, further_tensors) -> pathlib.Path:
    """Returns the folder of a checkpoint with these tensors."""
    folder = tiny.write(tmp_path_factory.mktemp("further"), "deepseek3")
    safetensors.numpy.save_file(further_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
