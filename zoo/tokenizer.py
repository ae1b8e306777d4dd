"""A model's tokenizer: text to token ids and back, and chats by way of the model's own template.

A thin layer over `tokenizers` and jinja2 that reads a folder in Hub layout: tokenizer.json (or Kimi's tiktoken.model),
and where they are present tokenizer_config.json, special_tokens_map.json, chat_template.jinja, generation_config.json
and config.json. Ids and rendered text are those of transformers' `AutoTokenizer`, without its seconds of import.
"""

import bisect
import datetime
import functools
import json
import math
import os
import pathlib
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders

from convert.hub import regular
from zoo import harmony, templates, tiktoken
from zoo.templates import USERS


Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

# Marks in a rendered chat, code points that Unicode keeps out of all text: where {% generation %} opens and closes;
# after the first character of a control token that a user wrote (`USERS`); and before one that the template wrote.
OPEN, CLOSE, TEMPLATES = "\ufdd0", "\ufdd1", "\ufdd3"
MARKS = re.compile(f"[{OPEN}{CLOSE}{USERS}{TEMPLATES}]")
TRUSTED = ("assistant", "system", "developer")  # roles whose messages may have control tokens
REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message


class Tokenizer:
    """The tokenizer of a folder in Hub layout.

    - `vocab_size`: the highest id plus one, added tokens included.
    - `longest`: characters of the longest token.
    - `bos`, `pad`: ids, or None where there is no such token.
    - `eos`: the ids that end a generation: generation_config.json's, else config.json's, else the tokenizer's own; and
      the one with which the chat template ends a turn of the assistant, which base models' files leave out.
    - `repetition_penalty`: generation_config.json's, which transformers obeys unless told otherwise; 1 without one.
    - `channels`: whether replies come in channels, as gpt-oss's do (`zoo.harmony`).
    - `chat_template`: a jinja template, or None.

    What users and tools say in a chat is text: where it has the letters of a control token, such as <|im_end|>, it is
    encoded as these letters. All else has the ids that it has in transformers.
    """

    def __init__(
        self, folder: str | os.PathLike, *, date: datetime.date | None = None, special_in_content: bool = False
    ):
        """`date` is what chat templates write that ask for one; None: the day on which they do. `special_in_content`
        makes control tokens of the letters of one wherever they stand, as transformers does.

        Raises FileNotFoundError without one of the two, and ValueError for a file that cannot be read.
        """
        self.folder, self.date, self.special_in_content = pathlib.Path(folder), date, special_in_content
        self._tokenizer = _read_tokenizer(self.folder)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size, self.longest = max(vocab.values()) + 1, max(map(len, vocab))

        config = _read_json(self.folder / "special_tokens_map.json") | _read_json(self.folder / "tokenizer_config.json")
        # Templates write them: {{ bos_token }}. A token is a string, or {"content": string, ...}.
        special = {key: value for key, value in config.items() if key.endswith("_token")}
        special = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items()}
        self._special = {key: value for key, value in special.items() if isinstance(value, str)}  # not add_bos_token

        self.bos = self._id("bos_token")
        self.pad = self._id("pad_token")
        self.repetition_penalty = self._repetition_penalty()
        self.channels = self._tokenizer.token_to_id(harmony.CHANNEL) is not None

        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        file = self.folder / "chat_template.jinja"
        self.chat_template = file.read_text(encoding="utf-8") if file.exists() else template

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self._special[name]) if name in self._special else None

    @functools.cached_property
    def eos(self) -> tuple[int, ...]:
        stated, end = self._stated_eos(), self._turn_end()
        return stated if end is None or end in stated else (*stated, end)

    def _stated_eos(self) -> tuple[int, ...]:
        for file in "generation_config.json", "config.json":
            ids = _read_json(self.folder / file).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
        own = self._id("eos_token")
        return () if own is None else (own,)

    def _turn_end(self) -> int | None:
        """The added token that the template writes after an answer, such as ChatML's <|im_end|>; None without one."""
        ask, answer = {"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Indeed."}
        try:
            text = self.render([ask, answer]) if self.chat_template else ""
        except ValueError:  # it may want a system message, or a broken template may say so when it is used
            return None
        _, _, tail = text.rpartition(answer["content"])
        ends = [str(token) for token in self._tokenizer.get_added_tokens_decoder().values()]
        ends = [token for token in ends if token.strip() and tail.lstrip().startswith(token)]
        return self._tokenizer.token_to_id(max(ends, key=len)) if ends else None

    def save_eos(self, folder: str | os.PathLike) -> None:
        """Writes `eos` into generation_config.json of an exported folder, unless the files here say the same already.

        So whatever generates with the folder stops where a chat's answer ends, as the model has learnt.
        """
        if self.eos != self._stated_eos():
            path = pathlib.Path(folder) / "generation_config.json"
            content = _read_json(path) | {"eos_token_id": list(self.eos)}
            path.with_suffix(".json.tmp").write_text(json.dumps(content, indent=2) + "\n")
            os.replace(path.with_suffix(".json.tmp"), path)

    def _repetition_penalty(self) -> float:
        said = _read_json(self.folder / "generation_config.json").get("repetition_penalty")
        said = 1.0 if said is None else said
        if type(said) not in (int, float) or not 0 < said < math.inf:
            file = self.folder / "generation_config.json"
            raise ValueError(f"{file} has the repetition_penalty {said!r}, which must be a number above 0; mend it.")
        return float(said)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text. `special` adds the tokens that tokenizer.json puts around a text, such as bos.

        Raises ValueError for half of a surrogate pair, which no tokenizer knows.
        """
        return _encoding(self._tokenizer, text, special).ids

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], *, special: bool = True
    ) -> tuple[list[int], list[int]]:
        """The ids of a text, and a mask: 1 for the tokens of the spans, which are `(start, end)` in characters.

        A token that is partly inside counts.
        """
        encoding = _encoding(self._tokenizer, text, special)
        return encoding.ids, _mask(encoding, spans)

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]] = ()) -> tuple[list[int], list[int]]:
        """Like `encode_spans`, of a text from `render_marked`: what users wrote makes no control tokens."""
        tokenizer, shown = self._tokenizer, lambda text: text.replace(USERS, "")
        if USERS in text:
            control = re.compile("|".join(sorted(map(re.escape, self._control), key=len, reverse=True)))
            if list(map(shown, control.split(text))) != control.split(shown(text)):
                tokenizer = self._literal
                shown = lambda text: control.sub(lambda token: TEMPLATES + token[0], text).replace(USERS, "")
        encoding = _encoding(tokenizer, shown(text), False)
        ids = [self._ids.get(id, id) for id in encoding.ids] if tokenizer is not self._tokenizer else encoding.ids
        return ids, _mask(encoding, [(len(shown(text[:start])), len(shown(text[:end]))) for start, end in spans])

    @functools.cached_property
    def _control(self) -> list[str]:
        """Tokens that mean more than their letters: those that are special, and those that the chat template writes,
        such as DeepSeek's for the roles, which are ordinary to its tokenizer. No mark goes into a single character."""
        template, added = self.chat_template or "", self._tokenizer.get_added_tokens_decoder().values()
        ours = [t.content for t in added if t.special or (t.content.strip() and t.content in template)]
        return [token for token in ours if len(token) > 1]

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The tokenizer to which letters are letters: a control token has a mark before it."""
        file = json.loads(self._tokenizer.to_str())
        for token in file["added_tokens"]:
            if token["content"] in self._control:
                token["content"] = TEMPLATES + token["content"]
        return tokenizers.Tokenizer.from_str(json.dumps(file))

    @functools.cached_property
    def _ids(self) -> dict[int, int]:
        """Id of an added token in `_literal` -> ours."""
        names = {id: t.content.removeprefix(TEMPLATES) for id, t in self._literal.get_added_tokens_decoder().items()}
        return {id: own for id, name in names.items() if (own := self._tokenizer.token_to_id(name)) is not None}

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, with or without the special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def answer(self, ids: Sequence[int]) -> str:
        """The text of a reply without the special tokens; of one in channels, only what is for the user."""
        if not self.channels:
            return self.decode(ids)
        return harmony.split(self.decode([id for id in ids if id not in self.eos], special=True))[1]

    def stream(self, before: Sequence[int] = (), *, special: bool = False) -> "Stream":
        """Decodes ids one by one as the continuation of the ids `before`, with or without the special tokens."""
        return Stream(self._tokenizer, before, special)

    def render(
        self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = False, **extra: Any
    ) -> str:
        """The text of a chat, as transformers has it; `encode_prompt` gives its ids.

        `messages` have a `role` and a `content`; `tools` are JSON schemas; `add_generation_prompt` opens a turn of the
        assistant at the end; `extra` goes to the template, for example `enable_thinking=False`.

        The template comes with the model. It runs in jinja's sandbox, in a process with bounds of time and memory
        (`zoo.templates`). Raises ValueError if it refuses the messages or exceeds these, or if there is none.
        """
        text = self.render_marked(messages, tools, add_generation_prompt=add_generation_prompt, **extra)
        return text.replace(USERS, "")

    def render_marked(self, messages: Messages, tools: Tools = None, **variables: Any) -> str:
        """Like `render`, with marks for `encode_marked` where users and tools began to write a control token."""
        if self._control and not self.special_in_content:
            messages = [m if m.get("role") in TRUSTED else self._untrusted(m) for m in messages]
        # As transformers does: templates know what to do without a key, and many would write "None" for its value.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        present = [_reasoning(message) for message in present]
        if self.chat_template is None:
            raise ValueError(
                f"{self.folder} has no chat template, so it cannot turn messages into text: put a chat_template.jinja "
                "there (an instruction-tuned model of the same family has one), or use plain text."
            )
        now = datetime.datetime.combine(self.date, datetime.time()) if self.date else datetime.datetime.now()
        try:
            given = {"messages": present, "tools": tools} | self._special | variables
            return templates.render(self.chat_template, given, now)
        except templates.Broken as error:
            raise ValueError(f"The chat template of {self.folder} is broken {error}") from error
        except (templates.Refused, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(f"The chat template of {self.folder} refuses the messages: {error}") from error

    def _untrusted(self, value: Any) -> Any:
        """A message, or a part of one, with the marks."""
        if isinstance(value, str):
            return self._firsts.sub(lambda found: found[0] + USERS, MARKS.sub("", value))
        if isinstance(value, Mapping):
            return {key: item if key in ("role", "type") else self._untrusted(item) for key, item in value.items()}
        return [self._untrusted(item) for item in value] if isinstance(value, list | tuple) else value

    @functools.cached_property
    def _firsts(self) -> re.Pattern[str]:
        """Finds what can begin a control token, even if the rest only follows once the template has joined pieces."""
        return re.compile("|".join(sorted({re.escape(token[0]) for token in self._control})))

    def encode_prompt(
        self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """The ids of a chat's text, which by default asks the assistant to go on; arguments are those of `render`."""
        text = self.render_marked(messages, tools, add_generation_prompt=add_generation_prompt, **extra)
        return self.encode_marked(text)[0]

    def encode_chat(
        self, messages: Messages, *, tools: Tools = None, given: int = 0
    ) -> list[tuple[list[int], list[int]]]:
        """The examples to learn a chat from. Each is ids, and a mask: 1 for what the assistant has to write.

        That is the content of its turns after the first `given` messages, but of those with the `weight` 0, and the
        token that ends each, so that a model learns to stop, but not the headers that open them.

        A template with {% generation %} says what a turn is, and the chat is one example. With any other, each turn is
        learnt as the template writes it at the end of a chat, since that is what the model has to write. Turns that
        stand so in the whole chat are learnt in it. Of a turn that the template writes differently once messages
        follow, for example without its reasoning, there is an example that ends with it. Where the template leaves
        reasoning out even there, as DeepSeek R1's does, the reasoning is written before the answer.

        Raises ValueError where the template does not write the messages before a turn and then the turn.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= given and m.get("weight") != 0]
        marked = self.render_marked(
            messages, tools, add_generation_prompt=False, generation_open=OPEN, generation_close=CLOSE
        )
        text = marked.replace(OPEN, "").replace(CLOSE, "")
        if text != marked:
            edge = lambda number: len(self._beginning(text, messages, number, tools))
            others = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= given and i not in turns]
            left_out = [(0, edge(given)), *((edge(i), edge(i + 1)) for i in others)]
            spans = [span for span in _marked(marked) if not any(a <= span[0] < b for a, b in left_out)]
            examples = [(text, spans)]
        else:
            examples = [(text, [])]
            for turn in reversed(turns):
                before, written = self._turn(messages, turn, tools)
                if not examples[-1][0].startswith(before + written):
                    examples.append((before + written, []))
                examples[-1][1].append((len(before), len(before + written)))
            examples = [example for example in reversed(examples) if example[1]] or examples
        return [self._learnt(*example) for example in examples]

    def _learnt(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        ids, mask = self.encode_marked(text, spans)
        for i in range(1, len(ids)):  # an end token may stand outside of the marks
            if mask[i - 1] and ids[i] in self.eos:
                mask[i] = 1
        return ids, mask

    def _beginning(self, text: str, messages: Messages, number: int, tools: Tools) -> str:
        """The first `number` messages, with which the text has to begin."""
        before = self.render_marked(messages[:number], tools, add_generation_prompt=False) if number else ""
        if not text.startswith(before):
            raise self._refusal(number)
        return before

    def _turn(self, messages: Messages, turn: int, tools: Tools) -> tuple[str, str]:
        """The chat that asks the assistant for message `turn`, and what it has to write then."""
        before = self.render_marked(messages[:turn], tools, add_generation_prompt=True)
        text = self.render_marked(messages[: turn + 1], tools, add_generation_prompt=False)
        header = before.removesuffix("\n").removesuffix("<think>")  # R1's prompt goes on with <think>
        opened = before[len(header) :]
        if not opened.strip():
            header, opened = before, ""
        if text.startswith(header):
            written = text[len(header) :]
        else:  # the turn before may be the assistant's too, and be written differently now that it is not the last
            past = self.render_marked(messages[:turn], tools, add_generation_prompt=False)
            header = header.removeprefix(past)
            if not header or text.count(header) != past.count(header) + 1:
                raise self._refusal(turn)
            written = text.rpartition(header)[2]

        reasoning, prompted = _reasoning_of(messages[turn]), before.rstrip().endswith("</think>")  # V3.1's: for none
        if opened and written.startswith(opened):
            written = written.removeprefix(opened)
        elif opened or (
            reasoning and reasoning not in written and not prompted and "</think>" in (self.chat_template or "")
        ):
            opening = "" if opened else "<think>\n"
            answer = re.sub(r"^\n*(<think>\s*</think>\n*)?", "", written)
            written = f"{opening}{reasoning}\n</think>\n\n{answer}"
        return before, written.rstrip()  # a line break after the end token belongs to no turn

    def _refusal(self, number: int) -> ValueError:
        return ValueError(
            f"The chat template of {self.folder} does not write the first {number} messages and then the next one, so "
            "what the assistant has to write there cannot be told apart. Mark it in the template with "
            "{% generation %}, split the chat after that message, or train on all of its tokens."
        )


class Stream:
    """Decodes ids one by one; see `Tokenizer.stream`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, before: Sequence[int], special: bool):
        self._tokenizer = tokenizer
        self._stream = decoders.DecodeStream(ids=list(before), skip_special_tokens=not special)

    def push(self, id: int) -> str:
        """The text that is complete now: empty while a character waits for more of its bytes."""
        return self._stream.step(self._tokenizer, id) or ""


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """As transformers does: an assistant's reasoning goes by each of the names that templates and data sets have."""
    found = next((message[name] for name in REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _reasoning_of(message: Mapping[str, Any]) -> str:
    """What stands in one of these fields, else before </think> in the content; "" for none."""
    found = next((message[name] for name in REASONING if message.get(name)), None)
    if not isinstance(found, str):
        content = message.get("content")
        before, closed, _ = content.rpartition("</think>") if isinstance(content, str) else ("", "", "")
        found = before.rpartition("<think>")[2] if closed else ""
    return found.strip()


def _encoding(tokenizer: tokenizers.Tokenizer, text: str, special: bool) -> tokenizers.Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except TypeError as error:  # which says that a str should be a str
        half = re.search("[\ud800-\udfff]", text)
        if half is None:
            raise
        raise ValueError(
            f"The text has half of a surrogate pair, {half[0]!r} at character {half.start()}, which is no "
            "character: whoever wrote the text cut an emoji or the like in two. Remove it."
        ) from error


def _mask(encoding: tokenizers.Encoding, spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for the tokens of the spans, `(start, end)` in characters; one that is partly inside counts."""
    mask = [0] * len(encoding.ids)
    # What the post-processor added is of no span. The lists are made anew at each access.
    tokens = zip(encoding.special_tokens_mask, encoding.offsets, strict=True)
    own = [(i, *offsets) for i, (added, offsets) in enumerate(tokens) if not added]
    for start, end in spans:
        # From the first token to the last, not each by itself: byte-level tokenizers count white space out of their
        # tokens, so that a token of nothing else has an empty range where it ends.
        first = bisect.bisect_right(own, start, key=lambda token: token[2])
        last = bisect.bisect_left(own, end, key=lambda token: min(token[1], token[2] - 1))
        for i, *_ in own[first:last]:
            mask[i] = 1
    return mask


def _marked(text: str) -> list[tuple[int, int]]:
    """The spans between the marks of a text, as they are without the marks."""
    before, *rest = text.split(OPEN)
    spans, at = [], len(before)
    for piece in rest:
        inside, after = piece.split(CLOSE)
        spans.append((at, at + len(inside)))
        at += len(inside) + len(after)
    return spans


def _read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists() and (folder / tiktoken.NAME).exists():
        added = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        return tiktoken.read(folder / tiktoken.NAME, {int(id): token["content"] for id, token in added.items()})
    if not file.exists():
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json, only {others[0]}. Convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            if others
            else f"{folder} has no tokenizer.json. Copy the one of the model's repository there."
        )
    regular(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the bare class is what tokenizers raises
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
    # The settings of whoever saved the file; lengths are the caller's business.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not file.exists():
        return {}
    regular(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(value).__name__}.")
    return value
