"""Constraints by grammars: JSON schemas, regular expressions, choices and Lark grammars, by the library llguidance."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from zoo.generation.constraints import AbstractConstraint, Delayed
from zoo.text import harmony
from zoo.text.messages import Tools
from zoo.text.tokenizer import Tokenizer


# White space between the parts of JSON: bounded, because a weak model may write it without end.
WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


class Grammars:
    """Compiles grammars for a model's tokens. A text ends where its grammar does."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """
        Raises:
            ValueError: llguidance is not installed, or cannot read this tokenizer.
        """
        try:
            import llguidance  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError("Constrained decoding needs llguidance: pip install 'equinox-zoo[grammar]'.") from error
        self._library, self._tokenizer, self._words = llguidance, tokenizer, -(-vocab_size // 32)
        self._tokens = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(tokenizer.eos))

    def compile(self, kind: str, value: Any) -> str:
        """Compiles a grammar: `kind` is "json" with a schema, "regex" or "grammar" with a text, or "choice" with texts.

        Raises:
            ValueError: the grammar is wrong, or has a feature that is not supported.
        """
        matcher = self._library.LLMatcher
        if kind == "json":
            grammar = matcher.grammar_from_json_schema(value, WHITESPACE)
        elif kind == "regex":
            grammar = matcher.grammar_from_regex(value)
        elif kind == "choice":
            grammar = matcher.grammar_from_lark("start: " + " | ".join(map(_quoted, value)))
        else:
            grammar = matcher.grammar_from_lark(value)
        if error := matcher.validate_grammar(grammar, self._tokens):
            raise ValueError(error)
        return grammar

    def constraint(self, grammar: str) -> "Grammar":
        """Makes the constraint of one sequence from a compiled grammar."""
        return Grammar(self._library.LLMatcher(self._tokens, grammar), self._words)

    def answer(self, grammar: str, prompt: Sequence[int], tools: Tools = None) -> AbstractConstraint:
        """Makes the constraint of the answer to a chat's prompt. Reasoning before it, and calls, are free.

        Raises:
            ValueError: the prompt opens reasoning, and the tag that closes it is no single token.
        """
        constraint, tokenizer = self.constraint(grammar), self._tokenizer
        if tokenizer.channels:
            return FinalChannel(constraint, tokenizer)
        style = tokenizer.style
        calls = style.form.opens if tools and style.form else ()
        opens: dict[int, int | None] = {id: None for each in calls if (id := tokenizer.control(each)) is not None}
        begin, close = map(tokenizer.control, style.tags or ("", ""))
        reasons = style.reasons(tokenizer.decode(prompt[-16:], special=True))
        if reasons and close is None:
            raise ValueError("The prompt opens reasoning, and no token closes it, so that the answer has no beginning.")
        return Delayed(constraint, opens | ({} if begin is None else {begin: close}), close if reasons else None)


class Grammar(AbstractConstraint):
    """The tokens that a grammar allows."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._words = matcher, words

    def allowed(self) -> UInt32[np.ndarray, " words"]:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()  # False also if the grammar got too complex, after which no more may come


class FinalChannel(AbstractConstraint):
    """A constraint on the answer of a reply in channels (`zoo.text.harmony`), which others may precede."""

    def __init__(self, constraint: AbstractConstraint, tokenizer: Tokenizer):
        self._constraint, self._tokenizer = constraint, tokenizer
        self._begin = [tokenizer.control(token) for token in (harmony.START, harmony.CHANNEL)]
        self._message = tokenizer.control(harmony.MESSAGE)
        self._header: list[int] = []  # tokens of the header, from the channel's name on
        self._answers = False

    def allowed(self) -> UInt32[np.ndarray, " words"] | None:
        return self._constraint.allowed() if self._answers else None

    def push(self, token: int) -> None:
        if self._answers:
            self._constraint.push(token)
        elif token == self._message:
            header = self._tokenizer.decode(self._header)
            self._answers = header.startswith("final") or header.endswith("to=user")
        else:
            self._header = [] if token in self._begin else [*self._header, token]

    @property
    def complete(self) -> bool:
        return not self._answers or self._constraint.complete


def _quoted(text: str) -> str:
    """Returns a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
