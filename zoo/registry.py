"""Zoo names of models, and where their checkpoints are found."""

import pathlib
from collections.abc import Mapping
from typing import Any

from zoo import models
from zoo.nn.model import AbstractConfig, AbstractModel, Family


# Zoo name -> folder of a checkpoint that is part of the package.
EMBEDDED = {"tiny": pathlib.Path(__file__).parent / "tiny"}

# `register` fills the rest. config.json's model_type -> family, and zoo name -> config.
FAMILIES: dict[str, Family] = {}
CONFIGS: dict[str, AbstractConfig] = {}

# Zoo name -> Hub repository of the model, or, if its weights were never published, of a tokenizer.
REPOSITORIES: dict[str, str] = {}
TOKENIZERS: dict[str, str] = {}


def register(family: Family) -> None:
    """Make a family known to `zoo.load` and to the rest of the package. Users can register families of their own.

    Args:
        family: the `FAMILY` of its file.

    Raises:
        ValueError: a zoo name or a model_type is taken. Nothing is registered then.
    """
    for known, new in ((FAMILIES, family.model_types), (CONFIGS | EMBEDDED, family.configs)):
        if taken := sorted(known.keys() & set(new)):
            raise ValueError(f"{', '.join(taken)} is registered already; the family {family.name} needs other names.")
    FAMILIES.update(dict.fromkeys(family.model_types, family))
    for name, (config, repository, tokenizer) in family.configs.items():
        CONFIGS[name] = config
        if repository:
            REPOSITORIES[name] = repository
        elif tokenizer:
            TOKENIZERS[name] = tokenizer


for _family in models.FAMILIES.values():
    register(_family)


def family_for(hub: Mapping[str, Any]) -> Family | None:
    """Return the family of a parsed config.json, by its model_type; None: no family has it.

    Where a `text_config` has a model_type, too, the family that names both comes first.
    """
    kind, text = hub.get("model_type"), hub.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return FAMILIES.get(f"{kind}/{inner}") or FAMILIES.get(str(kind))


def family_of(value: AbstractModel | AbstractConfig) -> Family:
    """Return the family of a model or of a config.

    Raises:
        ValueError: no registered family has this class of configs.
    """
    config = value.config if isinstance(value, AbstractModel) else value
    for family in FAMILIES.values():
        if family.Config is type(config):
            return family
    raise ValueError(f"No family has the class {type(config).__module__}.Config: call zoo.register with its FAMILY.")
