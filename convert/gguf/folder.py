"""Makes a folder in the Hub's layout of a GGUF file, without its weights, which stay in the file."""

import functools
import hashlib
import json
import pathlib

from convert import cache
from convert.files import INDEX, WEIGHTS, one_gguf
from convert.gguf import architectures, tokens
from convert.gguf.container import Opened, open_file


def only(folder: pathlib.Path) -> pathlib.Path | None:
    """Finds the GGUF file of a folder without safetensors; None: it has none. Of parts it is the first.

    Files named mmproj-*.gguf, which hold towers for images, are left out.

    Raises:
        ValueError: there are several; the message names them.
    """
    if any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        return None
    name = one_gguf(sorted(path.name for path in folder.glob("*.gguf")), str(folder))
    return folder / name if name else None


def folder_of(file: pathlib.Path) -> pathlib.Path:
    """Returns the path of a folder with config.json, tokenizer and generation_config.json of a GGUF file.

    It lies in the user's cache, and is made once for each state of the file.

    Raises:
        OSError, ValueError: the file is damaged, or a part of it is not implemented; the message names the part.
    """
    key = f"gguf {_own_hash()} {cache.key_of(file)}"
    return cache.keep(key, file.stem, lambda folder: _write(open_file(file), folder))


def _write(opened: Opened, folder: pathlib.Path) -> None:
    folder.mkdir(exist_ok=True)  # it may be there if a process was killed
    files = {
        "config.json": architectures.config_json(architectures.described(opened)),
        "tokenizer.json": tokens.tokenizer_json(opened),
        "tokenizer_config.json": tokens.tokenizer_config(opened),
    }
    if ends := tokens.ends(opened):
        files["generation_config.json"] = {"eos_token_id": ends}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


@functools.cache
def _own_hash() -> str:
    """Hashes this code, so that folders which other versions of it made are not used."""
    sources = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
