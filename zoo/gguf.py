"""Writes a checkpoint as a GGUF file: `python -m zoo to-gguf SOURCE OUT.gguf --type q8_0` (docs/gguf.md)."""

import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import rich.console
import rich.progress
from tyro.conf import Positional

from convert import files, machine
from convert.gguf import architectures, tokens, write
from zoo import registry
from zoo.config import read as read_config
from zoo.config import write as write_config
from zoo.nn.model import AbstractConfig
from zoo.source import Source
from zoo.text.tokenizer import Tokenizer
from zoo.weights import checkpoint, heads


# Fields of configs that no computation uses: they may be lost.
UNUSED = ("max_window_layers", "no_rope_layer_interval")
# model_type -> fields of which the file says only a property that follows from them.
FOLLOW = {
    "lfm2": (
        ("intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"), "width",
    ),
}  # fmt: skip


def to_gguf(
    source: Positional[str], out: Positional[pathlib.Path], type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
) -> None:
    """Write a checkpoint as a GGUF file for llama.cpp, with its tokenizer and chat template.

    Args:
        source: a zoo name, a Hub repository org/name, a folder, or another GGUF file.
        out: the file to write, which ends with .gguf.
        type: how matrices are stored. Vectors are in float32 in any case. In q4_0 the embeddings are q8_0.
    """
    if out.suffix != ".gguf":
        raise ValueError(f"{out} does not end with .gguf, by which programs know such files.")
    machine.path("out", out).parent.mkdir(parents=True, exist_ok=True)
    opened = Source.open(source, weights=True)
    metadata, tensors = content(opened)
    size = sum(math.prod(shape) for _, shape, _ in tensors)
    with _progress(size) as advance:
        write.write_file(out, metadata, tensors, type, advance)
    print(f"{source} is now {out}, {out.stat().st_size / 1e6:,.0f} MB; zoo.load and llama.cpp read it.")


def content(source: Source) -> tuple[dict[str, Any], list[architectures.Made]]:
    """Make the metadata and tensors of the GGUF file of a checkpoint; the values are read later.

    Raises:
        ValueError: llama.cpp has no architecture for the family, or a GGUF file cannot say a value of config.json, a
            tensor or the tokenizer; the message names it.
    """
    family, config = source.family, source.config
    if heads.is_classifier(source.config_json):
        raise ValueError(f"{source.name} has a head for labels, which is not written to GGUF.")
    stored = source.tensors()
    names = {name for parameter in checkpoint.parameters(checkpoint.skeleton(family, config), family) for name in
             parameter.names.flat}  # fmt: skip
    found = checkpoint.standard_names(stored, family)
    checkpoint.check_names(names, found, config, family)
    hub = write_config(config, family, np.dtype(np.float32))
    kind = architectures.for_config(hub)
    made = list(architectures.made(kind, hub, {name: tensor for name, tensor in found.items() if name in names}))
    metadata = {
        "general.architecture": kind.name,
        "general.type": "model",
        "general.name": pathlib.Path(source.name).name,
        **architectures.metadata(kind, hub),
    }
    _check(config, metadata, made, source)
    return metadata | _tokenizer(source, config, kind.name), made


def _check(config: AbstractConfig, metadata: Mapping[str, Any], made: list[architectures.Made], source: Source) -> None:
    """Raise ValueError unless the config that is read from the file is the one that it is written of."""
    shapes = {name: shape for name, shape, _ in made}
    vectors = {name: make(slice(None)) for name, _, make in made if name in architectures.STATED}
    again = architectures.config_json(
        architectures.Content(pathlib.Path(f"a file of {source.name}"), metadata, shapes, vectors)
    )
    if (family := registry.family_for(again)) is None:
        raise ValueError(f"No family has the model_type {again['model_type']!r}.")
    other = read_config(family, again)
    fields, follows = FOLLOW.get(again["model_type"], ((), None))
    if follows and getattr(config, follows) != getattr(other, follows):
        raise ValueError(f"{source.name} has {', '.join(fields)} that the file's metadata does not say.")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("source", *UNUSED, *fields):
            continue
        known = field.name in other.__dataclass_fields__  # a field that is empty may be unknown to the other family
        if value != getattr(other, field.name) if known else value:
            kind = metadata["general.architecture"]
            raise ValueError(
                f"{source.name} has {field.name}={value!r:.200}, which a GGUF file of {kind} cannot say: llama.cpp "
                "would compute another model."
            )


def _tokenizer(source: Source, config: AbstractConfig, architecture: str) -> dict[str, Any]:
    """Make the metadata of a checkpoint's tokenizer and chat template."""
    path = source.folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{source.folder} has no tokenizer.json, which is written into the file.")
    tokenizer, settings = Tokenizer(source.folder), source.folder / "tokenizer_config.json"
    plain, around = tokenizer.encode("a", special=False), tokenizer.encode("a")
    settings = files.read_json(settings) if settings.exists() else {}
    roles: dict[str, int] = dict(zip(tokens.ENDS, tokenizer.eos, strict=False))  # a file has three at most
    if len(tokenizer.eos) > len(tokens.ENDS):
        logging.getLogger("zoo").warning("Of the ids that end a generation, %s, a GGUF file has three.", tokenizer.eos)
    if tokenizer.bos is not None:
        roles["bos"] = tokenizer.bos
    found = json.loads(path.read_text(encoding="utf-8"))
    adds = around[:1] == [tokenizer.bos] != plain[:1], len(around) > len(plain) and around[-1] in tokenizer.eos
    if len(around) != len(plain) + sum(adds):
        raise ValueError(f"The tokenizer of {source.name} puts other tokens around a text than bos and eos.")
    return tokens.metadata(
        found, settings, tokenizer.chat_template, roles=roles, size=config.vocab_size, adds=adds,
        architecture=architecture,
    )  # fmt: skip


@contextlib.contextmanager
def _progress(size: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for `size` values; yields a function to call with the number of those that were written."""
    with rich.progress.Progress(
        "writing", rich.progress.BarColumn(), rich.progress.TaskProgressColumn(), rich.progress.TimeRemainingColumn(),
        transient=True, disable=not sys.stderr.isatty(), console=rich.console.Console(stderr=True),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=size)
        yield lambda count: bar.advance(task, count)
