"""Language models as Equinox modules, straight from Hugging Face checkpoints.

    model = zoo.load("qwen3-0.6b")
    tokenizer = zoo.tokenizer("qwen3-0.6b")
    print(zoo.generate(model, tokenizer, ["The capital of France is"], max_new_tokens=8))

A model is named by a zoo name (`zoo.names()`), by a Hub repository "org/name", or by a folder in the Hub's layout.
"""

import difflib
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import warnings
from typing import Any, Literal


__version__ = "0.1.0"


def _import_own(name: str) -> None:
    """Imports zoo's package `name` from beside zoo, whatever else of that name comes first on the path.

    The names are common. A user's folder of data is no module, and one's own script convert.py is seldom imported, so
    that what comes first on the path hides ours only by its place; the user hears of it, since from here on the name
    is our package's. One process can't have two packages of one name: if the other was imported already, this raises.
    """
    folder = pathlib.Path(__file__).resolve().parent.parent / name
    # Installed into one folder, the later of two packages of one name overwrites files of the earlier.
    for other in importlib.metadata.distributions(name=name):
        if pathlib.Path(str(other.locate_file(name))).resolve() == folder:
            raise ImportError(
                f"zoo's package {name!r} and that of the distribution {name} {other.version} were installed into the "
                f"same folder {folder}, one over the other; uninstall {name} and install equinox-zoo again, or use "
                "each in an environment of its own."
            )
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded else importlib.util.find_spec(name)
    origin = spec.origin if spec and spec.origin else None  # a folder without __init__.py has none
    if origin and pathlib.Path(origin).resolve() == folder / "__init__.py":
        return
    if loaded:
        theirs = origin or ", ".join(getattr(loaded, "__path__", ["a module without a file"]))
        raise ImportError(
            f"{theirs} was imported as {name!r} before zoo, which brings a package of that name, {folder}. A program "
            "can use only one of the two: rename the other, or uninstall it if it is a distribution's."
        )
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if origin and not (script and pathlib.Path(script).resolve() == pathlib.Path(origin).resolve()):
        warnings.warn(
            f"`import {name}` now gives zoo's package {folder}, though {origin} comes first on the path. If this "
            "program imports that file, rename it, or uninstall it if it is a distribution's; if not, all is well.",
            stacklevel=3,
        )
    own = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert own and own.loader
    sys.modules[name] = importlib.util.module_from_spec(own)
    own.loader.exec_module(sys.modules[name])


for _name in ("kernels", "convert"):  # never train, which zoo does not import
    _import_own(_name)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

import convert.formats
import convert.hub
import convert.tensors
import zoo.checkpoint
import zoo.config as _config
import zoo.gather
from zoo import (
    deepseek2,
    deepseek3,
    gemma,
    gemma2,
    gemma3,
    gpt3,
    gpt_oss,
    llama,
    llama4,
    lora,
    mistral,
    mixtral,
    peft,
    qwen2,
    qwen3,
    qwen3_moe,
    registry,
)
from zoo.engine import Completion, Engine, complete
from zoo.generate import generate, stream
from zoo.mesh import make_mesh
from zoo.quantized import STORED
from zoo.sampling import Sampler
from zoo.speculative import ModelDraft, MTPDraft
from zoo.tokenizer import Tokenizer


__all__ = [
    "Completion",
    "Engine",
    "MTPDraft",
    "ModelDraft",
    "Sampler",
    "complete",
    "config",
    "deepseek2",
    "deepseek3",
    "fingerprint",
    "gemma",
    "gemma2",
    "gemma3",
    "generate",
    "gpt3",
    "gpt_oss",
    "inspect",
    "llama",
    "llama4",
    "load",
    "lora",
    "make_mesh",
    "mistral",
    "mixtral",
    "names",
    "peft",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "save",
    "stream",
    "tokenizer",
]


def names() -> list[str]:
    """Every name that `load`, `config` and `tokenizer` know beside Hub repositories and folders.

    The last ones, gpt3-*, have no published weights to load.
    """
    return [*registry.EMBEDDED, *registry.REPOSITORIES, *registry.TOKENIZERS]


def load(
    source: str | os.PathLike,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | str | None = None,
    revision: str | None = None,
    quantize: Literal["int8", "fp8", "nf4"] | None = None,
    mtp: bool = False,
    verify: bool = True,
    check_values: bool = True,
    mmap: bool = True,
) -> Any:
    """A model with the weights of a checkpoint: the family's `Model`, called as `model(tokens)`.

    Args:
        source: a zoo name, a Hub repository "org/name" (downloaded by huggingface_hub, which keeps a cache and reads
            HF_TOKEN and HF_HUB_OFFLINE), or a folder with config.json and safetensors.
        dtype: of the floating point weights, such as "bfloat16"; None keeps the checkpoint's.
        mesh: places each weight on its devices by the family's PARTITION_RULES, reading only what they need; a mesh, or
            its description for `zoo.make_mesh`, such as "fsdp=-1".
        revision: branch, tag or commit of the repository.
        quantize: stores the weights of the layers' linear maps in "int8" or "fp8", with a scale for each output, or in
            "nf4", four bits with a scale for each 64 (`zoo.quantized`), tensor by tensor as they are read; the rest
            keeps its dtype.
        mtp: also load the module that predicts one more token (DeepSeek V3 and R1 have it).
        verify: checks the files of a folder that `save` wrote by the hashes that it left beside them, before they are
            read, at 1 to 2 GB/s a core; of several processes each checks its share. False leaves that out.
        check_values: refuses, as it is read, a tensor with NaN or infinities in it, and a matrix of nothing but zeros
            (biases and norms may be zeros). False takes them.
        mmap: on a CPU, an array that needs neither cast nor stacking (the embedding, say) is the file itself, mapped
            into memory, and read where it is touched. It outlives the file's removal and replacement, which is how
            `save` writes; but whoever writes into the file changes it, and whoever cuts it short ends the process by
            SIGBUS. False copies, and needs nothing of the file any more.

    Raises:
        OSError: if the checkpoint can't be had, with what to do about it.
        ValueError: if it is damaged, or says or holds anything that the family does not implement, naming it; or if
            weights of that name were never published.
    """
    if dtype is not None:
        dtype = _float_dtype(dtype)
    if quantize is not None and quantize not in STORED:
        raise ValueError(f"quantize={quantize!r} is none of {', '.join(STORED)}.")
    if isinstance(mesh, str):
        mesh = make_mesh(mesh)
    folder = _folder(source, revision, weights=True)
    family, parsed = _read_config(folder)
    tensors = convert.formats.opened(folder)
    zoo.checkpoint.check_sizes(parsed, tensors)
    if verify:
        convert.tensors.verify_files(folder, slice(jax.process_index(), None, jax.process_count()))
    skeleton = zoo.checkpoint.skeleton(family, parsed, mtp=mtp)
    return zoo.checkpoint.fill(
        skeleton, tensors, family, dtype=dtype, mesh=mesh, format=quantize, check_values=check_values, mmap=mmap
    )


def save(model: Any, folder: str | os.PathLike, *, fp8: bool = False) -> None:
    """Writes the Hub layout: config.json, safetensors (in shards from 5 GB on), and the source's tokenizer files.

    model.safetensors.manifest.json beside them has the hash of each file of weights, by which `load` tells a file that
    is damaged, or left there by another export. Other libraries do not look at it.

    transformers and `load` read the result back bit-equal. Weights are plain floats in it, also if they were read from
    a checkpoint that stores them in fewer bits. What the folder held before stays whole until the new weights are, and
    is then replaced, never written over: a model that was loaded from it goes on as it was. Of a multimodal checkpoint
    it is the text model that was loaded. `fp8` stores matrices in 8 bits, with a float32 scale for each block of 128 x
    128, as DeepSeek V3 is published. Of a model that several processes hold, all call this, and process 0 writes.
    """
    family = registry.family_of(model)
    tensors = zoo.checkpoint.export(model, family, fp8=fp8)
    hub = _config.write(model.config, family, jax.tree.leaves(model)[0].dtype)
    if fp8:
        hub["quantization_config"] = zoo.checkpoint.FP8
    write = functools.partial(_write, pathlib.Path(folder), hub, model.config.source)
    zoo.gather.write_once(model, tensors, write)


def _write(
    folder: pathlib.Path, hub: dict[str, Any], source: pathlib.Path | None, tensors: dict[str, convert.tensors.Lazy]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    convert.tensors.save_tensors(folder, tensors)
    (folder / "config.json.tmp").write_text(json.dumps(hub, indent=2) + "\n")
    os.replace(folder / "config.json.tmp", folder / "config.json")
    if source and source.is_dir() and source.resolve() != folder.resolve():
        for pattern in convert.hub.COMPANIONS:
            for path in source.glob(pattern):
                shutil.copy(path, folder / f"{path.name}.tmp")
                os.replace(folder / f"{path.name}.tmp", folder / path.name)


def config(source: str | os.PathLike, *, revision: str | None = None) -> Any:
    """The `Config` of a model. For a zoo name it is at hand; otherwise config.json is read, or downloaded and read."""
    if source in registry.CONFIGS:
        return registry.CONFIGS[str(source)]
    return _read_config(_folder(source, revision, weights=False))[1]


def inspect(source: str, *, revision: str | None = None) -> Any:
    """The `Config` of a checkpoint, whose tensors are known to be those that its config.json calls for.

    Of a Hub repository, config.json and the headers of the safetensors are fetched, and nothing else. A folder without
    weights passes, and so do zoo names, which were checked before.

    Raises:
        OSError, ValueError: as `load`.
    """
    if source in registry.CONFIGS:
        return registry.CONFIGS[source]
    folder = _folder(source, revision, weights=False, companions=False)
    family, parsed = _read_config(folder)
    if source not in registry.EMBEDDED and not pathlib.Path(source).expanduser().is_dir():
        tensors = convert.tensors.remote_tensors(source, commit=folder.name)
    elif any((folder / name).exists() for name in (convert.hub.WEIGHTS, convert.hub.INDEX)):
        tensors = convert.tensors.open_tensors(folder)
    else:
        return parsed
    tensors = convert.formats.unpack(tensors, convert.formats.quantization(folder))
    zoo.checkpoint.check_headers(tensors, family, parsed)
    return parsed


def fingerprint(source: str | os.PathLike, *, revision: str | None = None) -> str:
    """The SHA-256 of a checkpoint's weights as they are stored: of the names and the bytes of its safetensors.

    Raises:
        OSError, ValueError: as `load`, if they can't be had.
    """
    return convert.hub.weights_hash(_folder(source, revision, weights=True))


def tokenizer(source: str | os.PathLike, *, revision: str | None = None, **options: Any) -> Tokenizer:
    """The tokenizer that a checkpoint carries, with its chat template and end tokens; for gpt3-*, one that fits.

    The `options` are those of `Tokenizer`.
    """
    return Tokenizer(_folder(source, revision, weights=False), **options)


def _folder(source: str | os.PathLike, revision: str | None, *, weights: bool, companions: bool = True) -> pathlib.Path:
    if source in registry.EMBEDDED:
        return registry.EMBEDDED[str(source)]
    name = str(source)
    if weights and name in registry.TOKENIZERS:
        family = registry.family_of(registry.CONFIGS[name]).__name__
        raise ValueError(
            f"The weights of {name} were never published: {family}.Model(zoo.config({name!r}), key=jax.random.key(0)) "
            f"has random ones, and `python -m train.pretrain --model {name}` trains them."
        )
    repositories = registry.REPOSITORIES | registry.TOKENIZERS
    if name not in repositories and "/" not in name and not pathlib.Path(name).is_dir():
        close = difflib.get_close_matches(name.lower().replace("_", "-"), names())
        meant = f"did you mean {', '.join(close)}? " if close else ""
        raise ValueError(f"{name!r} is no zoo name, Hub repository or folder; {meant}zoo.names() lists the names.")
    return convert.hub.folder(repositories.get(name, source), revision, weights=weights, companions=companions)


def _read_config(folder: pathlib.Path) -> tuple[Any, Any]:
    hub = convert.hub.read_json(folder / "config.json")
    kind = hub.get("model_type")
    if kind not in registry.FAMILIES:
        raise ValueError(
            f"{folder / 'config.json'} has the model_type {kind!r}; implemented are {', '.join(registry.FAMILIES)}."
        )
    family = registry.FAMILIES[kind]
    return family, _config.read(family, hub, folder)


def _float_dtype(dtype: Any) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or not jnp.issubdtype(parsed, jnp.floating) or parsed.itemsize not in (2, 4):
        raise ValueError(f"dtype={dtype!r} is none of float32, bfloat16 and float16.")
    return parsed
