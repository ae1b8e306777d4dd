"""Chats with an environment, as the texts and tokens that a model reads and draws."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from zoo.text.replies import Piece
from zoo.text.tokenizer import Tokenizer


Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Chats:
    """The texts and tokens of chats with an environment.

    Raises:
        ValueError: there are tools, and the chat template takes none or writes calls in an unknown form.
    """

    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]] | None
    past: Literal["split", "refuse"]

    def __post_init__(self) -> None:
        if self.tools:
            self.tokenizer.beginning([])  # raises if calls have an unknown form
            call = {"name": self.tools[0]["function"]["name"], "arguments": {}}
            chat = [{"role": "user", "content": "Well?"}, message_of(Piece(), [call_of("call00000", call)])]
            chat.append({"role": "tool", "tool_call_id": "call00000", "name": call["name"], "content": "Nothing."})
            self.tokenizer.render_whole(chat, self.tools)

    def first(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Returns a chat's text and tokens, with an assistant's turn opened at the end."""
        text = self.tokenizer.render_whole(messages, self.tools, add_generation_prompt=True)
        return text, self.tokenizer.encode_marked(text)[0]

    def read(self, prompt: Sequence[int], tokens: Sequence[int]) -> Piece:
        """Splits a reply into reasoning, answer and calls."""
        stream = self.tokenizer.stream(prompt, special=self.tokenizer.delimiters(self.tools))
        texts = [stream.push(token) for token in tokens if token not in self.tokenizer.eos]
        return sum(self.tokenizer.reader(prompt, self.tools).split(["".join(texts)]), Piece())

    def following(
        self, text: str, messages: Sequence[Message], new: Sequence[Message], end: int
    ) -> tuple[str, list[int], bool]:
        """Returns the text of a chat with new messages, and the tokens that follow those of the chat.

        Where the template does not write the chat and then the new messages, these are the tokens of all, and the third
        value is True.

        Args:
            text: the chat before the last reply.
            messages: the chat with the last reply.
            end: the token that ended the reply.

        Raises:
            ValueError: the template rewrites the chat, and `past` is "refuse".
        """
        tokenizer, control = self.tokenizer, self.tokenizer.decode([end], special=True)
        past = tokenizer.render_marked(messages, self.tools, add_generation_prompt=False)
        whole = tokenizer.render_marked([*messages, *new], self.tools, add_generation_prompt=True)
        if past.startswith(text) and whole.startswith(past):
            _, found, tail = past[len(text) :].rpartition(control)
            rest = whole[len(past) :]
            # The template may end a turn by the header of the next one, which the model then has drawn.
            rest = tail + rest if found and not tail.strip() else rest.removeprefix(control) if not found else None
            if rest is not None and (ids := tokenizer.encode_marked(control + rest)[0])[0] == end:
                return whole, ids[1:], False
        if self.past == "refuse":
            raise ValueError(
                f"The chat template of {tokenizer.folder} writes turns of the past anew, such as without their "
                "reasoning, so the next prompt does not begin with the tokens that were drawn. With --past split such "
                "a trajectory is learnt in several texts."
            )
        return whole, tokenizer.encode_marked(whole)[0], True


def message_of(piece: Piece, calls: Sequence[Mapping[str, Any]]) -> Message:
    """Returns a reply as a message for chat templates."""
    reasoning = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    return {"role": "assistant", "content": piece.answer} | reasoning | ({"tool_calls": [*calls]} if calls else {})


def call_of(id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of a tool, with its `name` and `arguments`, as part of a message."""
    return {"id": id, "type": "function", "function": dict(function)}
