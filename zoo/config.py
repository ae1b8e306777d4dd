"""Read and write config.json as a family's `Config`. An unknown key is an error that names the key."""

import dataclasses
import json
import logging
import math
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
from beartype.door import is_bearable

from convert.formats import layouts
from zoo.nn import rope
from zoo.nn.fields import LEFT_BEHIND, NOT_CARRIED, alternatives, says_nothing, typed
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig, Family, OneOf


def read(family: Family, hub: Mapping[str, Any], source: pathlib.Path | None = None) -> Any:
    """Turn a parsed config.json into a `family.Config`.

    Every key must be a field of `family.Config`, have a value that `family.implied` lists, or not affect the model.
    Rotary positions are read in both forms: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
    `family.standard_form` converts other variants of a family's files into one form.

    Raises:
        ValueError: a key is missing, unknown, of the wrong type, or has a value that is not implemented; the message
            names the key.
    """
    where = f"{source / 'config.json'}" if source else "config.json"
    for key in ("quantization_config", "rope_parameters", "rope_scaling", "text_config", "vision_config"):
        if not isinstance(hub.get(key) or {}, Mapping):
            raise ValueError(f"{where} says {key}={hub[key]!r}; it needs an object in braces, or null.")
    try:
        hub = family.standard_form(hub)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    check_quantization(hub, where)
    hints = {f.name: typing.get_type_hints(family.Config)[f.name] for f in dataclasses.fields(family.Config)}
    hints.pop("source")
    if "num_key_value_heads" in hub and hub["num_key_value_heads"] is None:  # not the same as a missing key
        hub["num_key_value_heads"] = hub.get("num_attention_heads")
    # Any other null means the same as a missing key, unless None is a value of the field.
    values_of = lambda key: alternatives(family.implied[key]) if key in family.implied else ()
    null = lambda key: is_bearable(None, hints[key]) if key in hints else None in values_of(key)
    hub = {key: value for key, value in hub.items() if value is not None or null(key)}
    if "rope_theta" in hints:
        read_rope(family, hub, where)

    values, left_behind = {}, []
    defaults = {f.name: f.default for f in dataclasses.fields(family.Config)}
    for key, value in hub.items():
        if key in hints and (type(value), value) == (type(defaults[key]), defaults[key]):
            values[key] = value  # a default may be out of bounds, such as 0 experts
        elif key in hints:
            values[key] = typed(key, value, hints[key], f"{where} says {key}={value!r:.200}; {family.name}")
        elif key in family.implied:
            if value not in (allowed := values_of(key)):
                only = " and ".join(map(repr, allowed))
                raise ValueError(f"{where} says {key}={value!r:.200}, but {family.name} implements only {only}.")
        elif key in LEFT_BEHIND:
            left_behind.append(key)
        elif not says_nothing(key) and key not in NOT_CARRIED:
            raise ValueError(
                f"{where} has the key {key!r} (= {value!r:.200}), which {family.name} does not know. If it does not "
                "change what the model computes, remove it from the file."
            )
    missing = [
        f.name for f in dataclasses.fields(family.Config) if f.default is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}, which {family.name} needs.")
    try:
        config = family.Config(**values, source=source)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{where} says num_attention_heads={config.num_attention_heads}, which is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}."
        )
    if isinstance(config, AbstractMixtureConfig):
        (experts,) = hints.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
        if config.num_experts_per_tok > getattr(config, experts):
            raise ValueError(
                f"{where} says num_experts_per_tok={config.num_experts_per_tok}, which is more than "
                f"{experts}={getattr(config, experts)}."
            )
    if left_behind:
        keys = ", ".join(sorted(left_behind))
        logging.getLogger("zoo").warning("%s: skipped, for they say nothing of the model: %s", where, keys)
    return config


def check_quantization(hub: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless `quantization_config` describes a storage format that `convert.formats` reads."""
    stored = hub.get("quantization_config")
    try:
        layouts(stored)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        short = {key: value for key, value in (stored or {}).items() if not isinstance(value, list | dict)}
        raise ValueError(
            f"{where} has the quantization_config {short!r}, which is not implemented: {error}. Load another "
            "repository of the model, with plain weights."
        ) from error


def read_rope(family: Family, hub: dict[str, Any], where: str) -> None:
    """Convert the rotary keys of `hub`, in either form, to `rope_theta` and `rope_scaling`, in place.

    Families that have a `partial_rotary_factor` get that, too. Precedence is that of transformers 5. The older
    `rope_scaling` wins over `rope_parameters`. A `rope_theta` or `partial_rotary_factor` inside that object wins over
    one beside it. An `original_max_position_embeddings` beside it wins over one inside; if both are absent,
    `max_position_embeddings` is used.

    Raises:
        ValueError: a key is missing, unknown, of the wrong type or not implemented; the message names the key.
    """
    older, newer = hub.pop("rope_scaling", None), hub.pop("rope_parameters", None)
    beside = {key: hub.pop(key, None) for key in ("partial_rotary_factor", "original_max_position_embeddings")}
    stated = {key: value for key, value in (older or newer or {}).items() if value is not None or key == "truncate"}
    parts = [stated.pop("partial_rotary_factor", None), beside["partial_rotary_factor"]]  # the one inside comes first
    if "partial_rotary_factor" in family.Config.__dataclass_fields__:
        for part in [part for part in parts if part is not None][:1]:
            hub["partial_rotary_factor"] = part
            if isinstance(part, int | float) and part > 1:
                raise ValueError(f"{where} says partial_rotary_factor={part!r}; at most 1, the whole head, can turn.")
    elif turned := [part for part in parts if part not in (None, 1)]:
        raise ValueError(
            f"{where} says partial_rotary_factor={turned[0]!r}, but {family.name} turns whole heads, and so does "
            "transformers, whatever the file says. If the weights were trained like that, remove it from the file."
        )
    if "rope_theta" in stated:
        hub["rope_theta"] = stated.pop("rope_theta")
    kind, older_name = stated.pop("rope_type", None), stated.pop("type", None)
    kind = kind or older_name or "default"
    if not stated and kind == "default":
        if older or newer is not None:  # without either key the family's default stays
            hub["rope_scaling"] = None
        return
    kinds = {scaling.rope_type: scaling for scaling in typing.get_args(rope.RopeScaling)}
    if (scaling := kinds.get(str(kind))) is None:
        raise ValueError(f"{where} asks for the rope scaling {kind!r}; implemented are {', '.join(kinds)}.")
    hints = {name: hint for name, hint in typing.get_type_hints(scaling).items() if name != "rope_type"}
    if unknown := stated.keys() - (hints.keys() - {"max_position_embeddings"}):
        raise ValueError(f"{where}: the rope scaling {kind!r} has no {', '.join(map(repr, sorted(unknown)))}.")
    get = lambda key, value: typed(key, value, hints.get(key, int), f"{where} says {key}={value!r:.200}; {kind} rope")
    defaults = {f.name: f.default for f in dataclasses.fields(family.Config) if f.default is not dataclasses.MISSING}
    positions, original = "max_position_embeddings", "original_max_position_embeddings"
    stated[positions] = get(positions, hub.get(positions, defaults.get(positions)))
    stated[original] = stated.get(original, stated[positions]) if beside[original] is None else beside[original]
    if kind in ("yarn", "longrope"):
        stated.setdefault("factor", stated[positions] / get(original, stated[original]))
    required = {f.name for f in dataclasses.fields(scaling) if f.default is dataclasses.MISSING}
    if missing := sorted(required - stated.keys()):
        raise ValueError(f"{where}: the rope scaling {kind!r} lacks {', '.join(map(repr, missing))}.")
    try:
        hub["rope_scaling"] = scaling(**{key: get(key, value) for key, value in stated.items() if key in hints})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def write(config: AbstractConfig, family: Family, dtype: np.dtype) -> dict[str, Any]:
    """Make the config.json of a model: the inverse of `read`. Keys of the source that `read` skips are copied."""
    carried, implied = {}, {key: alternatives(value)[0] for key, value in family.implied.items()}
    if config.source and (path := config.source / "config.json").is_file():
        stated = family.standard_form(json.loads(path.read_text()))
        carried = {key: value for key, value in stated.items() if says_nothing(key)}
        # Only values that `read` accepts: the source may be of another family that lends its tokenizer.
        implied |= {k: v for k, v in stated.items() if v in alternatives(family.implied.get(k, OneOf()))}
    carried.pop("torch_dtype", None)
    name = "dtype" if "dtype" in carried else "torch_dtype"  # transformers 5 writes `dtype`, and reads both
    values = {f: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "source"}
    # JSON has no infinity: a default that holds one, such as an upper limit, is left out.
    infinite = lambda value: isinstance(value, tuple) and math.inf in value
    fields = {f.name: value for f, value in values.items() if not (infinite(value) and value == f.default)}
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = {"rope_type": scaling.rope_type} | dataclasses.asdict(scaling)
        fields["rope_scaling"].pop("max_position_embeddings", None)  # a key of its own
    is_object = lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type)
    fields = {key: dataclasses.asdict(v) if is_object(v) else v for key, v in fields.items()}
    return dict(sorted(family.published_form(carried | implied | fields | {name: dtype.name}).items()))
