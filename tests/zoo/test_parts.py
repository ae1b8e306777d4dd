"""Optional parts of a model by their names: a family that has one needs nothing outside of its own file.

The family here is Qwen3 with a tower that no other file knows. DeepSeek V3's own part is in test_deepseek.py.
"""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

import zoo
from tests.zoo.programs import same
from train.run.folder import identity
from train.state.mesh import abstract_model
from zoo import registry
from zoo.models import qwen3
from zoo.nn.layers import Linear


class Config(qwen3.Config):
    pass


class Model(qwen3.Model):
    tower: Linear | None

    def __init__(self, config, *, key, parts=()):
        super().__init__(config, key=key)
        self.tower = Linear(config.hidden_size, 4, key=key) if "tower" in parts else None


@pytest.fixture(scope="module")
def towered(tmp_path_factory):
    """Returns a model with the tower, and its saved folder; the family is registered meanwhile."""
    family = dataclasses.replace(
        qwen3.FAMILY, Config=Config, Model=Model, configs={}, model_types=("towered",),
        parts={"tower": "what looks far"},
        partition_rules={"tower": P("tensor", "fsdp"), **qwen3.FAMILY.partition_rules},
        checkpoint_names={"tower.*": "tower.{}", **qwen3.FAMILY.checkpoint_names},
        redundant={"tower.*": None, **qwen3.FAMILY.redundant},
        implied={**qwen3.FAMILY.implied, "model_type": "towered", "architectures": ["Towered"]},
    )  # fmt: skip
    config = Config(8, 16, 32, 2, 2, 1, 8, 64, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, "towered", family)
        model = family.init_model(config, key=jax.random.key(0), parts=("tower",))
        folder = tmp_path_factory.mktemp("towered")
        zoo.save(model, folder)
        yield model, folder


def test_round_trip(towered):
    """The model is loaded with the part, or without it, and then the part's tensors in the file are ignored."""
    model, folder = towered
    without = zoo.load(folder)
    assert same(zoo.load(folder, parts=("tower",)), model)
    assert without.tower is None and same(without.layers, model.layers)


def test_placed(towered):
    loaded = zoo.load(towered[1], parts=["tower"], mesh="fsdp=-1")
    assert loaded.tower.weight.sharding.spec == P("tensor", "fsdp")


def test_trained(towered):
    """Training also starts from the part's shapes, and a run with another part, or none, is another run."""
    model, folder = towered
    shapes = abstract_model(model.config, registry.family_of(model), zoo.make_mesh("fsdp=-1"), ("tower",))
    assert shapes.tower.weight.shape == (4, 16)
    config = zoo.config(folder)
    both = identity(str(folder), config, {}), identity(str(folder), config, {}, ("tower",))
    assert both[1] == both[0] | {"tower": True}
    assert both[0]["mtp"] is False and identity(str(folder), config, {}, ("mtp",))["mtp"] is True  # as before


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("tower", "door"), r"config.json: test_parts has no part 'door': parts=\('tower',\) adds what looks far\."),
        ("tower", r"has no part 't': parts=\('tower',\) adds"),  # a string is a sequence of its letters
    ],
)
def test_what_the_family_lacks(towered, parts, message):
    with pytest.raises(ValueError, match=message):
        zoo.load(towered[1], parts=parts)


def test_a_family_without_parts(folders):
    with pytest.raises(ValueError, match="qwen3 has no part 'mtp': it has no optional parts"):
        zoo.load(folders["qwen3"], parts=("mtp",))


def test_adapters_of_a_part(towered, tmp_path):
    """transformers' model has none of our parts."""
    model = zoo.lora.add(towered[0], rank=2, alpha=1.0, where="tower", key=jax.random.key(1))
    with pytest.raises(ValueError, match="tower has an adapter, but transformers has no such module"):
        zoo.peft.save(model, tmp_path)
