"""config.json <-> a family's `Config`: every key is understood, or the file is refused by that key's name."""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Collection, Mapping
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

    def window(self, layer: int) -> int | None:
        """How many positions, its own included, a token of this layer sees; None: all before it."""
        return None


class OneOf(tuple):
    """Values of a key that a family treats alike. The first is written where the source says none."""


# Keys of config.json that say nothing of what the model computes. They are carried along on saving.
NOT_THE_MODEL = {
    "_attn_implementation_autoset", "_name_or_path", "_sliding_window_pattern", "attn_implementation", "attn_pdrop",
    "aux_loss_alpha", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop",
    "eos_token_id", "ep_size", "gradient_checkpointing", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "n_ctx", "n_special", "output_attentions", "output_hidden_states", "output_past",
    "output_router_logits", "pad_token_id", "predict_special_tokens", "problem_type", "resid_pdrop", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "sliding_window_size", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "torch_dtype", "transformers_version", "unsloth_version", "use_cache",
}  # fmt: skip

# Keys that say how a repository is stored. The tensors themselves tell; `zoo.save` writes them anew.
NOT_CARRIED = {"auto_map", "quantization_config"}


def read(family: ModuleType, hub: Mapping[str, Any], source: pathlib.Path | None = None) -> Any:
    """The `family.Config` of a parsed config.json.

    Every key must be a field of it, or have the value that `family.IMPLIED` says is the only one implemented, or be
    none of the model's business. Both `rope_theta` + `rope_scaling` and transformers 5's `rope_parameters` are read.
    What else a family's files may say in several ways, its `standard_form` brings into one.

    Raises:
        ValueError: naming the key that is missing, unknown, of the wrong type, or of a value not implemented.
    """
    where = f"{source / 'config.json'}" if source else "config.json"
    hub = standard_form(family, hub)
    check_quantization(hub, where)
    hints = {f.name: typing.get_type_hints(family.Config)[f.name] for f in dataclasses.fields(family.Config)}
    hints.pop("source")
    # null says no more than leaving the key out, unless it is a value of its own
    null = lambda key: is_bearable(None, hints[key]) if key in hints else None in alternatives(family.IMPLIED.get(key))
    hub = {key: value for key, value in hub.items() if value is not None or null(key)}
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
            if is_bearable(value, int) and not isinstance(value, bool) and is_bearable(1.0, hints[key]):
                value = float(value)  # JSON writes `"rope_theta": 1000000`
            value = tuple(value) if isinstance(value, list) else value
            # One by one: beartype looks at one of a tuple's items, chosen at random.
            items = [(item,) for item in value] if isinstance(value, tuple) else []
            if not all(is_bearable(each, hints[key]) for each in (value, *items)):
                raise ValueError(f"{where} says {key}={value!r}; {family.__name__} needs {hints[key]}.")
            values[key] = value
        elif key in family.IMPLIED:
            if value not in (allowed := alternatives(family.IMPLIED[key])):
                only = " and ".join(map(repr, allowed))
                raise ValueError(f"{where} says {key}={value!r}, but {family.__name__} implements only {only}.")
        elif key not in NOT_THE_MODEL | NOT_CARRIED:
            raise ValueError(
                f"{where} has the key {key!r} (= {value!r}), which {family.__name__} does not know. If it does not "
                "change what the model computes, remove it from the file."
            )
    missing = [
        f.name for f in dataclasses.fields(family.Config) if f.default is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}, which {family.__name__} needs.")
    try:
        return family.Config(**values, source=source)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def standard_form(family: ModuleType, hub: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json in the one form that `family.Config` and `family.IMPLIED` speak of."""
    return family.standard_form(hub) if hasattr(family, "standard_form") else dict(hub)


def text_config(hub: Mapping[str, Any], beside: Collection[str]) -> dict[str, Any]:
    """The part of a multimodal model's config.json that describes its text model, which is all that is read of it.

    `beside` are keys of the outer part that say nothing of the text model.

    Raises:
        ValueError: naming a key of the outer part that is unknown.
    """
    outer = {key: value for key, value in hub.items() if key != "text_config"}
    if unknown := outer.keys() - set(beside) - NOT_THE_MODEL - NOT_CARRIED:
        keys = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"config.json has {keys} beside text_config; whether that changes the text is not known here.")
    return dict(hub["text_config"]) | {key: value for key, value in outer.items() if key not in beside}


def alternatives(implied: Any) -> tuple:
    return tuple(implied) if isinstance(implied, OneOf) else (implied,)


def check_quantization(hub: Mapping[str, Any], where: str) -> None:
    """Raises unless `quantization_config` describes one of the storage formats that `convert.packed` reads."""
    stored = hub.get("quantization_config") or {"quant_method": "mxfp4"}
    match stored:
        case {"quant_method": "mxfp4"} | {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}:
            return
    raise ValueError(
        f"{where} has the quantization_config {dict(stored)}; read are mxfp4, and fp8 with fmt e4m3 and "
        "weight_block_size [128, 128]. Load another repository of the model, with plain weights."
    )


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
    carried, implied = {}, {key: alternatives(value)[0] for key, value in family.IMPLIED.items()}
    if config.source and (path := config.source / "config.json").is_file():
        stated = standard_form(family, json.loads(path.read_text()))
        carried = {key: value for key, value in stated.items() if key in NOT_THE_MODEL}
        # Only what `read` takes: the source may be another family's, where that has the tokenizer.
        implied |= {k: v for k, v in stated.items() if v in alternatives(family.IMPLIED.get(k, OneOf()))}
    carried.pop("torch_dtype", None)
    name = "dtype" if "dtype" in carried else "torch_dtype"  # transformers 5 writes the one and reads both
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "source"}
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = {"rope_type": scaling.rope_type} | dataclasses.asdict(scaling)
    return dict(sorted((implied | fields | carried | {name: dtype.name}).items()))
