"""Files of a checkpoint in the Hub's layout: their names, and strict reading of those that are JSON."""

import collections
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Sequence
from typing import Any


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "model.safetensors.manifest.json"  # file of weights -> SHA-256; `convert.tensors.save_tensors` writes it
# Files beside config.json and the weights: the tokenizer's, the settings for generation, and how images are prepared.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "decision.json",
)
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")  # the name of a part of a GGUF file
CARD = "README.md"  # the model card, of what is in the folder and so not copied with it
DECISION = "decision.json"  # how a model answers questions by the labels of their options (`zoo.text.questions`)
# Files of sentence-transformers' modules behind the model: which there are, how they are made, and their weights.
MODULES = "modules.json"
MODULE_CONFIGS = "*_Pooling/config.json", "*_Dense/config.json"
MODULE_WEIGHTS = "*_Dense/model.safetensors"
LARGEST = 2**25  # most bytes of a JSON file, or of a response of the Hub, whose listings take 200 for each file


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the JSON object in a file. Infinity may be Python's literal, or transformers 5's {"__float__": "Infinity"}.

    Raises:
        ValueError: the JSON is malformed (the message names the line), is not an object, has a key twice, or holds NaN
            or -Infinity; or the file is larger than LARGEST, or not a regular file.
    """
    if (size := regular(path)) > LARGEST:
        raise ValueError(f"{path} has {size:,} bytes, where a few kB of JSON belong.")

    try:
        value = json.loads(
            pathlib.Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where a JSON object belongs.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
    if len(out := dict(pairs)) < len(pairs):
        twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} appears twice")
    return math.inf if out == {"__float__": "Infinity"} else out


def _constant(literal: str) -> float:
    if literal != "Infinity":
        raise ValueError(f"{literal} is not JSON")
    return math.inf


def regular(path: str | os.PathLike[str]) -> int:
    """Returns the size of a regular file, and refuses others: opening a pipe may block, and a device may have no end.

    Raises:
        OSError: there is no such file.
        ValueError: the path is not a regular file.
    """
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise ValueError(f"{path} is no regular file (a folder, pipe or device); put the file itself there.")
    return state.st_size


def one_gguf(names: Sequence[str], where: str) -> str | None:
    """Returns the only GGUF file of a folder or repository `where`, or of its parts the first; None: there is none.

    Files named mmproj-*.gguf, which hold towers for images, do not count.

    Raises:
        ValueError: there are several; the message names them.
    """
    parts = ((name, PART.fullmatch(name)) for name in sorted(names))
    models = [name for name, part in parts if not ((part and int(part["number"]) > 1) or name.startswith("mmproj"))]
    if len(models) > 1:
        listed = ", ".join(models[:12]) + (", ..." if len(models) > 12 else "")
        raise ValueError(f"{where} has {len(models)} GGUF files; name one of them, as {where}/{models[0]}: {listed}.")
    return models[0] if models else None


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads a model.safetensors.index.json, and returns tensor name -> name of its file.

    Raises:
        ValueError: the index is malformed, empty, or names anything but a .safetensors file of its own folder.
    """
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path} has no weight_map from tensors to files.")
    for tensor, file in index.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise ValueError(f"{path} puts {tensor} in {file!r}, which is no .safetensors file of the same folder.")
    return index
