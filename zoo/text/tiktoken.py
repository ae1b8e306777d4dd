"""Build Kimi's tokenizer from tiktoken.model, a list of byte strings by rank, without running its repository's code.

The result is a tokenizer of the library `tokenizers`. Source: tokenization_kimi.py of Kimi-K2-Instruct. One difference:
that file first splits runs of more than 25,000 characters that are all white space, or have none.
"""

import base64
import pathlib
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


NAME = "tiktoken.model"
RESERVED = 256  # number of ids after the list's, for special tokens
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# Pieces into which text is split before bytes are merged: Chinese, words, numbers, punctuation, white space.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read(file: pathlib.Path, special: Mapping[int, str]) -> tokenizers.Tokenizer:
    """Read a tiktoken.model; `special` has the names of those reserved ids that have one.

    Raises:
        ValueError: the file is not a list of base64 and rank, with the ranks 0, 1, 2, ...
    """
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        ranked = [base64.b64decode(text, validate=True) for text, _ in pairs]
        in_order = [int(rank) for _, rank in pairs] == list(range(len(pairs)))
    except ValueError as error:
        raise ValueError(f"{file} is not a list of byte strings by rank: {error}; fetch it again.") from error
    if not in_order:
        raise ValueError(f"{file} does not list the ranks 0, 1, 2, ... in order; fetch it again.")

    ids = range(len(ranked), len(ranked) + RESERVED)
    return build(ranked, PATTERN, {id: special.get(id, f"<|reserved_token_{id}|>") for id in ids})


def build(ranked: Sequence[bytes], pattern: str, special: Mapping[int, str], first: int = 0) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges bytes.

    Args:
        ranked: the tokens' bytes, by rank. A token's id is its rank plus `first`.
        pattern: a regular expression of the pieces into which text is split before bytes are merged.
        special: the special tokens by id, in order: ids below `first`, or those after all ranks.
    """
    letters = _letters()
    vocabulary = {"".join(letters[byte] for byte in token): first + rank for rank, token in enumerate(ranked)}
    # Two tokens may be merged if their concatenation is a token. Merges of lower rank come first.
    merges = [
        (token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    vocabulary |= {token: id for id, token in special.items() if id < first}  # later ids follow by themselves
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special.values()])
    return tokenizer


def _letters() -> list[str]:
    """Return each byte's character in `tokenizers`: itself if it is printable, else one from code point 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]
