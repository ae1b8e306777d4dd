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

# Totals as the Hub shows them (duplicate and stale tensors left out), and the same for the instruct twins.
PARAMETERS = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824, "llama3.3-70b": 70_553_706_496, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112, "mixtral-8x22b-instruct": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392, "qwen3-coder-480b-a35b-fp8": 480_154_875_392,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880, "deepseek-v3": 671_026_419_200,
    "deepseek-v3-0324": 671_026_419_200, "deepseek-v3.1": 671_026_419_200, "deepseek-r1": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448, "kimi-k2-0905": 1_026_408_232_448,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.2": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320, "gemma3-270m": 268_098_176, "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304,  # without the vision tower
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "llama4-scout": 107_769_861_120, "llama4-maverick": 400_711_848_960,  # without the vision tower
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt3-52k": 52_464, "gpt3-6b": 5_588_736_000, "gpt3-22b": 22_049_107_968, "gpt3-175b": 174_780_997_632,
}  # fmt: skip


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
    return module.shapes(write(config, family, jax.numpy.dtype("bfloat16")))


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
    suffixes = ("-instruct", "-chat", "-base", "-it", "-instruct-2507", "-thinking-2507")
    twins = (name, *(name.removesuffix(suffix) for suffix in suffixes))
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
