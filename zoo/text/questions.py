"""Questions that a language model answers in one pass, by the logits of their options' labels; transformers' prompts.

A question is {"type", "instructions", "criteria"}. Its type is "choice" (criteria: option -> description or None),
"noul" (yes or no; criteria: None, or descriptions of "true" and "false") or "score" (criteria: levels, the lowest
first). The settings are those of a checkpoint's decision.json.
"""

import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from convert.files import DECISION, read_json
from zoo.text.tokenizer import Tokenizer


QuestionKind = Literal["choice", "noul", "score"]
KINDS: tuple[QuestionKind, ...] = get_args(QuestionKind)
LETTERS = tuple(string.ascii_uppercase)


class Settings(NamedTuple):
    """How a model answers: the labels of each kind's options, and the temperatures that divide their logits."""

    labels: Mapping[str, Sequence[str]]
    temperature: Mapping[str, float]
    noul: Sequence[str]  # the order of "true" and "false"

    @classmethod
    def of(cls, folder: pathlib.Path) -> "Settings":
        """Read the settings of the checkpoint in a folder; without decision.json these are transformers' defaults.

        Raises:
            ValueError: the checkpoint has prompts or adapters of its own, which are not implemented.
        """
        stated = read_json(folder / DECISION) if (folder / DECISION).is_file() else {}
        if (folder / "decision_template.jinja").is_file() or stated.get("adapter"):
            raise ValueError(f"{folder} has a template or an adapter for decisions, which are not implemented.")
        labels = {kind: ("Yes", "No") if kind == "noul" else LETTERS for kind in KINDS}
        temperature = {kind: float((stated.get("temperature") or {}).get(kind, 1.0)) for kind in KINDS}
        return cls(labels | (stated.get("labels") or {}), temperature, stated.get("noul_options") or ["true", "false"])


class Question(NamedTuple):
    kind: QuestionKind
    instructions: Any
    options: Sequence[str]  # a choice's names, "true" and "false", or the numbers of levels from "0"
    descriptions: Sequence[Any]
    labels: Sequence[str]

    @classmethod
    def of(cls, question: Any, settings: Settings) -> "Question":
        """Read a question.

        Raises:
            ValueError: it has another format, or more options than there are labels.
        """
        match question:
            case {"type": "choice", "criteria": dict(criteria)} if criteria:
                kind: QuestionKind = "choice"
            case {"type": "score", "criteria": list(levels)} if levels:
                kind, criteria = "score", {str(n): level for n, level in enumerate(levels)}
            case {"type": "noul"} if isinstance(question.get("criteria") or {}, dict):
                kind = "noul"
                criteria = {name: (question.get("criteria") or {}).get(name) for name in settings.noul}
            case _:
                raise ValueError(
                    'a question must have the type "choice" with criteria (option -> description or null), "score" '
                    f'with criteria (a list of levels), or "noul"; not {json.dumps(question)[:200]}.'
                )
        labels = settings.labels[kind]
        if len(labels) < len(criteria):
            raise ValueError(f"a {kind} has at most {len(labels)} options, and this one has {len(criteria)}.")
        options = list(criteria)
        return cls(kind, question.get("instructions"), options, list(criteria.values()), labels[: len(options)])

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """Return the answer that follows from the options' probabilities, as in transformers and System One.

        The confidence is 1 if one option has all the probability, and 0 if all are alike, or for a score if levels are
        as far from the best as levels are from the middle.
        """
        by_option, n = dict(zip(self.options, probabilities, strict=True)), len(probabilities)
        if self.kind == "noul":
            return {"type": "noul", "noul": by_option["true"]}
        best = max(range(n), key=probabilities.__getitem__)
        if self.kind == "choice":
            sure = 1.0 if n == 1 else max(0.0, (probabilities[best] - 1 / n) / (1 - 1 / n))
            found = {"type": "choice", "choice": self.options[best]}
            return found | {"confidence": sure, "probabilities": by_option}
        distance = sum(p * abs(level - best) for level, p in enumerate(probabilities))
        uniform = sum(abs(level - (n - 1) / 2) for level in range(n)) / n
        return {
            "type": "score",
            "score": sum(level * p for level, p in enumerate(probabilities)),
            "legend": dict(zip(self.options, self.descriptions, strict=True)),
            "confidence": 1.0 if n == 1 else max(0.0, 1 - distance / uniform),
            "probabilities": by_option,
        }


def encode(state: Any, question: Question, tokenizer: Tokenizer, most: int | None = None) -> list[int]:
    """Encode a question about a state, after which the answer's label follows. The end of a long prompt is kept.

    The prompt is a user's message, or plain text if the tokenizer has no chat template.
    """
    text = prompt(state, question)
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(f"{text}\n")
    else:
        ids = tokenizer.encode_prompt([{"role": "user", "content": text}], enable_thinking=False)
    return ids if most is None else ids[-most:]


def prompt(state: Any, question: Question) -> str:
    """Return the words of a question about a state, a text or any JSON."""
    lines = [_text(question.instructions)]
    for option, label, description in zip(question.options, question.labels, question.descriptions, strict=True):
        words = _text(description)
        match question.kind:
            case "noul":
                words = words or (option if list(question.labels) != ["Yes", "No"] else "")
                lines.append(f"{label}: {words}" if words else "")
            case "choice":
                lines.append(f"{label}. {option}: {words}" if words else f"{label}. {option}")
            case "score":
                lines.append(f"{label}. {words}")
    first, last = question.labels[0], question.labels[-1]
    if question.kind == "noul":
        ask = f"Answer {first} or {last} only."
    else:
        what = "letter" if tuple(question.labels) == LETTERS[: len(question.labels)] else "label"
        of = "option" if question.kind == "choice" else "level"
        ask = f"Answer with the {what} of the {of} that fits best ({first} to {last}) only."
    return f"{_text(state)}\n\n" + "\n".join(filter(None, lines)) + f"\n{ask}"


def label_ids(question: Question, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a question's labels.

    Raises:
        ValueError: a label is no single token, or two are the same one.
    """
    ids = [tokenizer.encode(label, special=False) for label in question.labels]
    if any(len(each) != 1 for each in ids) or len({each[0] for each in ids}) != len(ids):
        raise ValueError(f"The labels {', '.join(question.labels)} are not distinct single tokens of this tokenizer.")
    return [each[0] for each in ids]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
