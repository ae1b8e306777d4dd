"""Tiny checkpoints and their models, each written and loaded once. Both are shared: tests leave them as they are."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.zoo import make_golden, seeing, tiny


class Folders(dict[str, pathlib.Path]):
    """Name of a tiny checkpoint -> its folder, written when it is first asked for."""

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
    """`zoo.load` of a tiny checkpoint by its name, which gives the same model again."""
    return functools.cache(lambda name, **options: zoo.load(folders[name], **options))


@pytest.fixture(scope="session")
def vision_folders(tmp_path_factory) -> Folders:
    """As `folders`, of the checkpoints with a tower."""
    return Folders(tmp_path_factory.mktemp("towers"), lambda folder, name: seeing.CHECKPOINTS[name].write(folder))


@pytest.fixture(scope="session")
def load_vision(vision_folders) -> Callable[[str], Any]:
    """As `load`, of the checkpoints with a tower, which the model has too."""
    return functools.cache(lambda name: zoo.load(vision_folders[name], parts=("vision",)))


@pytest.fixture(scope="session")
def theirs(folders) -> Callable[[str], Any]:
    """transformers' model of a tiny checkpoint, where it is installed."""
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    return functools.cache(lambda name: make_golden.load(folders[name]))


@pytest.fixture(scope="session")
def further_tensors() -> dict[str, np.ndarray]:
    """The tensors of the checkpoint "deepseek3" with those of the module that predicts one more token."""
    family, tensors, random = tiny.MODULES["deepseek3"], tiny.tensors("deepseek3"), np.random.RandomState(2)
    shapes = sorted(family.further_shapes(tiny.CONFIGS["deepseek3"]).items())
    tensors |= {n: family.values(n, random.standard_normal(shape)).astype(np.float32) for n, shape in shapes}
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    return tensors


@pytest.fixture(scope="session")
def with_further(tmp_path_factory, further_tensors) -> pathlib.Path:
    """The folder of a checkpoint of them."""
    folder = tiny.write(tmp_path_factory.mktemp("further"), "deepseek3")
    safetensors.numpy.save_file(further_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
