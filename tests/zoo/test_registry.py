"""Every zoo name: its architecture against the recorded facts, its parameter count, and the data it needs for use."""

import itertools
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
from tests.zoo.programs import skeleton
from zoo import registry
from zoo.config import read, write
from zoo.nn.model import AbstractConfig
from zoo.surgery import partition_specs
from zoo.weights import checkpoint


FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"

PARAMETERS = {name: count for module in tiny.MODULES.values() for name, count in module.PARAMETERS.items()}

# What recorded configs lack. These were pieced together. That Olmo Hybrid's file says this is told in
# https://github.com/allenai/open-instruct/pull/1822; copies of LFM2-2.6B's file are public.
UNRECORDED = {
    "olmo-hybrid-7b": {"rope_parameters": {"rope_theta": None}},
    "lfm2-2.6b": {"layer_types": None, "full_attn_idxs": [2, 5, 9, 13, 17, 21, 24, 27]},
}

# Recorded name -> our name, where the record under a bare name is that of an instruct model. Ours is the base model's.
INSTRUCT = {
    "gemma4-12b": "gemma4-12b-it",
    "olmo2-7b": "olmo2-7b-instruct",
    "olmo3-7b": "olmo3-7b-instruct",
    "olmo3-32b": "olmo3.1-32b-instruct",
}

# Config -> the names that share it, such as base and instruct models.
NAMES: dict[AbstractConfig, list[str]] = {}
for _name, _config in registry.CONFIGS.items():
    NAMES.setdefault(_config, []).append(_name)
FIRST = {type(config): names[0] for config, names in reversed(NAMES.items())}  # a name of each family
CONFIGS = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=names[0], marks=() if names[0] in FIRST.values() else pytest.mark.thorough)
        for config, names in NAMES.items()
    ],
)
FACTS_OF = pytest.mark.parametrize("name", [n for n in registry.REPOSITORIES if (FACTS / f"{n}.json").exists()])
HAVE_FACTS = pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")


def test_every_config_has_a_name():
    assert zoo.names() == [*registry.EMBEDDED, *registry.REPOSITORIES, *registry.TOKENIZERS]
    assert sorted(zoo.names()) == sorted([*registry.EMBEDDED, *registry.CONFIGS])
    assert all(zoo.config(name) is config for name, config in registry.CONFIGS.items())


def test_names_are_complete(monkeypatch):
    """Each name has weights, or the reason why there are none, and a tokenizer."""

    class Asked(Exception):
        """Raised where the download would begin."""

    def folder(source, revision, *, weights, companions):
        raise Asked(source, weights)

    monkeypatch.setattr(convert.hub, "folder", folder)
    for name in registry.CONFIGS:
        published = name in registry.REPOSITORIES
        repository = registry.REPOSITORIES[name] if published else registry.TOKENIZERS[name]
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
        with pytest.raises(Asked if published else ValueError) as load:
            zoo.load(name)
        assert load.value.args == (repository, True) if published else "never published" in str(load.value)
        with pytest.raises(Asked) as tokenizer:
            zoo.tokenizer(name)
        assert tokenizer.value.args == (repository, False)


@CONFIGS
def test_config(config, untyped):
    """A config has partition rules, survives config.json, and has tensors with the names and shapes in tiny/."""
    model, family = skeleton(config), registry.family_of(config)
    specs = partition_specs(model, family.partition_rules)
    assert all(isinstance(spec, P) for spec in jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, P)))
    hub = write(config, family, jax.numpy.dtype("bfloat16"))
    assert registry.FAMILIES[hub["model_type"]] is family
    assert read(family, json.loads(json.dumps(hub))) == config
    parameters = checkpoint.parameters(model, family)
    saved = [pair for p in parameters for pair in itertools.product(p.names.flat, [p.stored_shape])]
    assert len(saved) == len(dict(saved))
    assert dict(saved) == tiny.MODULES[family.name].shapes(write(model.config, family, jax.numpy.dtype("bfloat16")))


@CONFIGS
def test_parameter_count(config):
    """The count is right for each name that shares the config."""
    suffixes = ("-instruct", "-chat", "-base", "-it", "-instruct-2507", "-thinking-2507", "-fp8", "-thinking")
    suffixes += ("-reasoning",)
    twins = lambda name: (name, *(name.removesuffix("-fp8").removesuffix(suffix) for suffix in suffixes))
    counts = {name: next(PARAMETERS[twin] for twin in twins(name) if twin in PARAMETERS) for name in NAMES[config]}
    assert counts == dict.fromkeys(NAMES[config], sum(x.size for x in jax.tree.leaves(skeleton(config))))


@HAVE_FACTS
@FACTS_OF
def test_facts(name):
    facts = json.loads((FACTS / f"{name}.json").read_text())
    family = registry.family_for(facts["config"])
    for form in {"config", "hub_config_verbatim"} & facts.keys():
        assert read(family, facts[form] | UNRECORDED.get(name, {})) == zoo.config(name)
    assert registry.REPOSITORIES[INSTRUCT.get(name, name)] == facts["hf_repo"]


@pytest.mark.thorough
@HAVE_FACTS
@FACTS_OF
def test_parameter_count_is_that_of_the_facts(name):
    facts = json.loads((FACTS / f"{name}.json").read_text())
    family = registry.family_for(facts["config"])
    vision = getattr(tiny.MODULES[family.name], "vision_parameters", lambda config: 0)
    config = zoo.config(name)
    text = sum(math.prod(x.shape) for x in jax.tree.leaves(skeleton(config)))
    if facts["transformers_class"].endswith("ForSequenceClassification"):  # a row for each label is the head
        text += (len(facts["config"]["id2label"]) - config.vocab_size) * config.hidden_size
    assert text + vision(facts["config"]) == facts["verified_params"]
