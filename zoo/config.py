"""config.json <-> a family's `Config`: every key is understood, or the file is refused by that key's name."""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from beartype.door import is_bearable

from zoo import rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractConfig:
    """The architecture of a model and nothing else; fields are named as in the checkpoint's config.json.

    `source` is the folder it was read from. `zoo.save` copies the tokenizer and the rest of config.json from there.
    """

    source: pathlib.Path | None = dataclasses.field(default=None, compare=False, repr=False)


# Keys of config.json that say nothing of what the model computes. They are carried along on saving.
NOT_THE_MODEL = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def read(family: ModuleType, hub: Mapping[str, Any], source: pathlib.Path | None = None) -> Any:
    """The `family.Config` of a parsed config.json.

    Every key must be a field of it, or have the value that `family.IMPLIED` says is the only one implemented, or be
    none of the model's business. Both `rope_theta` + `rope_scaling` and transformers 5's `rope_parameters` are read.

    Raises:
        ValueError: naming the key that is missing, unknown, of the wrong type, or of a value not implemented.
    """
    where = f"{source / 'config.json'}" if source else "config.json"
    hub = dict(hub)
    hints = {f.name: typing.get_type_hints(family.Config)[f.name] for f in dataclasses.fields(family.Config)}
    hints.pop("source")
    if parameters := hub.pop("rope_parameters", None):
        parameters = dict(parameters)
        if "rope_theta" in parameters:
            hub["rope_theta"] = parameters.pop("rope_theta")
        hub["rope_scaling"] = parameters
    if isinstance(hub.get("rope_scaling"), Mapping):
        hub["rope_scaling"] = rope_scaling(hub["rope_scaling"], where)

    values = {}
    for key, value in hub.items():
        if key in hints:
            if value is None:
                continue  # null says no more than leaving the key out
            if is_bearable(value, int) and not isinstance(value, bool) and is_bearable(1.0, hints[key]):
                value = float(value)  # JSON writes `"rope_theta": 1000000`
            value = tuple(value) if isinstance(value, list) else value
            if not is_bearable(value, hints[key]):
                raise ValueError(f"{where} says {key}={value!r}; {family.__name__} needs {hints[key]}.")
            values[key] = value
        elif key in family.IMPLIED and family.IMPLIED[key] != value:
            raise ValueError(
                f"{where} says {key}={value!r}, but {family.__name__} implements only {family.IMPLIED[key]!r}."
            )
        elif key not in family.IMPLIED and key not in NOT_THE_MODEL:
            raise ValueError(
                f"{where} has the key {key!r} (= {value!r}), which {family.__name__} does not know. If it does not "
                "change what the model computes, remove it from the file."
            )
    missing = [
        f.name for f in dataclasses.fields(family.Config) if f.default is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}, which {family.__name__} needs.")
    return family.Config(**values, source=source)


def rope_scaling(hub: Mapping[str, Any], where: str) -> rope.RopeScaling | None:
    """The scaling that `rope_scaling` or `rope_parameters` of a config.json describes; None for the plain rope."""
    hub = dict(hub)
    kind = hub.pop("rope_type", None) or hub.pop("type", None)
    hub.pop("type", None)  # older files say both
    if kind == "default" and not hub:
        return None
    kinds = {scaling.rope_type: scaling for scaling in typing.get_args(rope.RopeScaling)}
    if kind not in kinds:
        raise ValueError(f"{where} asks for the rope scaling {kind!r}; implemented are {', '.join(kinds)}.")
    fields = {f.name: f for f in dataclasses.fields(kinds[kind])}
    if unknown := hub.keys() - fields.keys():
        raise ValueError(f"{where}: the rope scaling {kind!r} has no {', '.join(map(repr, sorted(unknown)))}.")
    if missing := [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in hub]:
        raise ValueError(f"{where}: the rope scaling {kind!r} lacks {', '.join(map(repr, missing))}.")
    cast = lambda name, value: (
        float(value) if float in (fields[name].type, *typing.get_args(fields[name].type)) else value
    )
    return kinds[kind](**{name: value if value is None else cast(name, value) for name, value in hub.items()})


def write(config: Any, family: ModuleType, dtype: np.dtype) -> dict[str, Any]:
    """The config.json of a model: the inverse of `read`, with what the source says beside the model carried along."""
    carried = {}
    if config.source and (path := config.source / "config.json").is_file():
        carried = {key: value for key, value in json.loads(path.read_text()).items() if key in NOT_THE_MODEL}
    carried.pop("torch_dtype", None)
    name = "dtype" if "dtype" in carried else "torch_dtype"  # transformers 5 writes the one and reads both
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "source"}
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = {"rope_type": scaling.rope_type} | dataclasses.asdict(scaling)
    return dict(sorted((family.IMPLIED | fields | carried | {name: dtype.name}).items()))
