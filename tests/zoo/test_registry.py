"""Every zoo name: its architecture against the recorded facts, its parameter count, and what it needs to be usable."""

import functools
import json
import math
import pathlib
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

import convert.hub
import zoo
from tests.zoo import tiny
from zoo import checkpoint, registry
from zoo.config import read, write
from zoo.surgery import partition_specs


FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"

PARAMETERS = {name: count for module in tiny.MODULES.values() for name, count in module.PARAMETERS.items()}


def skeleton(name):
    return skeleton_of(zoo.config(name))


@functools.cache  # base and instruct models are alike
def skeleton_of(config):
    return checkpoint.skeleton(registry.family_of(config), config)


@functools.cache
def saved(config):
    """The names of the tensors that are saved, and the shape of each."""
    parameters = checkpoint.parameters(skeleton_of(config), registry.family_of(config))
    return [(tensor, parameter.stored_shape) for parameter in parameters for tensor in parameter.names.flat]


@functools.cache
def expected(config):
    """The same, as tiny/ has them written out."""
    family = registry.family_of(config)
    module = tiny.MODULES[family.name]
    return module.shapes(write(skeleton_of(config).config, family, jax.numpy.dtype("bfloat16")))


def test_every_config_has_a_name():
    assert zoo.names() == [*registry.EMBEDDED, *registry.REPOSITORIES, *registry.TOKENIZERS]
    assert sorted(zoo.names()) == sorted([*registry.EMBEDDED, *registry.CONFIGS])


@pytest.mark.parametrize("name", registry.CONFIGS)
def test_names_are_complete(name, monkeypatch):
    """Weights, or the reason why there are none; a tokenizer; partition rules; and what saving needs."""

    class Asked(Exception):
        """Where the download would begin."""

    def folder(source, revision, *, weights, companions):
        raise Asked(source, weights)

    monkeypatch.setattr(convert.hub, "folder", folder)
    published = name in registry.REPOSITORIES
    repository = registry.REPOSITORIES[name] if published else registry.TOKENIZERS[name]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    with pytest.raises(Asked if published else ValueError) as load:
        zoo.load(name)
    assert load.value.args == (repository, True) if published else "never published" in str(load.value)
    with pytest.raises(Asked) as tokenizer:
        zoo.tokenizer(name)
    assert tokenizer.value.args == (repository, False)

    config, model = zoo.config(name), skeleton(name)
    family = registry.family_of(config)
    specs = partition_specs(model, family.partition_rules)
    assert all(isinstance(spec, P) for spec in jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, P)))
    hub = write(config, family, jax.numpy.dtype("bfloat16"))
    assert registry.FAMILIES[hub["model_type"]] is family
    assert read(family, json.loads(json.dumps(hub))) == config
    assert len(saved(config)) == len(dict(saved(config)))


@pytest.mark.parametrize("name", registry.CONFIGS)
def test_parameter_count(name):
    suffixes = ("-instruct", "-chat", "-base", "-it", "-instruct-2507", "-thinking-2507", "-fp8", "-thinking")
    suffixes += ("-reasoning",)
    twins = (name, *(name.removesuffix("-fp8").removesuffix(suffix) for suffix in suffixes))
    base = next(twin for twin in twins if twin in PARAMETERS)
    assert sum(x.size for x in jax.tree.leaves(skeleton(name))) == PARAMETERS[base]


@pytest.mark.parametrize("name", registry.CONFIGS)
def test_tensors_are_the_hubs(name):
    """Names and shapes, against the lists written out in tiny/."""
    config = zoo.config(name)
    assert dict(saved(config)) == expected(config)


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
@pytest.mark.parametrize("name", [n for n in registry.REPOSITORIES if (FACTS / f"{n}.json").exists()])
def test_facts(name):
    facts = json.loads((FACTS / f"{name}.json").read_text())
    family = registry.FAMILIES[facts["config"]["model_type"]]
    for form in {"config", "hub_config_verbatim"} & facts.keys():
        assert read(family, facts[form]) == zoo.config(name)
    assert registry.REPOSITORIES[name] == facts["hf_repo"]
    vision = getattr(tiny.MODULES[family.name], "vision_parameters", lambda config: 0)
    text = sum(math.prod(x.shape) for x in jax.tree.leaves(skeleton(name)))
    assert text + vision(facts["config"]) == facts["verified_params"]
