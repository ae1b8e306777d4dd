"""The forms of OpenAI's API in which replies are answered: messages, pieces of them, log-probabilities, usage."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from zoo.serve.reply import Gain, Reply
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
    """The log-probabilities of tokens in OpenAI's forms.

    Each token but the first has its own, and those of the likeliest tokens in its place, as from `Worker.score`.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[int], own: np.ndarray, ids: np.ndarray, values: np.ndarray):
        self._tokenizer, self._tokens = tokenizer, tokens
        self._own, self._ids, self._values = own, ids, values

    @classmethod
    def drawn(cls, tokenizer: Tokenizer, tokens: list[int], logprobs: Sequence[float]) -> "Scores":
        """Makes those of drawn tokens, which follow the first, without others in their place."""
        none = np.zeros((len(logprobs), 0), np.int32)
        return cls(tokenizer, tokens, np.array(logprobs), none, none)

    def completion(self, start: int, top: int) -> dict[str, list[Any]]:
        """Returns the `logprobs` of a completion from token `start` on, with those of `top` others."""
        names, logprobs, tops, offsets, offset = [], [], [], [], 0
        for i in range(start, len(self._tokens)):
            names.append(self._name(i, self._tokens[i]))
            offsets.append(offset)
            offset += len(names[-1])
            logprobs.append(None if i == 0 else finite(self._own[i - 1]))
            likeliest: dict[str, float] = {}
            if i > 0:
                for id, value in [*self._likeliest(i, top), (self._tokens[i], self._own[i - 1])]:
                    likeliest.setdefault(self._name(i, int(id)), finite(value))
            tops.append(likeliest if i > 0 and top else None)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def chat(self, start: int, top: int) -> dict[str, Any]:
        """Returns the `logprobs` of a chat's reply from token `start` on, with those of the `top` likeliest."""
        content = []
        for i in range(start, len(self._tokens)):
            others = [self._entry(i, int(id), value) for id, value in self._likeliest(i, top)]
            content.append(self._entry(i, self._tokens[i], self._own[i - 1]) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _likeliest(self, at: int, top: int) -> list[tuple[int, float]]:
        return list(zip(self._ids[at - 1, :top], self._values[at - 1, :top], strict=True))

    def _entry(self, at: int, id: int, logprob: float) -> dict[str, Any]:
        name = self._name(at, id)
        known = None if name.startswith("token_id:") else list(name.encode())
        return {"token": name, "logprob": finite(logprob), "bytes": known}

    def _name(self, at: int, id: int) -> str:
        """Names a token by the text that it adds to the one before it, or by its id if that text is incomplete."""
        before = self._tokens[max(at - 1, 0) : at]
        text = self._tokenizer.decode([*before, id], special=True)
        name = text[len(self._tokenizer.decode(before, special=True)) :]
        return f"token_id:{id}" if "\ufffd" in name or not name else name


def finite(logprob: Any) -> float:
    """Replaces -inf, which JSON lacks, by -9999, as vLLM does."""
    return max(float(logprob), -9999.0)
