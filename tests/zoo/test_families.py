"""What a family is made of: our own have all of it, and a user's own, from a file outside the package, needs no more.

docs/families.md says how to add one; its lines are run here.
"""

import pathlib

import numpy as np
import pytest

from tests.zoo import tiny
from zoo import models, registry


ROOT = pathlib.Path(__file__).parents[2]


def missing(families, modules, golden, names) -> list[str]:
    """A sentence for each thing that a family lacks.

    `families` are those of zoo/models, `modules` those of tests/zoo/tiny, `golden` says which checkpoints each file of
    tests/zoo/golden has, and `names` are those of zoo/registry.py.
    """
    lacks = []
    for name in sorted(families.keys() | modules.keys()):
        file, checkpoints = f"zoo/models/{name}.py", f"tests/zoo/tiny/{name}.py"
        if name not in families:
            lacks.append(f"{checkpoints} has no {file}: write the family there, from its Config to its FAMILY.")
            continue
        if name not in modules:
            lacks.append(f"{file} has no {checkpoints}: write its CONFIGS, STACK, PARAMETERS and shapes there.")
        if without := sorted(getattr(modules.get(name), "CONFIGS", {}).keys() - golden.get(name, ())):
            lacks.append(
                f"tests/zoo/golden/{name}.npz has no logits of {', '.join(without)}: `python -m tests.zoo.make_golden "
                f"{name}` writes them, where transformers is installed."
            )
        if unknown := [config for config in families[name].configs if config not in names]:
            lacks.append(
                f"{file} has {', '.join(unknown)}, but zoo/registry.py has no row with its repository (or, if its "
                "weights were never published, with that of a tokenizer)."
            )
    return lacks


@pytest.fixture
def pieces():
    """The arguments of `missing`, as they are; copies, from which a test may take something away."""
    golden = {path.stem: set(np.load(path).files) for path in (ROOT / "tests/zoo/golden").glob("*.npz")}
    names = registry.REPOSITORIES | registry.TOKENIZERS
    return dict(families=dict(models.FAMILIES), modules=dict(tiny.MODULES), golden=golden, names=names)


def test_nothing_is_missing(pieces):
    assert missing(**pieces) == []
    assert sorted(pieces["golden"]) == sorted(pieces["modules"])


@pytest.mark.parametrize(
    ("piece", "entry", "sentence"),
    [
        ("families", "qwen3", "tests/zoo/tiny/qwen3.py has no zoo/models/qwen3.py: write the family there"),
        ("modules", "qwen3", "zoo/models/qwen3.py has no tests/zoo/tiny/qwen3.py: write its CONFIGS, STACK"),
        ("golden", "qwen3", "tests/zoo/golden/qwen3.npz has no logits of qwen3, qwen3-tied, "),
        ("names", "qwen3-8b", "zoo/models/qwen3.py has qwen3-8b, but zoo/registry.py has no row with its repository"),
    ],
)
def test_what_is_missing_is_named(pieces, piece, entry, sentence):
    del pieces[piece][entry]
    (lack,) = missing(**pieces)
    assert lack.startswith(sentence)
