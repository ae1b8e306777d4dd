"""Checkpoints that are opened once: by zoo name, Hub repository, folder or GGUF file, and then asked for config and
tensors.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import convert.cache
import convert.files
import convert.formats
import convert.gguf.architectures
import convert.gguf.container
import convert.gguf.folder
import convert.hub
import convert.tensors
from convert.packed import Packed
from convert.tensors import Tensor
from zoo import registry
from zoo.config import read as read_config
from zoo.nn.model import AbstractConfig, Family


def names() -> list[str]:
    """List the zoo names that `zoo.load`, `zoo.config` and `zoo.tokenizer` take, beside Hub repositories and folders.

    The last ones, gpt3-*, have no published weights to load.
    """
    return [*registry.EMBEDDED, *registry.REPOSITORIES, *registry.TOKENIZERS]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was opened, which `zoo.load`, `zoo.tokenizer` and the like take in place of a name.

    A program that needs several parts of one model opens it once. Then all parts are of one commit, and config.json is
    read once:

        source = Source.open("org/name")  # downloads config.json and the tokenizer's files
        tokenizer, config = zoo.tokenizer(source), source.config
        model = zoo.load(source)          # downloads the weights

    What is costly is read when it is needed: a repository that has only a tokenizer needs no config.json.
    """

    name: str
    """The zoo name, repository or folder that it was opened by, for messages."""
    folder: pathlib.Path
    """Where its files are: a folder of the user's, or one of huggingface_hub's cache, which is named by the commit."""
    remote: str | None = None
    """The Hub repository "org/name", if its weights were not downloaded with the other files."""
    ignore: tuple[str, ...] = ()
    """Keys of config.json to skip where they would be refused (`zoo.config.read`)."""
    gguf: pathlib.Path | None = None
    """The GGUF file with its weights, if it is one; `folder` then has the files that follow from its metadata."""

    @classmethod
    def open(
        cls,
        name: str | os.PathLike[str],
        revision: str | None = None,
        *,
        weights: bool = False,
        companions: bool = True,
        ignore: Sequence[str] = (),
    ) -> "Source":
        """Find a checkpoint, and download what is wanted of a repository: at least config.json.

        Args:
            name: a zoo name, a Hub repository "org/name", a folder with config.json and safetensors, or a GGUF file. A
                folder or repository with one GGUF file and no safetensors stands for that file; of a repository with
                several, "org/name/FILE.gguf" is one.
            revision: branch, tag or commit of the repository.
            weights: whether to download the weights, too; if not, they are when they are first needed.
            companions: whether to download the files of the tokenizer, of generation and of images.
            ignore: keys of config.json to skip where they would be refused, as unknown or for a value that is not
                implemented. Keys that the file lacks may be among them, and keys that the family reads may not.

        Raises:
            OSError: if the checkpoint cannot be found or downloaded; the message says what to do.
            ValueError: if there is no such name, if its weights were never published, or for a revision of what is no
                repository: of a folder, or of the model that comes with this package.
        """
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        if name in registry.EMBEDDED:
            if revision is not None:
                raise ValueError(f"{name} comes with this package, and has no revision {revision!r}; leave it out.")
            return cls(str(name), registry.EMBEDDED[str(name)], ignore=ignore)
        if (file := _gguf_file(name)) is not None:
            if revision is not None:
                raise ValueError(f"{file} is a local file, which has no revision {revision!r}; leave it out.")
            return cls._of_gguf(name, file, ignore)
        if weights:
            _check_published(str(name))
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+/.+\.gguf", str(name)):
            return cls._of_gguf(name, convert.hub.gguf_file(str(name), revision), ignore)
        repositories = registry.REPOSITORIES | registry.TOKENIZERS
        if str(name) not in repositories and "/" not in str(name) and not pathlib.Path(name).is_dir():
            raise _unknown(str(name))
        repository = repositories.get(str(name), name)
        try:
            folder = convert.hub.folder(repository, revision, weights=weights, companions=companions)
        except OSError:
            if revision is not None or (file := _packaged(str(name))) is None:
                raise
            logging.getLogger("zoo").warning("The Hub's %s cannot be had; reading %s in its place.", name, file)
            return cls._of_gguf(name, file, ignore)
        if (file := convert.gguf.folder.only(folder)) is not None:
            return cls._of_gguf(name, file, ignore)
        complete = weights or folder == pathlib.Path(os.path.expanduser(repository))
        return cls(str(name), folder, None if complete else str(repository), ignore)

    @classmethod
    def _of_gguf(cls, name: str | os.PathLike[str], file: pathlib.Path, ignore: tuple[str, ...]) -> "Source":
        return cls(str(name), convert.gguf.folder.folder_of(file), ignore=ignore, gguf=file)

    @functools.cached_property
    def config_json(self) -> Mapping[str, Any]:
        """The object in config.json.

        Raises:
            OSError, ValueError: if there is none, or it is malformed.
        """
        return convert.files.read_json(self.folder / "config.json")

    @functools.cached_property
    def family(self) -> Family:
        """The family that config.json's model_type names.

        Raises:
            ValueError: if no family has that name; the message lists those that are implemented.
        """
        if (family := registry.family_for(self.config_json)) is None:
            raise ValueError(
                f"{self.folder / 'config.json'} has the model_type {self.config_json.get('model_type')!r}; implemented "
                f"are {', '.join(registry.FAMILIES)}."
            )
        return family

    @functools.cached_property
    def config(self) -> AbstractConfig:
        """The model's config, as `zoo.config.read` makes it of config.json.

        Raises:
            ValueError: if the family does not implement it; the message names the keys.
        """
        return read_config(self.family, self.config_json, self.folder, ignore=self.ignore)

    @functools.cached_property
    def weights(self) -> pathlib.Path:
        """The folder of the safetensors, which is `folder`. At first use they are downloaded, of the same commit.

        Raises:
            OSError, ValueError: as in `open`.
        """
        if self.remote is None:
            return self.folder
        _check_published(self.name)
        return convert.hub.folder(self.remote, self.folder.name, weights=True, companions=True)

    def tensors(self) -> dict[str, Tensor | Packed]:
        """Open every tensor, stored as config.json says; values are read later.

        Each call opens the files again: they stay open as long as one of its tensors is in use.

        Raises:
            OSError, ValueError: if there are no safetensors or GGUF file, or they are damaged; the message names the
                file.
        """
        if self.gguf is not None:
            return convert.gguf.architectures.tensors(convert.gguf.container.open_file(self.gguf))
        return convert.formats.unpack(convert.tensors.open_tensors(self.weights), self._quantization)

    def headers(self) -> dict[str, Tensor | Packed]:
        """Open every tensor as `tensors` does, but download no weights: values then cannot be read."""
        if self.remote is None:
            return self.tensors()
        remote = convert.tensors.remote_tensors(self.remote, commit=self.folder.name)
        return convert.formats.unpack(remote, self._quantization)

    def fingerprint(self) -> str:
        """Hash the weights as they are stored: the SHA-256 of the names and bytes of safetensors, or of a GGUF file.

        Raises:
            OSError, ValueError: the weights cannot be found, as in `open`.
        """
        if self.gguf is None:
            return convert.hub.weights_hash(self.weights)
        parts = convert.gguf.container.parts_of(self.gguf)
        digests = [convert.cache.sha256(part) for part in parts]
        return digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    @property
    def _quantization(self) -> Mapping[str, Any] | None:
        """The object of config.json that says how tensors are stored; some files nest it in `text_config`."""
        text = self.config_json.get("text_config")
        nested = text.get("quantization_config") if isinstance(text, Mapping) else None
        return self.config_json.get("quantization_config") or nested


def _gguf_file(name: str | os.PathLike[str]) -> pathlib.Path | None:
    """Return the path of the GGUF file that a name is, or of the only one in the folder that it is; else None."""
    path = pathlib.Path(os.path.expanduser(name))
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    return convert.gguf.folder.only(path) if path.is_dir() else None


def _packaged(name: str) -> pathlib.Path | None:
    """Return the path of the GGUF file of a model in an installed package; None: there is none."""
    try:
        files = importlib.metadata.files(registry.PACKAGED[name]) or []
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return None
    found = [pathlib.Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((file for file in found if file.exists()), None)


def _check_published(name: str) -> None:
    if name in registry.TOKENIZERS:
        family = registry.family_of(registry.CONFIGS[name]).name
        raise ValueError(
            f"The weights of {name} were never published: {family}.Model(zoo.config({name!r}), key=jax.random.key(0)) "
            f"has random ones, and `python -m train.pretrain --model {name}` trains them."
        )


def _unknown(name: str) -> ValueError:
    close = difflib.get_close_matches(name.lower().replace("_", "-"), names())
    meant = f"did you mean {', '.join(close)}? " if close else ""
    return ValueError(
        f"{name!r} is no zoo name, Hub repository, folder or GGUF file; {meant}zoo.names() lists the names."
    )
