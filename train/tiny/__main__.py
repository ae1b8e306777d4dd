"""A script that makes the checkpoint `tiny` from a Python installation alone: `python -m train.tiny OUT`.

Every Python contains its documentation: the docstrings of the standard library and of built-in modules, and the topics
of `help()`, which are the language reference. Together these are about 2.6 MB of English under one licence. The script
collects this text, trains a byte-level BPE tokenizer on it, writes the configuration of a Qwen3 model with 1.8 million
parameters, and pre-trains that model. The same interpreter always gives the same text and the same tokenizer.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import random
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import machinery
from pathlib import Path

import jax.numpy as jnp
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zoo.config import write as write_config
from zoo.models import qwen3


# Tests, programs that come with Python, and the file of topics, which `_topics` reads.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}

# Private modules that users know under another name; the others are named without their underscore.
KNOWN_AS = {"posix": "os", "_pydecimal": "decimal", "_pyio": "io", "_pydatetime": "datetime"}

# Lines of licences: a document with such a line is about the owner of the code, not about the code.
NOTICE = re.compile(r"copyright \(c\)|\(c\) copyright", re.IGNORECASE)

# Typographic characters, which would be rare tokens -> plain ones.
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "–": "-", "—": "-", "\xa0": " "})  # noqa: RUF001

END, _, TURN_END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# ChatML. A generation block has the text that the assistant learns to write: its words, and the end of its turn.
CHAT_TEMPLATE = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# 3.6 MB in bfloat16. Wide rather than deep, because large matrices are faster on two cores.
CONFIG = qwen3.Config(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=448,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    max_window_layers=4,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)


def documents(library: Path) -> Iterator[str]:
    """Yields the documentation of the running Python, without duplicates.

    A document is a title, such as `textwrap.dedent(text)`, an empty line, and a docstring. `library` is the folder of
    the standard library.
    """
    seen = set()
    for source in (_written_in_python(library), _written_in_c(), _topics(library)):
        for title, text in source:
            if text and len(text.split()) > 2 and text not in seen and not NOTICE.search(text):
                seen.add(text)
                yield f"{title}\n\n{text}".translate(PLAIN)


Documentation = Iterator[tuple[str, str | None]]  # title, docstring


def _written_in_python(library: Path) -> Documentation:
    """Yields the docstrings of the standard library, read from its source, since importing modules has side effects."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        # Only modules of the standard library, since site-packages may have other packages.
        if parts[0] in sys.stdlib_module_names and not LEFT_OUT.intersection(parts):
            name = ".".join(part for part in parts if part != "__init__")
            yield from _definitions(ast.parse(path.read_bytes()), KNOWN_AS.get(name, name))


def _definitions(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Documentation:
    match node:
        case ast.Module():
            title = f"module {name}"
        case ast.ClassDef():
            title = f"class {name}"
        case _:
            title = f"{name}({ast.unparse(node.args)})"
    yield title, ast.get_docstring(node)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definitions(child, f"{name}.{child.name}")


def _written_in_c() -> Documentation:
    for name in sorted(sys.stdlib_module_names - LEFT_OUT):
        spec = importlib.util.find_spec(name)
        loader = spec and spec.loader  # None for modules of other operating systems
        if loader is machinery.BuiltinImporter or isinstance(loader, machinery.ExtensionFileLoader):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(name)
            yield from _members(module, KNOWN_AS.get(name, name.lstrip("_")))


def _members(thing: object, name: str) -> Documentation:
    name = name.removeprefix("builtins.")
    if inspect.ismodule(thing) or inspect.isclass(thing):
        yield f"{'class' if inspect.isclass(thing) else 'module'} {name}", inspect.getdoc(thing)
        for key, member in sorted(vars(thing).items()):
            documented = inspect.isroutine(member) or inspect.isdatadescriptor(member)
            if documented or (inspect.ismodule(thing) and inspect.isclass(member)):
                yield from _members(member, f"{name}.{key}")
    else:
        try:
            signature = str(inspect.signature(thing))  # pyright: ignore[reportArgumentType]
        except (AttributeError, TypeError, ValueError):  # many functions have no signature, and some a broken one
            signature = ""
        yield f"{name}{signature}", inspect.getdoc(thing)


def _topics(library: Path) -> Documentation:
    """Yields the topics of `help()`, the longest first, as long topics include short ones. No paragraph comes twice."""
    [assignment] = [
        node
        for node in ast.parse((library / "pydoc_data" / "topics.py").read_bytes()).body
        if isinstance(node, ast.Assign)
    ]
    topics = ast.literal_eval(assignment.value)
    seen = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        new = [text for text in topics[name].strip().split("\n\n") if text not in seen]
        seen.update(new)
        yield name, "\n\n".join(new)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains byte-level BPE with GPT-2's split into words: every text can be encoded, and every id stands for bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=CONFIG.vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def write_model_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a folder in Hub layout that lacks only its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    files = {
        "config.json": write_config(CONFIG, qwen3.FAMILY, jnp.dtype(jnp.bfloat16)),
        # The first token ends a text, the second a turn of a chat.
        "generation_config.json": {"eos_token_id": [tokenizer.token_to_id(token) for token in (END, TURN_END)]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END,
            "model_max_length": CONFIG.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes the checkpoint `tiny` from the documentation of the running Python, in half an hour on two CPU cores.

    Args:
        out: folder for all files; its subfolder run/model is the checkpoint.
    """
    corpus = list(documents(Path(sysconfig.get_path("stdlib"))))
    # Shuffled, because the last documents are held out for validation and should be of all kinds.
    random.Random(0).shuffle(corpus)
    write_model_folder(out / "untrained", train_tokenizer(corpus))
    with open(out / "corpus.jsonl", "w") as file:
        for document in corpus:
            file.write(json.dumps({"text": document}) + "\n")

    # Six epochs: five million tokens.
    options = {
        "data": out / "corpus.jsonl",
        "out": out / "run",
        "hold-out": 0.02,
        "steps": 2500,
        "batch": 4,
        "lr": 4e-3,
    }
    options |= {"model": out / "untrained", "remat": "none"}
    command = [sys.executable, "-m", "train.pretrain", *(f"--{name}={value}" for name, value in options.items())]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.tiny")
