"""Reads config.json's values as the types of a config's fields, and fills fields in; lists keys not of the model."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from beartype.door import is_bearable

from zoo.nn.model import AbstractConfig, OneOf


T = TypeVar("T")

# Keys of config.json that libraries read, but that do not affect what the model computes. Saving copies them.
NOT_THE_MODEL = {
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_name_or_path", "_sliding_window_pattern", "attn_implementation", "aux_loss_alpha",
    "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "conv_use_xavier_init", "decoder_start_token_id", "dtype", "eos_token_id", "ep_size",
    "experts_implementation", "gradient_checkpointing", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "n_ctx", "n_special", "name_or_path", "num_labels", "num_logits_to_keep", "output_attentions",
    "output_hidden_states", "output_past", "output_router_logits", "pad_token_id", "predict_special_tokens",
    "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id",
    "seq_aux", "sliding_window_size", "summary_activation", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip

DROPOUT = re.compile(r".*(dropout|dropout_prob|pdrop)")  # nor do these: dropout is off at inference

# Numbers that may be 0, and upper bounds of integers. All other numbers must be above 0, and integers below 2**31.
MAY_BE_ZERO = {
    "attention_factor", "attn_scale", "first_k_dense_replace", "head_dim", "hidden_size_per_layer_input",
    "interleave_moe_layer_step", "layer_norm_epsilon", "llama_4_scaling_beta", "max_window_layers", "mscale",
    "mscale_all_dim", "mtp_num_hidden_layers", "num_dense_layers", "num_nextn_predict_layers", "rms_norm_eps",
}  # fmt: skip

MOST = {"num_hidden_layers": 100_000, "n_layer": 100_000}

# Keys about how a repository is stored. Saving does not copy them, since `zoo.save` stores tensors in its own way.
NOT_CARRIED = {"auto_map", "quantization_config"}


class KeyProblem(ValueError):
    """A key of config.json that cannot be read."""

    def __init__(self, says: str, key: str, kind: Literal["unknown", "value", "type"], *, part: str = ""):
        """Make the error.

        Args:
            says: the message.
            key: the key.
            kind: whether the key is not known, has a value that is not implemented, or one of a wrong type.
            part: the object that it stands in, such as "vision_config"; "": none, or `text_config`.
        """
        super().__init__(says)
        self.key, self.kind, self.part = key, kind, part


def is_ignorable(key: str) -> bool:
    """Whether a key of config.json does not affect what the model computes."""
    return key in NOT_THE_MODEL or DROPOUT.fullmatch(key) is not None


def typed(key: str, value: Any, hint: Any, who: str) -> Any:
    """Convert a value of config.json to the type of its field: integers to floats, lists to tuples, objects to the
    dataclasses that a field may be.

    Raises:
        ValueError: beginning with `who`, if it is of another type or out of bounds.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _object(key, value, hint, who)
    is_list = isinstance(value, list)
    if is_list and len(value) > MOST["num_hidden_layers"]:
        raise ValueError(f"{who} needs at most {MOST['num_hidden_layers']} entries, and there are {len(value)}.")
    # Items are checked one by one: of a list, beartype checks one item, chosen at random.
    fits = lambda item: is_bearable((item,) if is_list else item, hint)
    items = value if is_list else [value]
    if fits(1.0):  # files have `"rope_theta": 1000000`
        items = [float(item) if type(item) is int and abs(item) < 2**63 else item for item in items]
    result = tuple(items) if is_list else items[0]
    takes_bool = bool in (hint, *typing.get_args(hint))  # to beartype, True is an int, too
    mistaken = not takes_bool and any(isinstance(item, bool) for item in items)
    if mistaken or not all(map(fits, items)) or not is_bearable(result, hint):
        raise ValueError(f"{who} needs {getattr(hint, '__name__', hint) if isinstance(hint, type) else hint}.")
    if isinstance(result, int | float) and not isinstance(result, bool):
        _check_bounds(key, result, who)
    return result


def _object(key: str, stated: Mapping[str, Any], kind: Any, who: str) -> Any:
    """Convert an object of config.json to a dataclass, field by field; nulls are as if the key were absent.

    Raises:
        ValueError: beginning with `who`, if a key is unknown or missing; or from `typed`.
    """
    hints, values = typing.get_type_hints(kind), {name: value for name, value in stated.items() if value is not None}
    if unknown := sorted(map(str, values.keys() - hints.keys())):
        raise ValueError(f"{who} has no {', '.join(unknown)} there.")
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if lacking := [name for name in needed if name not in values]:
        raise ValueError(f"{who} needs {', '.join(lacking)} there.")
    read = lambda name: typed(f"{key}.{name}", values[name], hints[name], f"{who}'s {name}")
    return kind(**{name: read(name) for name in values})


def _check_bounds(key: str, number: float, who: str) -> None:
    """Raise ValueError unless a number is above 0, or may be 0, and if it is an integer, below the key's bound."""
    most = math.inf if isinstance(number, float) else MOST.get(key, 2**31)
    if not (0 < number < most or (number == 0 and key in MAY_BE_ZERO)):
        least = "0 or more" if key in MAY_BE_ZERO else "more than 0"
        raise ValueError(f"{who} needs {least}{'' if most == math.inf else f', and less than {most}'}.")


def alternatives(implied: Any) -> tuple:
    return tuple(implied) if isinstance(implied, OneOf) else (implied,)


def part_config(kind: type[T], stated: Mapping[str, Any], implied: Mapping[str, Any], name: str) -> T:
    """Read an object within a config.json, such as `vision_config`, as a dataclass: strictly, as `read` does.

    `name` is the object's key, or "It" for the file itself.

    Raises:
        KeyProblem: naming the key that is unknown, of the wrong type, or of a value not implemented.
    """
    hints = {k: hint for k, hint in typing.get_type_hints(kind).items() if typing.get_origin(hint) is not ClassVar}
    values, part = {}, "" if name == "It" else name
    for key, value in stated.items():
        if key in hints and value is not None:
            try:
                values[key] = typed(key, value, hints[key], f"{name} says {key}={value!r:.200}; it")
            except ValueError as error:
                raise KeyProblem(str(error), key, "type", part=part) from error
        elif key in implied and value not in alternatives(implied[key]):
            only = " and ".join(map(repr, alternatives(implied[key])))
            says = f"{name} says {key}={value!r:.200}, but only {only} is implemented."
            raise KeyProblem(says, key, "value", part=part)
        elif key not in implied and not is_ignorable(key) and value is not None:
            says = f"{name} has the key {key!r} (= {value!r:.200}), which is not known here."
            raise KeyProblem(says, key, "unknown", part=part)
    return kind(**values)


def fill_layers(config: AbstractConfig, key: str, usual: Callable[[int], Any]) -> None:
    """Fills in a field that has an entry for each layer, such as `layer_types`, where config.json leaves it empty.

    Layer n gets `usual(n)`, so that equivalent configs compare equal.

    Raises:
        ValueError: if the field has too few entries or too many.
    """
    layers = config.num_hidden_layers
    entries = getattr(config, key) or tuple(map(usual, range(layers)))
    object.__setattr__(config, key, entries)
    if len(entries) != layers:
        raise ValueError(f"{key} has {len(entries)} entries, but num_hidden_layers is {layers}.")


def text_config(hub: Mapping[str, Any], beside: Collection[str]) -> dict[str, Any]:
    """Extract the text model's part of a multimodal config.json.

    `beside` lists keys outside of `text_config` that do not affect the text model. The `architectures` inside, which
    transformers does not read, may be the whole model's, and are left out.

    Raises:
        KeyProblem: naming an unknown key outside of `text_config`.
    """
    outer = {key: value for key, value in hub.items() if key != "text_config"}
    if unknown := sorted(outer.keys() - set(beside) - NOT_THE_MODEL - NOT_CARRIED):
        says = f"{unknown[0]!r} beside text_config; whether that changes the text is not known here."
        raise KeyProblem(f"config.json has {says}", unknown[0], "unknown")
    text = {key: value for key, value in hub["text_config"].items() if key != "architectures"}
    return text | {key: value for key, value in outer.items() if key not in beside}
