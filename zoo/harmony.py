"""The replies of gpt-oss, which come in channels: OpenAI's harmony format (github.com/openai/harmony, docs/format.md).

    <|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!

It reasons in the channel `analysis`, speaks in `final`, and in `commentary` before it calls a tool.
"""

START, CHANNEL, CONSTRAIN, MESSAGE, END = (
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end")
)


def split(text: str) -> tuple[str, str]:
    """The reasoning and the answer in a reply, which may be incomplete and still has its special tokens.

    A call of a tool is in the answer with its header, as the model wrote it. So is all that is in no channel.
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
    """Splits a reply while it comes; one that is in no channels (`Tokenizer.channels`) is an answer as it is."""

    def __init__(self, channels: bool):
        self._channels, self._text, self._said = channels, "", ("", "")

    def push(self, piece: str) -> tuple[str, str]:
        """What the next piece of the text adds to the reasoning and to the answer."""
        if not self._channels:
            return "", piece
        self._text += piece
        before, self._said = self._said, split(self._text)
        reasoning, answer = (now[len(then) :] for then, now in zip(before, self._said, strict=True))
        return reasoning, answer
