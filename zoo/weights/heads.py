"""Read and write the files of heads: transformers' ForSequenceClassification, and sentence-transformers' modules.

The former is one more tensor, `score.weight`, and keys of config.json. The latter is modules.json, which lists modules:
the `Transformer` in the folder itself, and `Pooling`, `Dense` and `Normalize` in folders of their own.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, get_args

import equinox as eqx
import jax

import convert.tensors
from convert.files import MODULES, WEIGHTS, read_json
from zoo.nn.heads import AbstractHead, Activation, ClassificationHead, Dense, EmbeddingHead, Kind, Pooling, RewardHead
from zoo.nn.layers import Linear
from zoo.nn.model import AbstractConfig
from zoo.weights.reading import Stored


CLASSIFIER = "ForSequenceClassification"
SEVERAL = "multi_label_classification"  # as problem_type
ENDING = re.compile("(ForCausalLM|LMHeadModel|ForConditionalGeneration|TextModel)$")  # of transformers' classes
ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "Identity", "torch.nn.modules.activation.Tanh": "Tanh"
}  # fmt: skip
# Keys of 1_Pooling/config.json before sentence-transformers 5.
MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip


# ======================================================================================================================
# Reading.
# ======================================================================================================================


def read(
    kind: Kind, folder: pathlib.Path, hub: Mapping[str, Any], config: AbstractConfig, tensors: Mapping[str, Stored]
) -> tuple[AbstractHead, dict[str, Stored]]:
    """Return the skeleton of a checkpoint's head, and the tensors of model and head together.

    Output embeddings are left out of the tensors. As an "embedding", a checkpoint without modules.json gets
    `EmbeddingHead()`, which has no parameters.

    Args:
        folder: where the checkpoint's files are.
        hub: its config.json.

    Raises:
        ValueError: if the checkpoint has no such head, or one that is not implemented; the message says what there is.
    """
    rest = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name.split(".")}
    if kind == "embedding":
        return described(kind, hub, config), rest | _dense_tensors(folder)
    if "score.weight" not in rest:
        raise ValueError(
            f"{folder} has no score.weight, so it is no {CLASSIFIER}: zoo.surgery.with_head puts a new head on a "
            "language model, and train.reward and train.classify train them."
        )
    rows = rest["score.weight"].shape[0]
    labels = {"id2label": hub.get("id2label") or {str(n): f"LABEL_{n}" for n in range(rows)}}
    if sorted(map(int, labels["id2label"])) != list(range(rows)):
        raise ValueError(f"{folder}/config.json has the id2label {hub['id2label']}, but score.weight has {rows} rows.")
    if kind == "reward" and rows != 1:
        raise ValueError(f"{folder} has {rows} labels, and a reward is one number: load it as a classification.")
    return described(kind, {**hub, **labels}, config), rest


def described(kind: Kind, hub: Mapping[str, Any], config: AbstractConfig) -> AbstractHead:
    """Return the skeleton of the head that `hub`, the config.json, describes, and modules.json beside it.

    Raises:
        ValueError: modules.json lists modules that are not implemented.
    """
    if kind == "embedding":
        return EmbeddingHead() if config.source is None else _embedding(config.source, config.hidden_size)
    width, pad, key = config.hidden_size, (hub.get("text_config") or hub).get("pad_token_id"), jax.random.key(0)
    if kind == "reward":
        return eqx.filter_eval_shape(lambda: RewardHead(width, pad, key=key))
    labels, several = labels_in(hub), has_several_labels(hub)
    return eqx.filter_eval_shape(lambda: ClassificationHead(width, labels, pad, several=several, key=key))


def labels_in(hub: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a classifier's config.json, in the order of its outputs; () if it has none."""
    names = hub.get("id2label") or {}
    return tuple(names[n] for n in sorted(names, key=int))


def has_several_labels(hub: Mapping[str, Any]) -> bool:
    """Whether a text may have several of the labels of a classifier's config.json."""
    return hub.get("problem_type") == SEVERAL


def is_classifier(hub: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with a head for labels."""
    return any(str(name).endswith(CLASSIFIER) for name in hub.get("architectures") or ())


def _embedding(folder: pathlib.Path, width: int) -> EmbeddingHead:
    """Return the skeleton of the head in sentence-transformers' files; without them, that of Qwen3-Embedding."""
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if not kinds:
        return EmbeddingHead()
    known = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), *["Normalize"] * ("Normalize" in kinds)]
    if kinds != known:
        raise ValueError(
            f"{folder / MODULES} lists {', '.join(kinds)}; implemented are Transformer, Pooling, any number of Dense, "
            "and Normalize, in this order."
        )
    dense = []
    for kind, path in modules:
        if kind == "Dense":
            dense.append(_dense(folder / path, width))
            width = dense[-1].linear.shape[0]
    pooling = _pooling(folder / modules[1][1])
    return EmbeddingHead(dense=tuple(dense), pooling=pooling, normalize="Normalize" in kinds)


def _dense_tensors(folder: pathlib.Path) -> dict[str, Stored]:
    """Open the tensors of the linear maps that modules.json lists, by the names that `EmbeddingHead` gives them."""
    found: dict[str, Stored] = {}
    for n, (kind, path) in enumerate(_modules(folder)):
        if kind == "Dense":
            if not (folder / path / WEIGHTS).is_file():
                raise ValueError(
                    f"{folder / path} has no {WEIGHTS}, and other formats, such as pickle files, are refused."
                )
            convert.tensors.verify_files(folder / path)
            found |= {f"{n}_Dense/{t.name}": t for t in convert.tensors.open_file(folder / path / WEIGHTS)}
    return found


def _modules(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Return the modules that modules.json lists: the last part of their type, and their folder. No file: none."""
    where = folder / MODULES
    if not where.is_file():
        return []
    listed = json.loads(where.read_text(encoding="utf-8"))
    try:
        found = [(each["type"].rpartition(".")[2], each["path"]) for each in sorted(listed, key=lambda m: m["idx"])]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where} is no list of modules with idx, path and type: {error!r}.") from error
    for _, path in found:
        if not re.fullmatch(r"\w[\w-]*|", path):
            raise ValueError(f"{where} has the path {path!r}, which is no folder beside it.")
    return found


def _pooling(folder: pathlib.Path) -> Pooling:
    """Return how the config of a `Pooling` module pools."""
    stated = read_json(folder / "config.json")
    mode = stated.get("pooling_mode") or [mode for key, mode in MODES.items() if stated.get(key)]
    modes = [mode] if isinstance(mode, str) else list(mode)
    if stated.get("include_prompt") is False:
        raise ValueError(f"{folder}/config.json leaves prompts out of the pooling, which is not implemented.")
    for known in get_args(Pooling):
        if modes == [known]:
            return known
    raise ValueError(
        f"{folder}/config.json pools by {', '.join(map(str, modes)) or 'nothing'}; implemented is one of "
        f"{', '.join(get_args(Pooling))}."
    )


def _dense(folder: pathlib.Path, width: int) -> Dense:
    """Return the skeleton of a `Dense` module that takes vectors of this width."""
    stated = read_json(folder / "config.json")
    function = stated.get("activation_function", "torch.nn.modules.activation.Tanh")
    if function not in ACTIVATIONS:
        known = " and ".join(ACTIVATIONS)
        raise ValueError(f"{folder}/config.json has the activation_function {function!r}; implemented are {known}.")
    for key in ("module_input_name", "module_output_name", "use_residual"):
        if stated.get(key) not in (None, False, "sentence_embedding"):
            raise ValueError(f"{folder}/config.json says {key}={stated[key]!r}, which is not implemented.")
    if stated.get("in_features") != width:
        raise ValueError(f"{folder}/config.json takes {stated.get('in_features')} features, and gets {width}.")
    out, bias = int(stated["out_features"]), bool(stated.get("bias", True))
    linear = eqx.filter_eval_shape(lambda: Linear(width, out, bias=bias, key=jax.random.key(0)))
    return Dense(linear, ACTIVATIONS[function])


# ======================================================================================================================
# Writing.
# ======================================================================================================================


def config_keys(head: AbstractHead, hub: Mapping[str, Any], source: pathlib.Path | None) -> dict[str, Any]:
    """Return the keys of config.json that a head changes.

    Args:
        hub: the config.json of the model without a head.
        source: the folder that the model was read from. Its architectures stay if they name a model with the head.
    """
    keys: dict[str, Any] = {}
    stated = read_json(source / "config.json") if source and (source / "config.json").is_file() else {}
    own = stated.get("architectures") if stated.get("model_type") == hub["model_type"] else None
    if own and (isinstance(head, EmbeddingHead) or own[0].endswith(CLASSIFIER)):
        keys["architectures"] = own
    elif names := hub.get("architectures"):
        keys["architectures"] = [ENDING.sub("Model" if isinstance(head, EmbeddingHead) else CLASSIFIER, names[0])]
    if isinstance(head, ClassificationHead | RewardHead):
        labels = head.labels if isinstance(head, ClassificationHead) else ("LABEL_0",)
        keys["pad_token_id"] = head.pad
        keys["id2label"] = {str(n): label for n, label in enumerate(labels)}
        keys["label2id"] = {label: n for n, label in enumerate(labels)}
        keys |= {"problem_type": SEVERAL} if isinstance(head, ClassificationHead) and head.several else {}
    return keys


def files(head: AbstractHead, width: int) -> dict[str, Any]:
    """Return the JSON files of a head beside config.json: path in the folder -> content. `width` is the model's."""
    if not isinstance(head, EmbeddingHead):
        return {}
    kinds = ["Transformer", "Pooling", *["Dense"] * len(head.dense), *["Normalize"] * head.normalize]
    found: dict[str, Any] = {
        MODULES: [
            {
                "idx": n,
                "name": str(n),
                "path": f"{n}_{kind}" if n else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for n, kind in enumerate(kinds)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, "include_prompt": True}
        | {key: mode == head.pooling for key, mode in MODES.items()},
    }
    for n, dense in enumerate(head.dense, 2):
        out, width = dense.linear.shape
        found[f"{n}_Dense/config.json"] = {
            "in_features": width, "out_features": out, "bias": dense.linear.bias is not None,
            "activation_function": next(name for name, each in ACTIVATIONS.items() if each == dense.activation),
        }  # fmt: skip
    return found
