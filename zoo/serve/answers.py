"""The forms of OpenAI's API in which replies are answered: messages, pieces of them, log-probabilities, usage."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from zoo.serve.reply import Gain, Reply, Token
from zoo.text.calls import Call
from zoo.text.replies import Piece
from zoo.text.tokenizer import Tokenizer


def choice(reply: Reply, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": reply.index, "finish_reason": finish, "logprobs": None} | content


def message(parts: Piece) -> dict[str, Any]:
    """Returns a chat's message with the parts of a reply."""
    reasoning = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
    calls = {"tool_calls": list(map(called, parts.calls))} if parts.calls else {}
    content = None if parts.calls and not parts.answer else parts.answer
    return {"role": "assistant", "content": content} | reasoning | calls


def delta(gain: Gain) -> dict[str, Any]:
    """Returns the change of a chat's message by what a reply has gained."""
    parts = gain.parts
    reasoning = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
    calls = [{"index": gain.calls + n} | called(call) for n, call in enumerate(parts.calls)]
    return {"content": parts.answer} | reasoning | ({"tool_calls": calls} if calls else {})


def called(call: Call) -> dict[str, Any]:
    """Returns a call in OpenAI's form. Its id is the model's, or new: nine characters, as Mistral's templates ask."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id or uuid.uuid4().hex[:9], "type": "function", "function": function}


def usage(replies: list[Reply]) -> dict[str, int]:
    """Counts tokens. Each prompt counts once, however many replies it has."""
    prompts = sum(len(ask.prompt) for ask in {reply.ask for reply in replies})
    written = sum(len(reply.tokens) for reply in replies)
    return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class Scores:
    """Writes the log-probabilities of a reply's tokens, with those of the `top` likeliest, in OpenAI's forms.

    Tokens come in pieces, which follow the token `before`; None for those of a text from its beginning on.
    """

    def __init__(self, tokenizer: Tokenizer, before: int | None, top: int):
        self._tokenizer, self._top, self._offset = tokenizer, top, 0
        self._before = [] if before is None else [before]

    def completion(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """Returns the `logprobs` of a completion's next tokens. Their places in the text count from its beginning."""
        written: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            name = self._name(token.id)
            likeliest: dict[str, float] = {}
            for id, value in [*self._likeliest(token), (token.id, token.logprob)] if token.logprob is not None else ():
                likeliest.setdefault(self._name(id), finite(value))
            logprob = None if token.logprob is None else finite(token.logprob)
            row = name, logprob, (likeliest or None) if self._top else None, self._offset
            for column, value in zip(written.values(), row, strict=True):
                column.append(value)
            self._before, self._offset = [token.id], self._offset + len(name)
        return written

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Returns the `logprobs` of a chat's next tokens."""
        content = []
        for token in tokens:
            likeliest = [self._entry(id, value) for id, value in self._likeliest(token)]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": likeliest})
            self._before = [token.id]
        return {"content": content, "refusal": None}

    def _likeliest(self, token: Token) -> list[tuple[int, float]]:
        return list(token.likeliest.items())[: self._top]

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        name = self._name(id)
        known = None if name.startswith("token_id:") else list(name.encode())
        return {"token": name, "logprob": finite(logprob), "bytes": known}

    def _name(self, id: int) -> str:
        """Names a token by the text that it adds to the one before it, or by its id if that text is incomplete."""
        text = self._tokenizer.decode([*self._before, id], special=True)
        name = text[len(self._tokenizer.decode(self._before, special=True)) :]
        return f"token_id:{id}" if "\ufffd" in name or not name else name


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Joins two pieces of a completion: its text, and the lists of its `logprobs` if it has these."""
    of = lambda a, b: a if a is None else {name: a[name] + b[name] for name in a}
    return {"text": first["text"] + second["text"], "logprobs": of(first["logprobs"], second["logprobs"])}


def finite(logprob: Any) -> float:
    """Replaces -inf, which JSON lacks, by -9999, as vLLM does."""
    return max(float(logprob), -9999.0)
