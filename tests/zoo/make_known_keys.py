"""Writes zoo/known_keys.json, the keys of config.json that transformers reads: `python -m tests.zoo.make_known_keys`.

For each model_type that a family reads, and for the types of the parts of its files, these are

- what its config class has: fields, attributes, methods and `attribute_map`;
- what the code of its config and its model asks a config for: `config.x`, `getattr(config, "x")`, `kwargs.pop("x")`,
  and any string there that could be a key, since a key may be asked for by a variable;
- what transformers' code for all models asks a config for: "shared".

A key may be listed that has no effect, and then is refused where it could be skipped. The opposite would be an error:
`tests/zoo/test_known_keys.py` runs transformers' models, and records which keys they ask for.
"""

import ast
import dataclasses
import functools
import inspect
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.configuration_utils import PreTrainedConfig

from zoo import registry


FILE = pathlib.Path(registry.__file__).with_name("known_keys.json")
ROOT = pathlib.Path(transformers.__file__).parent
# Folders of transformers, and beginnings of its files' names, that compute nothing of a model's logits.
ELSEWHERE = {
    "__pycache__", "cli", "continuous_batching", "data", "decision", "exporters", "loss", "models", "pipelines",
}  # fmt: skip
BEGINNINGS = (
    "attention_visualizer", "audio_", "convert_", "debug_", "deepspeed", "executorch", "feature_", "hf_argparser",
    "hyperparameter_", "image_", "integration_utils", "model_debugging", "modelcard", "optimization", "processing_",
    "testing_", "tokenization_", "trainer", "training_", "video_",
)  # fmt: skip
# Configs that are not a model's: of generation, adapters, quantisation.
OTHERS = {
    "generation_config", "quantization_config", "quant_config", "peft_config", "watermarking_config", "compile_config",
    "assistant_generation_config", "load_config", "kernel_config", "adapter_config", "dtype_config",
    "continuous_batching_config", "distributed_config", "from_config", "vptq_config",
}  # fmt: skip
# Asked for by a variable: names that are put together, and lists of names.
BY_VARIABLE = {
    "_rope_type_labels", "audio_encoder", "audio_token_id", "decoder", "encoder", "generator", "image_token_id",
    "output_attentions", "output_cross_attentions", "output_hidden_states", "text_encoder", "video_token_id",
    "vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip


def name_of(node: ast.expr) -> str:
    """Returns the last word of an expression: "config" of `self.config` and `model.get_config()`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return name_of(function)
        case ast.Subscript(value=value):
            return name_of(value)
        case _:
            return ""


def is_config(node: ast.expr) -> bool:
    """Whether an expression is a model's config, by its name."""
    name = name_of(node)
    return name.lower().endswith(("config", "cfg", "configs")) and name not in OTHERS


def asked(path: pathlib.Path, *, own: bool) -> Iterator[str]:
    """Yields the keys that a file asks configs for; with `own`, as a file of one model_type alone, every string too."""
    of_configs = path.name.startswith(("configuration_", "modeling_rope")) or path.parent.name == "heterogeneity"
    for node in ast.walk(_tree(path)):
        match node:
            case ast.Attribute(value=value, attr=key) if is_config(value):
                yield key
            case ast.Call(args=[value, ast.Constant(value=str(key)), *_]) if is_config(value):
                yield key
            case ast.Attribute(value=ast.Name(id="self"), attr=key) if of_configs:
                yield key
            case ast.Call(args=[ast.Constant(value=str(key)), *_]) if of_configs:  # kwargs.pop("x")
                yield key
            case ast.Subscript(slice=ast.Constant(value=str(key))) if of_configs:
                yield key
            case ast.Constant(value=str(key)) if own and key.isidentifier():
                yield key


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def shared() -> set[str]:
    """Returns the keys that the code for all models asks for, the base class of configs included."""
    computes = lambda path: not ({*path.relative_to(ROOT).parts} & ELSEWHERE or path.name.startswith(BEGINNINGS))
    files = [path for path in ROOT.rglob("*.py") if computes(path)]
    files.remove(ROOT / "generation" / "configuration_utils.py")
    files += [ROOT / "models" / "auto" / f"{name}_auto.py" for name in ("configuration", "modeling")]
    return BY_VARIABLE.union(_attributes(PreTrainedConfig), *(asked(path, own=False) for path in files))


def files_of(kind: type[PreTrainedConfig]) -> set[pathlib.Path]:
    """Returns the files of a config class: those beside it, of the classes it derives from, and what these import."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("transformers.models.")]
    waiting, found = {pathlib.Path(inspect.getfile(each)).parent for each in own}, set[pathlib.Path]()
    folders = set[pathlib.Path]()
    while waiting:
        folders.add(folder := waiting.pop())
        code = {path for path in folder.glob("*.py") if path.name.startswith(("configuration_", "modeling_"))}
        found |= code
        for node in (node for path in code for node in ast.walk(_tree(path))):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:  # from ..siglip.modeling_siglip
                other = ROOT / "models" / node.module.split(".")[0]
                waiting |= {other} - folders - {ROOT / "models" / "auto"}
    return found


def keys_of(kind: type[PreTrainedConfig]) -> set[str]:
    """Returns the keys that a config class and the models of its file read."""
    declared = {*_attributes(kind), *kind.attribute_map, *kind.attribute_map.values()}
    declared |= {field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    return declared.union(*(asked(path, own=True) for path in files_of(kind)))


def parts_of(kind: type[PreTrainedConfig]) -> dict[str, tuple[str, type[PreTrainedConfig] | None]]:
    """Returns key of an object within a config.json -> its model_type and class; None: the object's model_type says."""
    return {
        key: (spec.model_type, spec.config_class if issubclass(spec.config_class, PreTrainedConfig) else None)
        for key, spec in kind.sub_configs_defaults.items()
    }


def known_keys() -> dict[str, Any]:
    """Returns the content of the file."""
    everywhere, types = shared(), dict[str, Any]()
    mapping = transformers.CONFIG_MAPPING
    waiting = {kind: mapping[kind] for name in registry.FAMILIES for kind in name.split("/") if kind in mapping}
    while waiting:
        model_type, kind = waiting.popitem()
        parts = parts_of(kind)
        types[model_type] = {"keys": _words(keys_of(kind) - everywhere)}
        if parts:
            types[model_type]["parts"] = {key: name for key, (name, _) in parts.items()}
            types[model_type]["chosen"] = sorted(key for key, (_, kind) in parts.items() if kind is None)
        found = {name: kind or mapping[name] for name, kind in parts.values()}
        waiting |= {name: kind for name, kind in found.items() if name not in types}
    return {
        "transformers": transformers.__version__,
        "shared": _words(everywhere),
        "types": dict(sorted(types.items())),
    }


def _attributes(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("__")}


def _words(keys: set[str]) -> str:
    """Returns keys as the file has them; names of classes and the like are none."""
    return " ".join(sorted(key for key in keys if re.fullmatch("[a-z_][A-Za-z0-9_.]*", key)))


if __name__ == "__main__":
    FILE.write_text(json.dumps(known_keys(), indent=1) + "\n")
    print(f"Wrote {FILE}.")
