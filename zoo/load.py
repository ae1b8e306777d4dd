"""Load and save checkpoints: models, configs and tokenizers, by zoo name, Hub repository or folder."""

import functools
import json
import logging
import math
import os
import pathlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

import convert.files
import convert.hub
import convert.machine
import convert.tensors
from convert.packed import Packed
from kernels.backends.device import device
from zoo import registry
from zoo.config import write as write_config
from zoo.mesh import make_mesh
from zoo.nn.heads import Kind
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.source import Source
from zoo.surgery import cast, shardings, with_head
from zoo.text.prompts import processor_of
from zoo.text.tokenizer import Tokenizer, chat_template_of
from zoo.weights import checkpoint, gather, heads


QUANTIZE = "int8", "fp8", "nf4", "stored"
Named = str | os.PathLike[str] | Source  # a zoo name, a Hub repository "org/name", or a folder; or a checkpoint opened


def load(
    source: Named,
    *,
    dtype: DTypeLike | Literal["auto"] | None = None,
    mesh: Mesh | str | None = None,
    revision: str | None = None,
    quantize: Literal["int8", "fp8", "nf4", "stored"] | None = None,
    parts: Sequence[str] = (),
    head: Kind | None = None,
    verify: bool = True,
    check_values: bool = True,
    mmap: bool = True,
    ignore: Sequence[str] = (),
) -> AbstractModel:
    """Load a checkpoint as the family's `Model`, called as `model(tokens)`, which gives logits, or what the head gives.

    Args:
        source: a zoo name, a Hub repository "org/name" (downloaded by huggingface_hub, which keeps a cache and reads
            HF_TOKEN and HF_HUB_OFFLINE), a folder with config.json and safetensors, or a GGUF file (docs/gguf.md); or
            one of these that was opened before, as a `Source`.
        dtype: dtype of the floating point weights, such as "bfloat16"; None keeps the checkpoint's, and takes bfloat16
            for weights that it stores in fewer bits. "auto" does so, too, but for 16 bits on a CPU: these become
            float32 if that takes at most half of the free memory, since a CPU multiplies 16 bits in several times the
            time. A line of the logger "zoo" says so.
        mesh: a mesh, or its description for `zoo.make_mesh`, such as "fsdp=-1". Each weight is placed on its devices by
            the family's `partition_rules`, and each process reads only what its devices need.
        revision: branch, tag or commit of the repository.
        quantize: store the weights of the layers' linear maps in "int8" or "fp8", with a scale per output, or in "nf4",
            four bits with a scale per 64 weights (`zoo.quantized`). Tensors are quantized one by one as they are read;
            all others keep their dtype. "stored": weights of linear maps that the checkpoint stores in float8 with
            scales of blocks, in MXFP4, NVFP4 or int4 stay as they are, and nothing else is quantized.
        parts: names of optional parts to load too, of the family's `FAMILY.parts`: "vision", a tower for images; "mtp",
            a module that predicts the token after the next.
        head: what stands in the place of output embeddings (docs/heads.md): "embedding", by sentence-transformers'
            modules.json, or without that file the last token's normalised features; "classification", transformers'
            ForSequenceClassification; "reward", the same with one label. None: output embeddings.
        verify: before reading a folder that `save` wrote, check its files against the hashes beside them, at 1 to 2
            GB/s per core. Several processes share this work. False skips it.
        check_values: while reading, refuse tensors with NaN or infinities, and matrices of zeros alone (biases and
            norms may be zeros). False accepts them.
        mmap: on a CPU, an array that needs neither cast nor stacking (the embedding, say) is the memory-mapped file,
            read where it is touched. It stays valid if the file is removed or replaced, as `save` does. Writing into
            the file changes the array, and truncating the file ends the process by SIGBUS. False copies, so that the
            file is no longer needed.
        ignore: keys of config.json to skip where they would be refused, as unknown or for a value that is not
            implemented: for a file that you cannot edit, and keys that you know not to change the model. Those of an
            object are named as "vision_config.key". Keys that the file lacks may be among them; one that the family
            reads is refused.

    Raises:
        OSError: if the checkpoint cannot be found or downloaded; the message says what to do.
        ValueError: if it is damaged, if weights of that name were never published, or if the config or a tensor is not
            one that the family implements; the message names it.
    """
    held = None if dtype is None or dtype == "auto" else _float_dtype(dtype)
    if quantize not in (None, *QUANTIZE):
        raise ValueError(f"quantize={quantize!r} is none of {', '.join(QUANTIZE)}.")
    if head not in (None, *get_args(Kind)):
        raise ValueError(f"head={head!r} is none of {', '.join(get_args(Kind))}.")
    if isinstance(mesh, str):
        mesh = make_mesh(mesh)
    source = _opened(source, revision, ignore, weights=True)
    family, config = source.family, source.config
    tensors = source.tensors()
    checkpoint.check_sizes(config, tensors)
    if dtype == "auto":
        held = _fast_dtype(source.name, tensors)
    if verify:
        convert.tensors.verify_files(source.weights, slice(jax.process_index(), None, jax.process_count()))
    model = checkpoint.skeleton(family, config, parts)
    if head is not None:
        made, tensors = heads.read(head, source.weights, source.config_json, config, tensors)
        model = with_head(model, made)
    elif heads.is_classifier(source.config_json):
        raise ValueError(f"{source.name} has a head for labels: load it with head='classification' or head='reward'.")
    return checkpoint.fill(
        model, tensors, family,
        dtype=held, mesh=mesh, format=quantize, check_values=check_values, mmap=mmap,
    )  # fmt: skip


def init(
    source: Named | AbstractConfig,
    *,
    key: PRNGKeyArray,
    dtype: DTypeLike = "float32",
    mesh: Mesh | str | None = None,
    parts: Sequence[str] = (),
) -> AbstractModel:
    """Make a model of random weights, as `python -m train.pretrain` begins with.

    Args:
        source: a config, such as `dataclasses.replace(zoo.config("llama3.2-1b"), num_hidden_layers=4)`; or what
            `config` takes, of which only config.json is read.
        key: random key.
        dtype: dtype of the floating point weights. They are drawn in float32.
        mesh: a mesh, or its description for `zoo.make_mesh`. Each device makes its own part of each weight.
        parts: names of optional parts to make too, as in `load`.

    Raises:
        OSError, ValueError: as in `load`; a ValueError also if the class of the config is no registered family's.
    """
    found = source if isinstance(source, AbstractConfig) else config(source)
    family, dtype = registry.family_of(found), _float_dtype(dtype)
    make = lambda key: cast(family.init_model(found, key=key, parts=parts), dtype)
    if mesh is None:
        return jax.jit(make)(key)
    mesh = make_mesh(mesh) if isinstance(mesh, str) else mesh
    skeleton = eqx.filter_eval_shape(make, key)
    return jax.jit(make, out_shardings=shardings(skeleton, family.partition_rules, mesh))(key)


def save(model: AbstractModel, folder: str | os.PathLike[str], *, fp8: bool = False, mxfp4: bool = False) -> None:
    """Write the Hub layout: config.json, safetensors (in shards from 5 GB on), and the source's tokenizer files.

    transformers and `load` read the result back bit-equal. Weights are stored as plain floats, even if they were loaded
    from a checkpoint with fewer bits; those that stayed as they were, by quantize="stored", are stored so. Only the
    parts that were loaded are saved: from a multimodal checkpoint, by default, the text model.

    model.safetensors.manifest.json holds the hash of each file of weights, so that `load` detects a file that is
    damaged or left there by another export. Other libraries ignore it.

    Older files in the folder stay whole until the new ones are complete. They are then replaced, not written into, so a
    model loaded from them stays valid. If several processes hold the model, all must call this; process 0 writes.

    Args:
        model: from `load`, or trained.
        folder: where to write; it is made if it is missing.
        fp8: store matrices in 8 bits, with a float32 scale for each block of 128 x 128.
        mxfp4: store gpt-oss's experts in 4 bits, with a power of two as the scale of each 32 weights, as it is
            released. Weights that were read from MXFP4 and not changed keep their numbers.

    Raises:
        ValueError: the folder cannot hold a part of the model, such as an adapter, or a module of another class than
            the family's, which `load` would replace by the original; the message names the part.
    """
    family = registry.family_of(model)
    tensors = checkpoint.export(model, family, fp8=fp8, mxfp4=mxfp4)
    hub = write_config(model.config, family, jax.tree.leaves(model)[0].dtype)
    if quantization := checkpoint.FP8 if fp8 else checkpoint.kept_config(model, tensors):
        hub["quantization_config"] = quantization
    files = {"config.json": hub}
    if model.head is not None:
        hub |= heads.config_keys(model.head, hub, model.config.source)
        files |= heads.files(model.head, model.config.hidden_size)
    write = functools.partial(_write, convert.machine.path("folder", folder), files, model.config.source)
    gather.write_once(model, tensors, write)


def _write(
    folder: pathlib.Path, files: dict[str, Any], source: pathlib.Path | None, tensors: dict[str, convert.tensors.Lazy]
) -> None:
    """Write tensors, whose names begin with the folder that they belong in if it is another, JSON and companions."""
    folder.mkdir(parents=True, exist_ok=True)
    for within in sorted({name.rpartition("/")[0] for name in tensors}):
        own = {name.rpartition("/")[2]: each for name, each in tensors.items() if name.rpartition("/")[0] == within}
        convert.tensors.save_tensors(folder / within, own)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.tmp").write_text(json.dumps(content, indent=2) + "\n")
        os.replace(folder / f"{name}.tmp", folder / name)
    if source and source.is_dir() and source.resolve() != folder.resolve():
        for pattern in convert.files.COMPANIONS:
            for path in source.glob(pattern):
                shutil.copy(path, folder / f"{path.name}.tmp")
                os.replace(folder / f"{path.name}.tmp", folder / path.name)


def config(source: Named, *, revision: str | None = None, ignore: Sequence[str] = ()) -> AbstractConfig:
    """Return a model's `Config`. For a zoo name nothing is read, else config.json is, after a download if needed.

    `ignore` is that of `load`.
    """
    if source in registry.CONFIGS:
        return registry.CONFIGS[str(source)]
    return _opened(source, revision, ignore).config


def inspect(source: Named, *, revision: str | None = None, ignore: Sequence[str] = ()) -> AbstractConfig:
    """Read a checkpoint's `Config`, and check that the checkpoint has the tensors that the config calls for.

    From a Hub repository only config.json and the headers of the safetensors are downloaded. A folder without weights
    passes, and so do zoo names, which were checked before. `ignore` is that of `load`.

    Raises:
        OSError, ValueError: as in `load`.
    """
    if source in registry.CONFIGS:
        return registry.CONFIGS[str(source)]
    source = _opened(source, revision, ignore, companions=False)
    family, config = source.family, source.config
    names = convert.files.WEIGHTS, convert.files.INDEX
    if source.remote or source.gguf or any((source.folder / name).exists() for name in names):
        checkpoint.check_headers(source.headers(), family, config)
    return config


def fingerprint(source: Named, *, revision: str | None = None) -> str:
    """Hash a checkpoint's weights as they are stored: the SHA-256 of its safetensors' names and bytes, or of its GGUF
    file.

    Raises:
        OSError, ValueError: the weights cannot be found, as in `load`.
    """
    return _opened(source, revision, (), weights=True).fingerprint()


def tokenizer(
    source: Named,
    *,
    revision: str | None = None,
    parts: Sequence[str] = (),
    chat_template: str | os.PathLike[str] | None = None,
    ignore: Sequence[str] = (),
    **options: Any,
) -> Tokenizer:
    """Load a checkpoint's tokenizer, with its chat template and end tokens; for gpt3-*, one that fits the vocabulary.

    With the part "vision" the tokenizer has the checkpoint's `processor` of images.

    Args:
        chat_template: a jinja file, or another model (a zoo name, a Hub repository or a folder) whose template is
            taken, such as the instruction-tuned model for a base model. Warns if this tokenizer has no token for the
            text that the template writes after an answer, because then no reply of a model ends there.
        ignore: keys of config.json, as for `load`; only images need that file.
        options: arguments of `Tokenizer`.

    Raises:
        OSError: the jinja file cannot be read.
        ValueError: the family or the config has no part "vision"; or the other model has no template.
    """
    source = _opened(source, revision, ignore)
    if chat_template is not None:
        options["chat_template"] = _template(chat_template)
    if "vision" in parts:
        options["processor"] = processor_of(checkpoint.skeleton(source.family, source.config, ("vision",)))
    found = Tokenizer(source.folder, **options)
    if chat_template is not None and (end := found.end_without_token()):
        warnings.warn(
            f"The chat template {chat_template} writes {end!r} after an answer, which is no token of {source.name}: "
            "replies may go on after it. Take a template of the same family.",
            stacklevel=2,
        )
    return found


def _template(source: str | os.PathLike[str]) -> str:
    """Returns the text of a jinja file, or of another model's template."""
    if os.fspath(source).endswith(".jinja") or pathlib.Path(source).is_file():
        return pathlib.Path(source).read_text(encoding="utf-8")
    folder = Source.open(source).folder
    if (template := chat_template_of(folder)) is None:
        raise ValueError(f"{folder} has no chat template: name another model, or a .jinja file.")
    return template


def _opened(
    source: Named, revision: str | None, ignore: Sequence[str], *, weights: bool = False, companions: bool = True
) -> Source:
    """Open a checkpoint, unless it was opened before.

    Raises:
        OSError, ValueError: as in `Source.open`; a ValueError also if a revision of an opened one is named, or keys to
            ignore.
    """
    if not isinstance(source, Source):
        return Source.open(source, revision, weights=weights, companions=companions, ignore=ignore)
    if revision is not None:
        raise ValueError(f"{source.name} was opened before: name its revision {revision!r} in Source.open.")
    if ignore:
        raise ValueError(f"{source.name} was opened before: name the keys to ignore, {ignore!r}, in Source.open.")
    return source


def _fast_dtype(name: str, tensors: Mapping[str, convert.tensors.Tensor | Packed]) -> np.dtype | None:
    """Returns the dtype that `load` calls "auto"; None: the checkpoint's."""
    free, size = convert.machine.free_memory(), sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
    narrow = any(tensor.dtype.itemsize == 2 for tensor in tensors.values())
    if device().platform != "cpu" or not narrow or free is None or 2 * size > free:
        return None
    logging.getLogger("zoo").warning(
        "%s: its weights of 16 bits are held in float32, %.1f GB, with which a CPU computes several times as fast.",
        name, size / 1e9,
    )  # fmt: skip
    return np.dtype(np.float32)


def _float_dtype(dtype: Any) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or not jnp.issubdtype(parsed, jnp.floating) or parsed.itemsize not in (2, 4):
        raise ValueError(f"dtype={dtype!r} is none of float32, bfloat16 and float16.")
    return parsed
