"""Split replies of gpt-oss into channels: OpenAI's harmony format (github.com/openai/harmony, docs/format.md).

    <|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!

The channel `analysis` has the reasoning, `final` the answer, and `commentary` the text before a tool call.
"""

START, CHANNEL, CONSTRAIN, MESSAGE, END = (
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end")
)


def split(text: str) -> tuple[str, str]:
    """Split a reply with its special tokens into reasoning and answer. The reply may be incomplete.

    A tool call is part of the answer, with its header, as the model wrote it. Text outside channels is, too.
    """
    if not text.startswith(CHANNEL):
        return "", text
    reasoning, answer = [], []
    for message in text.split(START):
        header, opened, body = message.partition(MESSAGE)
        if opened:
            body = body.removesuffix(END)
            match header.removeprefix("assistant").removeprefix(CHANNEL).partition(CONSTRAIN)[0].strip():
                case "analysis":
                    reasoning.append(body)
                case "final" | "commentary":
                    answer.append(body)
                case _:
                    answer.append(header + MESSAGE + body)
    return "\n".join(reasoning), "\n".join(answer)


class Parts:
    """Splits a reply while it is generated. Without channels (`Tokenizer.channels`) all of it is the answer."""

    def __init__(self, channels: bool):
        self._channels, self._text, self._parts = channels, "", ("", "")

    def push(self, piece: str) -> tuple[str, str]:
        """Add a piece of the text, and return what it adds to the reasoning and to the answer."""
        if not self._channels:
            return "", piece
        self._text += piece
        before, self._parts = self._parts, split(self._text)
        reasoning, answer = (now[len(then) :] for then, now in zip(before, self._parts, strict=True))
        return reasoning, answer
