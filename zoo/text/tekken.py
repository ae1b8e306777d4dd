"""Build the tokenizer of Mistral's models from tekken.json, and their chat template, without running Mistral's code.

Some repositories have this file and neither a tokenizer.json nor a chat template, because Mistral's library
mistral_common (github.com/mistralai/mistral-common) needs no other. tekken.json has the byte strings by rank, the
special tokens, which have the first ids, and a version, by which mistral_common decides how chats are written.
"""

import base64
import pathlib
from typing import Any

import tokenizers
from tokenizers import processors

from convert.files import read_json
from zoo.text import tiktoken


NAME = "tekken.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEMPLATE = pathlib.Path(__file__).with_name("tekken.jinja")
VERSIONS = 7, 11, 13  # those whose chats `TEMPLATE` writes
# The first special tokens in files of version 3 to 7 that do not list theirs.
UNLISTED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def read(file: pathlib.Path) -> tokenizers.Tokenizer:
    """Read a tekken.json. The tokenizer writes <s> before a text.

    Raises:
        ValueError: the file is not one of Mistral's.
    """
    content = read_json(file)
    try:
        config, special = content["config"], _special(content)
        count = config["default_vocab_size"] - len(special)
        listed = content["vocab"][:count]
        ranked = [base64.b64decode(token["token_bytes"], validate=True) for token in listed]
        in_order = [token["rank"] for token in listed] == list(range(count))
        tokenizer = tiktoken.build(ranked, config["pattern"], dict(enumerate(special)), first=len(special))
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not in_order:
        raise ValueError(f"{file} does not list the ranks 0 to {count - 1} in order; fetch it again.")
    bos = TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, special.index(bos))]
    )
    return tokenizer


def template(file: pathlib.Path) -> str | None:
    """Return a jinja template that writes chats as mistral_common does for this tekken.json.

    None if there is none for the file's version: models of version 3 have one in their repository.

    Raises:
        ValueError: the file is not one of Mistral's.
    """
    content = read_json(file)
    try:
        version, special = int(content["config"]["version"].removeprefix("v")), _special(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(file, error) from error
    if version not in VERSIONS:
        return None
    given = f"{{%- set version, thinks = {version}, {str('[THINK]' in special).lower()} -%}}\n"
    return given + TEMPLATE.read_text(encoding="utf-8")


def _special(content: dict[str, Any]) -> list[str]:
    """Return the special tokens in the order of their ids."""
    listed = content.get("special_tokens")
    named = UNLISTED if listed is None else [token["token_str"] for token in sorted(listed, key=lambda t: t["rank"])]
    return [*named, *(f"<SPECIAL_{id}>" for id in range(len(named), content["config"]["default_num_special_tokens"]))]


def _unreadable(file: pathlib.Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is not a tokenizer of Mistral's ({type(error).__name__}: {error}); fetch it again.")
