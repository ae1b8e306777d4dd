"""Read and write config.json as a family's `Config`. A key that may change the model and is not known is an error.

Keys that transformers does not read for the file's model_type, by known_keys.json, are skipped with a warning.
"""

import dataclasses
import functools
import json
import logging
import math
import pathlib
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from beartype.door import is_bearable

from convert.formats import layouts
from zoo.nn.fields import NOT_CARRIED, KeyProblem, alternatives, is_ignorable, typed
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig, Family
from zoo.nn.rope import RopeScaling


# ======================================================================================================================
# Reading
# ======================================================================================================================

OBJECTS = "per_layer_config", "quantization_config", "rope_parameters", "rope_scaling", "text_config", "vision_config"
# Key -> the key whose value it has if it is null. Any other null means the same as a missing key, unless None is a
# value of the field.
NULLS = {"num_key_value_heads": "num_attention_heads"}
HEADED = "ForSequenceClassification", "Model"  # ends of `architectures` that are no language models
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}  # names of the number of experts, by family


def read(
    family: Family, hub: Mapping[str, Any], source: pathlib.Path | None = None, *, ignore: Collection[str] = ()
) -> Any:
    """Turn a parsed config.json into a `family.Config`.

    Every key must be a field of `family.Config`, have a value that `family.implied` lists, or not affect the model.
    Keys that transformers does not read for this model_type are skipped, and one warning lists them. Rotary positions
    are read in both forms: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
    `family.standard_form` converts other variants of a family's files into one form.

    Args:
        family: the family of the file's model_type.
        hub: the object in config.json.
        source: the folder that it is from.
        ignore: keys to skip where they would be refused, as unknown or for a value that is not implemented; those of
            an object as "vision_config.key". A key that the file lacks may be among them.

    Raises:
        ValueError: keys are missing, unknown, of the wrong type, or have values that are not implemented, or `ignore`
            has a key that the family reads. One message names all of them.
    """
    where, config = f"{source / 'config.json'}" if source else "config.json", None
    found = _Findings(family, where, hub, ignore)
    try:
        hub = standard_form(family, _with_objects(_without_head(family, hub), found), found)
        values = _values(family, hub, found)
        config = None if found.problems else family.Config(**values, source=source)
    except ValueError as error:  # of several keys, or of the file's form: the rest cannot be read
        found.add(f": {error}")
    for key, rule in RULES.items():
        if config is not None and (broken := rule(config)):
            found.add(f" says {key}={getattr(config, key)}, {broken}.")
    found.close()
    return config


def standard_form(family: Family, hub: Mapping[str, Any], found: "_Findings | None" = None) -> dict[str, Any]:
    """Bring a config.json into the family's standard form, less the keys that it cannot read there.

    `found` takes what is wrong with these.

    Raises:
        ValueError: from `family.standard_form`, about more than one key.
    """
    while True:
        try:
            return family.standard_form(hub)
        except KeyProblem as problem:
            within = hub.get(problem.part) if problem.part else hub
            if not isinstance(within, Mapping) or problem.key not in within:  # another key became this one
                raise
            if found:
                found.take(problem, f": {problem}")
            less = {key: value for key, value in within.items() if key != problem.key}
            hub = {**hub, problem.part: less} if problem.part else less


def _with_objects(hub: dict[str, Any], found: "_Findings") -> dict[str, Any]:
    """Leave out keys that need an object and have none; `found` takes them."""
    says = {
        key: f" says {key}={hub[key]!r}; it needs an object in braces, or null."
        for key in OBJECTS
        if hub.get(key) is not None and not isinstance(hub[key], Mapping)
    }
    for key, text in says.items():
        found.add(text, key)
    return {key: value for key, value in hub.items() if key not in says}


def _without_head(family: Family, hub: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out `architectures` that name a model with a head for labels, or without output embeddings.

    Heads are no part of a config: `zoo.weights.heads` reads them.
    """
    names = hub.get("architectures")
    headed = isinstance(names, list) and all(str(name).endswith(HEADED) for name in names)
    drop = headed and names not in _implemented(family, "architectures")
    return {key: value for key, value in hub.items() if key != "architectures" or not drop}


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


def _without_nulls(family: Family, hub: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nulls by `NULLS`, and leave out the others that mean the same as a missing key."""
    hub = {key: hub.get(NULLS[key]) if value is None and key in NULLS else value for key, value in hub.items()}
    hints = _hints(family.Config)

    def may_be_null(key: str) -> bool:
        return is_bearable(None, hints[key]) if key in hints else None in _implemented(family, key)

    return {key: value for key, value in hub.items() if value is not None or may_be_null(key)}


def _values(family: Family, hub: dict[str, Any], found: "_Findings") -> dict[str, Any]:
    """Return the values of the fields of `family.Config`; `found` takes keys that are none and may affect the model."""
    try:
        check_quantization(hub, found.where)
    except ValueError as error:
        found.add(str(error), "quantization_config")
    hub = _without_nulls(family, hub)
    if "rope_theta" in family.Config.__dataclass_fields__:
        try:
            read_rope(family, hub, found.where)
        except ValueError as error:
            found.add(str(error), *ROPE)
            hub = {key: value for key, value in hub.items() if key not in ROPE}
    hints, defaults, values = _hints(family.Config), _defaults(family.Config), {}
    for key, value in hub.items():
        if key in hints:
            # A default may be out of bounds, such as 0 experts.
            is_default = key in defaults and (type(value), value) == (type(defaults[key]), defaults[key])
            said = f" says {key}={value!r:.200}; {family.name}"
            try:
                values[key] = value if is_default else typed(key, value, hints[key], said)
            except ValueError as error:
                found.add(str(error), key)
        elif key in family.implied:
            if value not in (allowed := _implemented(family, key)):
                only = " and ".join(map(repr, allowed))
                text = f" says {key}={value!r:.200}, but {family.name} implements only {only}."
                found.take(KeyProblem(text, key, "value"), text)
        elif not is_ignorable(key) and key not in NOT_CARRIED:
            text = f" has the key {key!r} (= {value!r:.200}), which {family.name} does not know."
            found.take(KeyProblem(text, key, "unknown"), text, of_text=True)
    if missing := [key for key in hints if key not in defaults and key not in values and key not in found.keys]:
        found.add(f" lacks {', '.join(map(repr, missing))}, which {family.name} needs.")
    return values


def _implemented(family: Family, key: str) -> tuple[Any, ...]:
    """Return the values of a key outside of the config that the family implements."""
    return alternatives(family.implied[key]) if key in family.implied else ()


def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, in order, but not that of `source`, which is no key of a file."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.name != "source"}


def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of the fields of a dataclass that have one."""
    return {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}


def _shares_heads(config: AbstractConfig) -> str | None:
    shared = config.num_key_value_heads
    return f"which is no multiple of num_key_value_heads={shared}" if config.num_attention_heads % shared else None


def _has_experts(config: AbstractConfig) -> str | None:
    if not isinstance(config, AbstractMixtureConfig):
        return None
    (name,) = EXPERTS & config.__dataclass_fields__.keys()
    experts = getattr(config, name)
    return f"which is more than {name}={experts}" if config.num_experts_per_tok > experts else None


# Key -> how its value contradicts that of another key, in words, or None: rules for all families.
RULES: dict[str, Callable[[AbstractConfig], str | None]] = {
    "num_attention_heads": _shares_heads,
    "num_experts_per_tok": _has_experts,
}


# ======================================================================================================================
# Keys that are skipped, and keys that are refused
# ======================================================================================================================


@functools.cache
def known_keys() -> dict[str, Any]:
    """Return the keys of config.json that transformers reads, as `tests/zoo/make_known_keys.py` finds them.

    "shared" are those of all models. "types" has, by model_type, "keys", and the model_type of each of the "parts" of
    its file, such as `text_config`, which for those that are "chosen" the part itself may say.
    """
    known = json.loads(pathlib.Path(__file__).with_name("known_keys.json").read_text())
    types = {name: kind | {"keys": frozenset(kind["keys"].split())} for name, kind in known["types"].items()}
    return known | {"shared": frozenset(known["shared"].split()), "types": types}


class _Findings:
    """Problems of one config.json, and its keys that are skipped."""

    def __init__(self, family: Family, where: str, hub: Mapping[str, Any], ignore: Collection[str]):
        """Take the file's family, name and content, and the keys to ignore."""
        self.family, self.where, self.hub, self.ignore = family, where, hub, ignore
        self.problems: list[str] = []
        self.keys: set[str] = set()  # of the problems
        self.refused: list[str] = []  # names of the keys that could be ignored
        self.skipped: list[str] = []
        self.ignored: list[str] = []

    def add(self, text: str, *keys: str) -> None:
        """Add a problem, in a sentence that may begin with the file, about these keys."""
        self.problems.append(text.removeprefix(self.where))
        self.keys.update(keys)

    def take(self, problem: KeyProblem, text: str, *, of_text: bool = False) -> None:
        """Skip or ignore the key of a problem, or add the problem; `of_text`: the key is the text model's."""
        name = f"{problem.part}.{problem.key}" if problem.part else problem.key
        part = problem.part or ("text_config" if of_text and "text_config" in self.hub else "")
        if problem.kind == "unknown" and self._is_unread(problem.key, part):
            self.skipped.append(name)
        elif problem.kind != "type" and name in self.ignore:
            self.ignored.append(name)
        else:
            self.add(text, problem.key)
            self.refused += [name] if problem.kind != "type" else []

    def _is_unread(self, key: str, part: str) -> bool:
        """Whether transformers reads the key in no part of the file, or not in this part of it."""
        types = known_keys()["types"]
        if (file := types.get(str(self.hub.get("model_type")))) is None:
            return False
        parts = {}
        for name, kind in file.get("parts", {}).items():
            stated = self.hub.get(name)
            own = stated.get("model_type") if isinstance(stated, Mapping) and name in file["chosen"] else None
            parts[name] = types.get(str(own), types[kind])
        if part and part not in parts:
            return False
        readers = [parts[part]] if part else [file, *parts.values()]
        return key not in known_keys()["shared"] and not any(key in reader["keys"] for reader in readers)

    def close(self) -> None:
        """Log the keys that are skipped.

        Raises:
            ValueError: there are problems; it names all.
        """
        dropped = {*self.skipped, *self.ignored}
        for name in filter(self._has, self.ignore):
            key = name.partition(".")[2] if name.startswith(OBJECTS) else name
            without_effect = is_ignorable(key) or key in self.family.implied or key == "auto_map"
            if name not in dropped and not without_effect:
                reads = f"which {self.family.name} reads: without it, the model would be another."
                self.add(f" has {name!r}, a key to ignore, {reads}")
        if self.problems:
            raise ValueError(self.where + self._sentence())
        unread = f"skipped, since transformers {known_keys()['transformers']} does not read them"
        if "auto_map" in self.hub:
            unread += " (the repository's own code, which is not run, might)"
        reasons = {unread: self.skipped, "ignored, as asked": self.ignored}
        if said := [f"{reason}: {', '.join(sorted(keys))}" for reason, keys in reasons.items() if keys]:
            logging.getLogger("zoo").warning("%s: %s", self.where, "; ".join(said))

    def _has(self, name: str) -> bool:
        """Whether the file has a key, `name` or "object.key"."""
        objects = {part: self.hub[part] for part in OBJECTS if isinstance(self.hub.get(part), Mapping)}
        dotted = {f"{part}.{key}" for part, stated in objects.items() for key in stated}
        return name in {*self.hub, *objects.get("text_config", ()), *dotted}

    def _sentence(self) -> str:
        """Say all problems in one line, and how keys are ignored."""
        text = self.problems[0]
        if len(self.problems) > 1:
            each = (problem.lstrip(": ").removesuffix(".") for problem in self.problems)
            text = f" has {len(self.problems)} problems: {'; '.join(f'({n}) {one}' for n, one in enumerate(each, 1))}."
        if not self.refused:
            return text
        names = ", ".join(map(repr, self.refused)) + ("," if len(self.refused) == 1 else "")
        return (
            f"{text} Keys that do not change what the model computes can be skipped: ignore=({names}), or "
            f"--ignore-keys {' '.join(self.refused)}."
        )


# ======================================================================================================================
# Rotary positions
# ======================================================================================================================

ROPE = "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"
POSITIONS, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
# rope_type (linear, llama3, yarn, dynamic, longrope) -> the class whose fields are the keys of its object.
SCALINGS: dict[str, type[RopeScaling]] = {kind.rope_type: kind for kind in typing.get_args(RopeScaling)}


def _stretch(positions: int, original: int) -> float:
    return positions / original


# rope_type -> key that its object may lack -> how it follows from the model's positions and the original context.
FOLLOWS: dict[str, dict[str, Callable[[int, int], float]]] = {
    "yarn": {"factor": _stretch},
    "longrope": {"factor": _stretch},
}


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
    stated = {key: value for key, value in (older or newer or {}).items() if value is not None or key == "truncate"}
    lengths = {
        ORIGINAL: hub.pop(ORIGINAL, None),
        POSITIONS: hub.get(POSITIONS, _defaults(family.Config).get(POSITIONS)),
    }
    _read_partial(family, hub, stated, where)
    if "rope_theta" in stated:
        hub["rope_theta"] = stated.pop("rope_theta")
    kind, older_name = stated.pop("rope_type", None), stated.pop("type", None)
    kind = kind or older_name or "default"
    if stated or kind != "default":
        hub["rope_scaling"] = _scaling(kind, stated, lengths, where)
    elif older or newer is not None:  # without either key the family's default stays
        hub["rope_scaling"] = None


def _read_partial(family: Family, hub: dict[str, Any], stated: dict[str, Any], where: str) -> None:
    """Move `partial_rotary_factor` out of the object of a rope, or refuse it if the family turns whole heads."""
    parts = stated.pop("partial_rotary_factor", None), hub.pop("partial_rotary_factor", None)
    parts = [part for part in parts if part is not None]  # the one inside comes first
    if "partial_rotary_factor" in family.Config.__dataclass_fields__:
        for part in parts[:1]:
            hub["partial_rotary_factor"] = part
            if isinstance(part, int | float) and part > 1:
                raise ValueError(f"{where} says partial_rotary_factor={part!r}; at most 1, the whole head, can turn.")
    elif turned := [part for part in parts if part != 1]:
        raise ValueError(
            f"{where} says partial_rotary_factor={turned[0]!r}, but {family.name} turns whole heads, and so does "
            "transformers, whatever the file says. If the weights were trained like that, remove it from the file."
        )


def _scaling(kind: Any, stated: Mapping[str, Any], lengths: Mapping[str, Any], where: str) -> RopeScaling:
    """Read the object of a rope of type `kind` by the fields of its class. `lengths` are the two keys beside it."""
    if (scaling := SCALINGS.get(str(kind))) is None:
        raise ValueError(f"{where} asks for the rope scaling {kind!r}; implemented are {', '.join(SCALINGS)}.")
    hints = {name: hint for name, hint in typing.get_type_hints(scaling).items() if name != "rope_type"}
    if unknown := stated.keys() - (hints.keys() - {POSITIONS}):
        raise ValueError(f"{where}: the rope scaling {kind!r} has no {', '.join(map(repr, sorted(unknown)))}.")
    get = lambda key, value: typed(key, value, hints.get(key, int), f"{where} says {key}={value!r:.200}; {kind} rope")
    values = {**stated, POSITIONS: get(POSITIONS, lengths[POSITIONS])}
    values[ORIGINAL] = stated.get(ORIGINAL, values[POSITIONS]) if lengths[ORIGINAL] is None else lengths[ORIGINAL]
    for key, follow in FOLLOWS.get(kind, {}).items():
        values.setdefault(key, follow(values[POSITIONS], get(ORIGINAL, values[ORIGINAL])))
    if missing := sorted(hints.keys() - _defaults(scaling).keys() - values.keys()):
        raise ValueError(f"{where}: the rope scaling {kind!r} lacks {', '.join(map(repr, missing))}.")
    try:
        return scaling(**{key: get(key, value) for key, value in values.items() if key in hints})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


# ======================================================================================================================
# Writing
# ======================================================================================================================


def write(config: AbstractConfig, family: Family, dtype: np.dtype) -> dict[str, Any]:
    """Make the config.json of a model: the inverse of `read`.

    Keys of the source that libraries read, but that do not affect the model, are copied. Those that `read` skips with
    a warning are not, so that the result is read without one.
    """
    stated = _source_json(config, family)
    carried = {key: value for key, value in stated.items() if is_ignorable(key)}
    carried.pop("torch_dtype", None)
    name = "dtype" if "dtype" in carried else "torch_dtype"  # transformers 5 writes `dtype`, and reads both
    implied = {key: alternatives(value)[0] for key, value in family.implied.items()}
    # Only values that `read` accepts: the source may be of another family that lends its tokenizer.
    implied |= {key: value for key, value in stated.items() if value in _implemented(family, key)}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "source"}
    defaults = _defaults(type(config))
    # JSON has no infinity: a default that holds one, such as an upper limit, is left out.
    infinite = lambda key, value: isinstance(value, tuple) and math.inf in value and value == defaults.get(key)
    plain = {key: _as_json(value) for key, value in fields.items() if not infinite(key, value)}
    return dict(sorted(family.published_form(carried | implied | plain | {name: dtype.name}).items()))


def _source_json(config: AbstractConfig, family: Family) -> dict[str, Any]:
    """Read the config.json that a config was read from, in the standard form; empty if there is none."""
    if config.source is None or not (path := config.source / "config.json").is_file():
        return {}
    return standard_form(family, json.loads(path.read_text()))


def _as_json(value: Any) -> Any:
    """Return the object of a field that is a dataclass, and any other value as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    stated = dataclasses.asdict(value)
    if isinstance(value, RopeScaling):
        stated.pop(POSITIONS, None)  # a key of its own
        # Other libraries take a null for a number.
        stated = {"rope_type": value.rope_type} | {key: each for key, each in stated.items() if each is not None}
    return stated
