"""The tokens of two tokenizers for one text: those that both vocabularies have, and where tokens of both begin."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from zoo.text.tokenizer import Tokenizer


LEAST = 0.1  # share of the student's vocabulary that the teacher's must have
TRIAL = "Two  words, 3 + 4 = 7:\n\tend.\n"


@dataclasses.dataclass(frozen=True)
class Alignment:
    """The tokens that a student's tokenizer and a teacher's have in common.

    Token `ours[n]` of the student has the same text as token `theirs[n]` of the teacher. `our_ends` and `their_ends`
    end a completion.
    """

    ours: Int32[np.ndarray, " shared"]
    theirs: Int32[np.ndarray, " shared"]
    our_ends: Int32[np.ndarray, " ours"]
    their_ends: Int32[np.ndarray, " theirs"]

    @classmethod
    def of(cls, student: Tokenizer, teacher: Tokenizer) -> "Alignment":
        """Aligns two tokenizers.

        Raises:
            ValueError: the teacher's tokenizer changes texts, or too few tokens are shared.
        """
        written = "".join(_pieces(student, [], student.encode(TRIAL, special=False)))
        text = "".join(_pieces(teacher, [], teacher.encode(written, special=False)))
        if text != written:
            raise ValueError(
                f"The tokenizer of {teacher.folder} makes {text!r} of {written!r}, so its tokens can't be aligned with "
                f"those of {student.folder}; take a teacher whose tokenizer keeps texts as they are."
            )
        mine, other = _ids(student), _ids(teacher)
        shared = sorted((mine[text], other[text]) for text in mine.keys() & other.keys())
        if len(shared) < LEAST * len(mine):
            raise ValueError(
                f"The tokenizers of {student.folder} and {teacher.folder} share {len(shared):,} of {len(mine):,} "
                "tokens, too few to compare the models by; take a teacher with a more similar vocabulary."
            )
        ours, theirs = np.array(shared, np.int32).T
        return cls(ours, theirs, np.array(student.eos, np.int32), np.array(teacher.eos, np.int32))


def tokens_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the tokens of a tokenizer, and the rules that make them, as its file has them."""
    return json.loads(tokenizer.to_str())["model"]


def matches(
    student: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], teacher: Tokenizer, its_prompt: Sequence[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes a completion anew for a teacher, and finds the tokens that both draw after the same text.

    Returns the teacher's tokens, without an end, and pairs (n, m): token n of the completion stands where token m of
    the teacher does, in the text. There are no pairs if the teacher's tokens have another text.

    Args:
        prompt, its_prompt: the tokens before, which decide on white space.
        tokens: those of the completion, which may end with one of `student.eos`.
    """
    own = _pieces(student, prompt, [token for token in tokens if token not in student.eos])
    text = "".join(own)
    found = teacher.encode(text, special=False)
    theirs = _pieces(teacher, its_prompt, found)
    if "".join(theirs) != text:
        return found, []
    at = _starts(theirs)
    return found, [(n, at[place]) for place, n in _starts(own).items() if place in at and n < len(tokens)]


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Maps texts of tokens to ids, without parts of characters, ends of a completion, and tokens without a text."""
    before = tokenizer.encode("a", special=False)
    alone = len(tokenizer.decode(before, special=True))
    texts = [tokenizer.decode([*before, id], special=True)[alone:] for id in range(tokenizer.vocab_size)]
    known = [n for n, text in enumerate(texts) if text and "\ufffd" not in text and n not in tokenizer.eos]
    return {texts[n]: n for n in reversed(known)}  # of equal texts the first


def _pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token completes."""
    stream = tokenizer.stream(prompt, special=True)
    return [stream.push(token) for token in tokens]


def _starts(pieces: Sequence[str]) -> dict[int, int]:
    """Maps a place in the text to the number of the token that begins there, the end included."""
    found, at, whole = {}, 0, True
    for n, piece in enumerate([*pieces, ""]):
        if whole:  # the token before does not end within a character
            found[at] = n
        at, whole = at + len(piece), bool(piece)
    return found
