"""Every zoo name: its architecture against the recorded facts, its parameter count, and what it needs to be usable."""

import json
import math
import pathlib

import equinox as eqx
import jax
import pytest

import zoo
from tests.zoo import tiny
from zoo import checkpoint, registry
from zoo.config import read, write


FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"

# Totals as the Hub shows them (duplicate and stale tensors left out), and the same for the instruct twins.
PARAMETERS = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824, "llama3.3-70b": 70_553_706_496, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
}  # fmt: skip


def skeleton(name):
    config = zoo.config(name)
    return eqx.filter_eval_shape(lambda: registry.family_of(config).Model(config, key=jax.random.key(0)))


def test_names_are_complete():
    assert set(registry.REPOSITORIES) == set(registry.CONFIGS)
    assert zoo.names() == ["tiny", *registry.REPOSITORIES]
    assert all(repo.count("/") == 1 for repo in registry.REPOSITORIES.values())


@pytest.mark.parametrize("name", registry.CONFIGS)
def test_parameter_count(name):
    twins = (name, *(name.removesuffix(suffix) for suffix in ("-instruct", "-chat", "-base")))
    base = next(twin for twin in twins if twin in PARAMETERS)
    assert sum(x.size for x in jax.tree.leaves(skeleton(name))) == PARAMETERS[base]


@pytest.mark.parametrize("name", registry.CONFIGS)
def test_tensors_are_the_hubs(name):
    """Names and shapes, against the list written out in tiny.py."""
    config = zoo.config(name)
    family = registry.family_of(config)
    ours = {}
    for _, array, stacked, names in checkpoint.checkpoint_names(skeleton(name), family.CHECKPOINT_NAMES):
        ours |= dict.fromkeys(names, array.shape[1:] if stacked else array.shape)
    assert ours == tiny.shapes(write(config, family, jax.numpy.dtype("bfloat16")))


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
@pytest.mark.parametrize("name", [n for n in registry.CONFIGS if (FACTS / f"{n}.json").exists()])
def test_facts(name):
    facts = json.loads((FACTS / f"{name}.json").read_text())
    family = registry.FAMILIES[facts["config"]["model_type"]]
    assert read(family, facts["config"]) == zoo.config(name)
    assert registry.REPOSITORIES[name] == facts["hf_repo"]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(skeleton(name))) == facts["verified_params"]


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
def test_no_fact_is_left_out():
    listed = {path.stem for path in FACTS.glob("*.json")}
    kinds = {n: json.loads((FACTS / f"{n}.json").read_text())["config"].get("model_type") for n in listed}
    assert {n for n, kind in kinds.items() if kind in registry.FAMILIES} <= set(registry.CONFIGS)
