"""Read and write config.json as a family's `Config`. A key that is not understood is refused, by name."""

import dataclasses
import json
import logging
import math
import pathlib
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from beartype.door import is_bearable

from convert.formats import layouts
from zoo.nn import rope
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig, Family, OneOf


T = TypeVar("T")


# Keys of config.json that do not affect what the model computes. Saving copies them.
NOT_THE_MODEL = {
    "_attn_implementation_autoset", "_name_or_path", "_sliding_window_pattern", "attn_implementation", "aux_loss_alpha",
    "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "eos_token_id", "ep_size",
    "gradient_checkpointing", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "n_ctx", "n_special",
    "num_logits_to_keep", "output_attentions", "output_hidden_states", "output_past", "output_router_logits",
    "pad_token_id", "predict_special_tokens", "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "seq_aux", "sliding_window_size", "summary_activation", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "torch_dtype", "transformers_version",
    "unsloth_version", "use_cache",
}  # fmt: skip
DROPOUT = re.compile(r".*(dropout|dropout_prob|pdrop)")  # nor do these: dropout is off at inference

# Nor do these, which libraries and training runs leave behind. `read` lists those that it finds in one warning.
LEFT_BEHIND = {
    # settings for generation, which belong in generation_config.json
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
    # for other uses of the architecture, and for how a library runs it
    "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_experts_implementation",
    "_flash_attn_2_enabled", "cross_attention_hidden_size", "experts_implementation", "finetuning_task", "is_decoder",
    "is_llama_config", "name_or_path", "num_labels", "prefix", "sep_token_id", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "torchscript", "transformers.js_config", "use_bfloat16", "use_flash_attention",
    "use_flash_attention_2",
    # for training
    "gradient_checkpointing_kwargs", "max_seq_length", "model_max_length", "neftune_noise_alpha",
    "tokenizer_model_max_length", "tokenizer_padding_side", "unsloth_fixed", "unsloth_tiled_mlp",
}  # fmt: skip

# Numbers that may be 0, and upper bounds of integers. All other numbers must be above 0, and integers below 2**31.
MAY_BE_ZERO = {
    "attention_factor", "attn_scale", "first_k_dense_replace", "head_dim", "layer_norm_epsilon", "max_window_layers",
    "interleave_moe_layer_step", "mscale", "mscale_all_dim", "mtp_num_hidden_layers", "num_nextn_predict_layers",
    "rms_norm_eps",
}  # fmt: skip
MOST = {"num_hidden_layers": 100_000, "n_layer": 100_000}

# Keys about how a repository is stored. Saving does not copy them, since `zoo.save` stores tensors in its own way.
NOT_CARRIED = {"auto_map", "quantization_config"}


def read(family: Family, hub: Mapping[str, Any], source: pathlib.Path | None = None) -> Any:
    """Turn a parsed config.json into a `family.Config`.

    Every key must be a field of it, have a value that `family.implied` lists, or be one that does not affect the model.
    Rotary positions are read in both forms: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
    Other variants of a family's files are brought into one form by its `standard_form`.

    Raises:
        ValueError: naming the key that is missing, unknown, of the wrong type, or of a value not implemented.
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
            values[key] = value  # whatever its bounds, such as 0 experts
        elif key in hints:
            values[key] = typed(key, value, hints[key], f"{where} says {key}={value!r}; {family.name}")
        elif key in family.implied:
            if value not in (allowed := values_of(key)):
                only = " and ".join(map(repr, allowed))
                raise ValueError(f"{where} says {key}={value!r}, but {family.name} implements only {only}.")
        elif key in LEFT_BEHIND:
            left_behind.append(key)
        elif not says_nothing(key) and key not in NOT_CARRIED:
            raise ValueError(
                f"{where} has the key {key!r} (= {value!r}), which {family.name} does not know. If it does not "
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


def part_config(kind: type[T], stated: Mapping[str, Any], implied: Mapping[str, Any], name: str) -> T:
    """Read an object within a config.json, such as `vision_config`, as a dataclass: strictly, as `read` does.

    Raises:
        ValueError: naming the key that is unknown, of the wrong type, or of a value not implemented.
    """
    hints, values = typing.get_type_hints(kind), {}
    for key, value in stated.items():
        if key in hints and value is not None:
            values[key] = typed(key, value, hints[key], f"{name} says {key}={value!r}; it")
        elif key in implied and value not in alternatives(implied[key]):
            only = " and ".join(map(repr, alternatives(implied[key])))
            raise ValueError(f"{name} says {key}={value!r}, but only {only} is implemented.")
        elif key not in implied and not says_nothing(key) and value is not None:
            raise ValueError(f"{name} has the key {key!r} (= {value!r}), which is not known here.")
    return kind(**values)


def says_nothing(key: str) -> bool:
    """Whether a key of config.json does not affect what the model computes."""
    return key in NOT_THE_MODEL or key in LEFT_BEHIND or DROPOUT.fullmatch(key) is not None


def typed(key: str, value: Any, hint: Any, who: str) -> Any:
    """Convert a value of config.json to the type of its field: integers to floats, lists to tuples, objects to the
    dataclasses that a field may be.

    Raises:
        ValueError: beginning with `who`, if it is of another type or out of bounds.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        hints, fields = typing.get_type_hints(hint), dataclasses.fields(hint)
        value = {name: v for name, v in value.items() if v is not None}
        if unknown := sorted(map(str, value.keys() - hints.keys())):
            raise ValueError(f"{who} has no {', '.join(unknown)} there.")
        if lacking := [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in value]:
            raise ValueError(f"{who} needs {', '.join(lacking)} there.")
        return hint(**{name: typed(f"{key}.{name}", v, hints[name], f"{who}'s {name}") for name, v in value.items()})
    # Check the items one by one: of a list, beartype checks one item, chosen at random.
    items, one = (value, lambda item: (item,)) if isinstance(value, list) else ([value], lambda item: item)
    if is_bearable(one(1.0), hint):  # files have `"rope_theta": 1000000`
        items = [float(item) if type(item) is int and abs(item) < 2**63 else item for item in items]
    result = tuple(items) if isinstance(value, list) else items[0]
    mistaken = any(isinstance(item, bool) for item in items) and bool not in (hint, *typing.get_args(hint))
    if mistaken or not all(is_bearable(one(item), hint) for item in items) or not is_bearable(result, hint):
        raise ValueError(f"{who} needs {getattr(hint, '__name__', hint) if isinstance(hint, type) else hint}.")
    if isinstance(result, int | float) and not isinstance(result, bool):
        most = math.inf if isinstance(result, float) else MOST.get(key, 2**31)
        if not (0 < result < most or (result == 0 and key in MAY_BE_ZERO)):
            least = "0 or more" if key in MAY_BE_ZERO else "more than 0"
            raise ValueError(f"{who} needs {least}{'' if most == math.inf else f', and less than {most}'}.")
    return result


def text_config(hub: Mapping[str, Any], beside: Collection[str]) -> dict[str, Any]:
    """Extract the text model's part of a multimodal config.json.

    `beside` lists keys outside of `text_config` that do not affect the text model.

    Raises:
        ValueError: naming an unknown key outside of `text_config`.
    """
    outer = {key: value for key, value in hub.items() if key != "text_config"}
    if unknown := outer.keys() - set(beside) - NOT_THE_MODEL - NOT_CARRIED:
        keys = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"config.json has {keys} beside text_config; whether that changes the text is not known here.")
    return dict(hub["text_config"]) | {key: value for key, value in outer.items() if key not in beside}


def alternatives(implied: Any) -> tuple:
    return tuple(implied) if isinstance(implied, OneOf) else (implied,)


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
    """Convert the rotary keys of `hub`, in either form, to `rope_theta` and `rope_scaling`, in place; and to
    `partial_rotary_factor`, in families that have it.

    Precedence is that of transformers 5. The older `rope_scaling` wins over `rope_parameters`. A `rope_theta` or
    `partial_rotary_factor` inside of it wins over one beside it. An `original_max_position_embeddings` beside it wins
    over one inside; without either it is `max_position_embeddings`.

    Raises:
        ValueError: naming what is missing, unknown, of the wrong type or not implemented.
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
    get = lambda key, value: typed(key, value, hints.get(key, int), f"{where} says {key}={value!r}; {kind} rope")
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
    # JSON has no infinity: a default that is none, such as of an upper limit, is left out.
    infinite = lambda value: isinstance(value, tuple) and math.inf in value
    fields = {f.name: value for f, value in values.items() if not (infinite(value) and value == f.default)}
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = {"rope_type": scaling.rope_type} | dataclasses.asdict(scaling)
        fields["rope_scaling"].pop("max_position_embeddings", None)  # a key of its own
    is_object = lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type)
    fields = {key: dataclasses.asdict(v) if is_object(v) else v for key, v in fields.items()}
    return dict(sorted(family.published_form(carried | implied | fields | {name: dtype.name}).items()))
