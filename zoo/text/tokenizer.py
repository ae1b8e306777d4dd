"""Convert text to token ids and back, and chats to ids by the model's own template.

A thin layer over `tokenizers` and jinja2. It reads a folder in Hub layout: tokenizer.json (or Kimi's tiktoken.model, or
Mistral's tekken.json), and if present tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
generation_config.json and config.json. Ids and rendered text equal those of transformers' `AutoTokenizer`, whose import
takes seconds.
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
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders

from convert.files import regular
from zoo.text import completeness, harmony, replies, tekken, templates, tiktoken, trial
from zoo.text.messages import Messages, Tools, check_text, has_images, join_texts, reasoning_of, with_reasoning
from zoo.text.templates import USERS
from zoo.vision.processors.base import AbstractImageProcessor


Spans = Sequence[tuple[int, int]]
Expand = Callable[[str, Spans], tuple[str, Spans]]

# Marks in a rendered chat: noncharacters, which Unicode keeps out of all text. OPEN and CLOSE are the ends of a
# {% generation %} block. USERS follows a character of a user's text that may begin a control token. TEMPLATES precedes
# a control token written by the template.
OPEN, CLOSE, TEMPLATES = "\ufdd0", "\ufdd1", "\ufdd3"
MARKS = re.compile(f"[{OPEN}{CLOSE}{USERS}{TEMPLATES}]")
TEMPLATE = "chat_template.jinja"
# The template of DeepSeek V3.2 and V4, whose repositories have none, and what it begins with, by their model_type.
DEEPSEEK_TEMPLATE = pathlib.Path(__file__).with_name("deepseek.jinja")
DEEPSEEK = {"deepseek_v32": "{%- set merges = false -%}\n", "deepseek_v4": "{%- set merges = true -%}\n"}
TRUSTED = ("assistant", "system", "developer")  # roles whose messages may contain control tokens


class Tokenizer:
    """The tokenizer of a folder in Hub layout.

    - `vocab_size`: the highest id plus one, added tokens included.
    - `longest`: length of the longest token, in characters.
    - `bos`, `pad`: ids, or None without such a token.
    - `eos`: the ids that end a generation. They are generation_config.json's, else config.json's, else the tokenizer's
      own, and also the one with which the chat template ends an assistant's turn, which base models' files leave out.
    - `repetition_penalty`: generation_config.json's, which transformers applies by default; 1 without one.
    - `prompts`: texts to put before others, by name, such as "query": config_sentence_transformers.json's.
    - `max_length`: the most tokens of a text to embed, by sentence_bert_config.json; None without one.
    - `channels`: whether replies have channels, as gpt-oss's and Muse's do (`zoo.text.harmony`).
    - `chat_template`: a jinja template, or None.
    - `processor`: prepares the images of chats for training, or None (`zoo.tokenizer`).

    Messages of users and tools in a chat are plain text: a control token spelled out there, such as <|im_end|>, is
    encoded as its letters. All other text has the same ids as in transformers.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        date: datetime.date | None = None,
        special_in_content: bool = False,
        chat_template: str | None = None,
        processor: AbstractImageProcessor | None = None,
    ):
        """Read the folder's files.

        Args:
            folder: a folder in Hub layout.
            date: the date for chat templates that write one; None: today, at the time of rendering.
            special_in_content: encode spelled-out control tokens as control tokens in all messages, as transformers
                does.
            chat_template: a jinja template in place of the folder's own.
            processor: prepares the images of chats that a model is trained on.

        Raises:
            FileNotFoundError: if the folder has none of tokenizer.json, tiktoken.model and tekken.json.
            ValueError: if a file cannot be read.
        """
        self.folder, self.date, self.special_in_content = pathlib.Path(folder), date, special_in_content
        self.processor = processor
        self._tokenizer = _read_tokenizer(self.folder)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ValueError(f"The tokenizer of {self.folder} has no tokens: fetch it again.")
        self.vocab_size, self.longest = max(vocab.values()) + 1, max(map(len, vocab))

        config = _read_json(self.folder / "special_tokens_map.json") | _read_json(self.folder / "tokenizer_config.json")
        if source_of(self.folder) == tekken.NAME:
            config = tekken.TOKENS | config
        # Variables of chat templates, such as {{ bos_token }}. A token is a string, or {"content": string, ...}.
        special = {key: value for key, value in config.items() if key.endswith("_token")}
        special = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items()}
        self._special = {key: value for key, value in special.items() if isinstance(value, str)}  # drops add_bos_token

        self.bos = self._id("bos_token")
        self.pad = self._id("pad_token")
        self.repetition_penalty = self._repetition_penalty()
        self.prompts: dict[str, str] = (
            _read_json(self.folder / "config_sentence_transformers.json").get("prompts") or {}
        )
        self.max_length: int | None = _read_json(self.folder / "sentence_bert_config.json").get("max_seq_length")

        self._own_template = chat_template_of(self.folder)
        self.chat_template = self._own_template if chat_template is None else chat_template
        self.channels = self._tokenizer.token_to_id(harmony.CHANNEL) is not None or self.style.form is harmony.MUSE

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
        """Return the id of the added token that the template writes after an answer, such as <|im_end|>, or None."""
        tail = self._after_answer().lstrip()
        ends = [str(token) for token in self._tokenizer.get_added_tokens_decoder().values()]
        ends = [token for token in ends if token.strip() and tail.startswith(token)]
        return self._tokenizer.token_to_id(max(ends, key=len)) if ends else None

    def end_without_token(self) -> str:
        """Return the text that the template writes after an answer, or "" if that begins with an added token."""
        return "" if self._turn_end() is not None else self._after_answer().strip()

    def _after_answer(self) -> str:
        """Return the text that the template writes after an answer; "" if the template refuses a short chat."""
        ask, answer = {"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Indeed."}
        try:
            text = self.render([ask, answer]) if self.chat_template else ""
        except ValueError:  # it may need a system message; a broken template raises again when used
            return ""
        _, found, tail = text.rpartition(answer["content"])
        return tail if found else ""

    def save_changes(self, folder: str | os.PathLike[str]) -> None:
        """Write the changes from this folder's files into an exported folder that has copies of the files.

        `eos` goes into generation_config.json, so that other libraries stop at the end of an answer, as the model has
        learnt. A given `chat_template` goes into chat_template.jinja.
        """
        if self.eos != self._stated_eos():
            path = pathlib.Path(folder) / "generation_config.json"
            _write(path, json.dumps(_read_json(path) | {"eos_token_id": list(self.eos)}, indent=2) + "\n")
        self.save_template(folder)

    @property
    def other_template(self) -> str | None:
        """The chat template if it was given and is not the folder's own; else None."""
        return self.chat_template if self.chat_template != self._own_template else None

    def save_template(self, folder: str | os.PathLike[str]) -> None:
        """Write the chat template as chat_template.jinja if it was given."""
        if self.other_template is not None:
            _write(pathlib.Path(folder) / TEMPLATE, self.other_template)

    def _repetition_penalty(self) -> float:
        penalty = _read_json(self.folder / "generation_config.json").get("repetition_penalty")
        penalty = 1.0 if penalty is None else penalty
        if type(penalty) not in (int, float) or not 0 < penalty < math.inf:
            file = self.folder / "generation_config.json"
            raise ValueError(f"{file} has the repetition_penalty {penalty!r}, which must be a number above 0; mend it.")
        return float(penalty)

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Encode a text as ids. `special` adds the tokens that tokenizer.json puts around a text, such as bos.

        Of a text with more than `most` ids, the last ones are left out, but those around it stay.

        Raises ValueError for half of a surrogate pair, which no tokenizer can encode.
        """
        if most is None:
            return _encoding(self._tokenizer, text, special).ids
        encoding = _encoding(self._tokenizer, text, False)
        around = self._tokenizer.num_special_tokens_to_add(False) if special else 0
        encoding.truncate(max(most - around, 0))
        return self._tokenizer.post_process(encoding, add_special_tokens=special).ids

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], *, special: bool = True
    ) -> tuple[list[int], list[int]]:
        """Encode a text as ids and a mask, which is 1 for tokens within the spans, `(start, end)` in characters.

        A token that is partly within a span counts.
        """
        encoding = _encoding(self._tokenizer, text, special)
        return encoding.ids, _mask(encoding, spans)

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]] = ()) -> tuple[list[int], list[int]]:
        """Encode a text from `render_marked` as `encode_spans` does; users' text never becomes control tokens."""
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
        """Control tokens: special tokens, and added tokens that the chat template writes.

        Tokens that the template writes are not always special: DeepSeek's tokens for roles are ordinary ones. Tokens of
        a single character are left out, because a mark cannot be put inside.
        """
        template, added = self.chat_template or "", self._tokenizer.get_added_tokens_decoder().values()
        ours = [t.content for t in added if t.special or (t.content.strip() and t.content in template)]
        return [token for token in ours if len(token) > 1]

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A tokenizer that encodes control tokens as letters, except those with a mark before them."""
        file = json.loads(self._tokenizer.to_str())
        for token in file["added_tokens"]:
            if token["content"] in self._control:
                token["content"] = TEMPLATES + token["content"]
        return tokenizers.Tokenizer.from_str(json.dumps(file))

    @functools.cached_property
    def _ids(self) -> dict[int, int]:
        """Map ids of added tokens in `_literal` to this tokenizer's ids."""
        names = {id: t.content.removeprefix(TEMPLATES) for id, t in self._literal.get_added_tokens_decoder().items()}
        return {id: own for id, name in names.items() if (own := self._tokenizer.token_to_id(name)) is not None}

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode ids to text, with or without the special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def answer(self, ids: Sequence[int]) -> str:
        """Decode a reply without special tokens; of a reply with channels, only the text for the user."""
        if not self.channels:
            return self.decode(ids)
        return harmony.split(self.decode([id for id in ids if id not in self.eos], special=True))[1]

    def control(self, text: str) -> int | None:
        """Return the id of the longest added token with which a text begins; None if it begins with none."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        found = [(len(token.content), id) for id, token in added if token.content and text.startswith(token.content)]
        return max(found)[1] if found else None

    def to_str(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return self._tokenizer.to_str()

    def stream(self, before: Sequence[int] = (), *, special: bool | Collection[str] = False) -> "Stream":
        """Decode ids one by one, as the continuation of `before`.

        `special`: whether special tokens are in the text; or texts, to have only those that are part of one of these.
        """
        return Stream(self._tokenizer, before, special)

    @functools.cached_property
    def style(self) -> replies.Style:
        """The delimiters of the model's replies, by its chat template. Replies in channels have others."""
        return replies.Style.of(self.chat_template or "")

    def delimiters(self, tools: Tools = None) -> bool | Collection[str]:
        """Return the `special` of `stream` with which a reply has what its `reader` needs."""
        return self.channels or self._style(tools).delimiters

    def reader(self, prompt: Sequence[int], tools: Tools = None, begun: str = "") -> replies.AbstractReader:
        """Make a reader that splits the reply to a prompt into reasoning, answer, and calls of these tools.

        `begun` is the text with which the reply begins, although the model has not written it.
        """
        style = self._style(tools)
        reasons = style.reasons(self.decode(prompt[-16:], special=True))
        reader = harmony.Reader(tools) if self.channels else replies.Reader(style, tools, reasons=reasons)
        reader.push(begun)
        return reader

    def beginning(self, prompt: Sequence[int], name: str | None = None) -> str:
        """Return a text with which the reply to a prompt is a call: of the function `name`, or of any.

        Raises:
            ValueError: the form in which the model writes calls is not known.
        """
        form, tags = self.style.form, self.style.tags
        if form is None and not self.channels:
            raise ValueError(f"{self._template_name} writes calls in no form that is known (zoo.text.calls).")
        begin = harmony.BEGIN if form is None else form.begin
        reasons = self.style.reasons(self.decode(prompt[-16:], special=True))
        close = f"\n{tags[1]}\n\n" if tags and reasons and not self.channels else ""
        return close + (begin.partition("NAME")[0] if name is None else begin.replace("NAME", name))

    def _style(self, tools: Tools) -> replies.Style:
        return self.style if tools else replies.Style(self.style.tags)

    def render(
        self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = False, **extra: Any
    ) -> str:
        """Render a chat as text, as transformers does. `encode_prompt` gives its ids.

        The template comes with the model. It runs in jinja's sandbox, in a process with limits of time and memory
        (`zoo.text.templates`).

        Args:
            messages: each has a `role` and a `content`.
            tools: JSON schemas.
            add_generation_prompt: open an assistant's turn at the end.
            extra: variables for the template, for example `enable_thinking=False`.

        Raises:
            ValueError: if there is no template, or it refuses the messages or exceeds a limit.
        """
        text = self.render_marked(messages, tools, add_generation_prompt=add_generation_prompt, **extra)
        return text.replace(USERS, "")

    def render_marked(self, messages: Messages, tools: Tools = None, **variables: Any) -> str:
        """Render as `render` does, with marks for `encode_marked`.

        They are put where text of users or tools may begin a control token.
        """
        if self._control and not self.special_in_content:
            messages = [m if m.get("role") in TRUSTED else self._untrusted(m) for m in messages]
        # Drop keys without a value, as transformers does: many templates would write "None".
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        present = [with_reasoning(message) for message in present]
        if self.chat_template is None:
            raise ValueError(
                f"{self.folder} has no chat template, so it cannot turn messages into text: name one to train with by "
                "--chat.template (an instruction-tuned model of the same family has one), put a chat_template.jinja "
                "into the folder, or use plain text."
            )
        now = datetime.datetime.combine(self.date, datetime.time()) if self.date else datetime.datetime.now()
        try:
            given = {"messages": present, "tools": tools} | self._special | variables
            return templates.render(self.chat_template, given, now)
        except templates.Broken as error:
            raise ValueError(f"{self._template_name} is broken {error}") from error
        except (templates.Refused, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(f"{self._template_name} refuses the messages: {error}") from error

    def render_whole(self, messages: Messages, tools: Tools = None, **variables: Any) -> str:
        """Render as `render_marked` does, but refuse a chat if the template leaves out a content, a call, or the tools.

        The assistant's reasoning before its answers, and its text beside calls, may be missing: templates leave these
        out by design.

        Raises:
            ValueError: as in `render`, or the template leaves something out; the error names the chat's message.
        """
        text = self.render_marked(messages, tools, **variables)
        self._check_whole(text, messages, tools, variables)
        return text

    def _check_whole(
        self, text: str, messages: Messages, tools: Tools, variables: Mapping[str, Any], learnt: Container[int] = ()
    ) -> None:
        """Raise ValueError if a rendered text lacks a part of the chat. `learnt`: messages that need reasoning, too."""
        shown, render = MARKS.sub("", text), lambda changed: self.render_marked(changed, tools, **variables)
        doubtful = completeness.doubts(messages, shown, learnt, self.names_role)
        completeness.check_fields(doubtful, messages, text, render, self._template_name)
        without_tools = lambda: self.render_marked(messages, **variables) == text
        completeness.check_tools(tools, shown, without_tools, self._template_name)

    @property
    def _template_name(self) -> str:
        return f"The chat template of {self.folder}"

    def joined(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Join contents that are lists of texts, which many templates leave out, unless the chat has images."""
        return list(messages if has_images(messages) or not self._takes_text else map(join_texts, messages))

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes a content that is a text; some models' templates for images write only lists."""
        try:
            return "Well?" in self.render([{"role": "user", "content": "Well?"}])
        except ValueError:  # it may need a system message
            return True

    def names_role(self, role: str) -> bool:
        """Whether the chat template names a role."""
        return re.search(rf"(['\"]){re.escape(role)}\1", self.chat_template or "") is not None

    def _untrusted(self, value: Any) -> Any:
        """Add marks to a message, or to a part of one."""
        if isinstance(value, str):
            return self._firsts.sub(lambda found: found[0] + USERS, MARKS.sub("", value))
        if isinstance(value, Mapping):
            return {key: item if key in ("role", "type") else self._untrusted(item) for key, item in value.items()}
        return [self._untrusted(item) for item in value] if isinstance(value, list | tuple) else value

    @functools.cached_property
    def _firsts(self) -> re.Pattern[str]:
        """Pattern of control tokens' first characters. The rest may follow only when the template joins pieces."""
        return re.compile("|".join(sorted({re.escape(token[0]) for token in self._control})))

    def encode_prompt(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        add_generation_prompt: bool = True,
        expand: Expand | None = None,
        **extra: Any,
    ) -> list[int]:
        """Encode a chat as ids, by default with an assistant's turn opened at the end.

        Arguments are those of `render`; `expand` is that of `encode_chat`.

        Raises:
            ValueError: as in `render_whole`; or there are images without `expand` (see `zoo.text.prompts`).
        """
        if expand is None:
            check_text(messages)
        text = self.render_whole(messages, tools, add_generation_prompt=add_generation_prompt, **extra)
        return self.encode_marked(expand(text, ())[0] if expand else text)[0]

    def encode_after(
        self, before: Sequence[int], messages: Messages, *, tools: Tools = None, **extra: Any
    ) -> list[int] | None:
        """Encode what a chat has after tokens with which it begins: those of its last prompt and of the reply to it.

        So tokens that were drawn stay, where encoding their text may give others. Returns None if the chat's text does
        not begin with theirs, as where the template leaves reasoning out of earlier turns, or does not go on from it.

        Raises:
            ValueError: as in `render_whole`.
        """
        text = self.render_whole(messages, tools, add_generation_prompt=True, **extra)
        shown, begun = text.replace(USERS, ""), self.decode(before, special=True)
        if not shown.startswith(begun):
            return None
        places = [*(n for n, character in enumerate(text) if character != USERS), len(text)]
        ids, _ = self.encode_marked(text[places[len(begun)] :])
        return ids if self.decode([*before, *ids], special=True) == shown else None

    def encode_all(self, messages: Messages, *, tools: Tools = None, expand: Expand | None = None) -> list[int]:
        """Encode a chat whose tokens are all to be learnt. Arguments and errors are those of `encode_chat`."""
        if expand is None:
            check_text(messages)
        variables = {"add_generation_prompt": False}
        text = self.render_marked(messages, tools, **variables)
        self._check_whole(text, messages, tools, variables, range(len(messages)))
        text = self._ended(text, messages[-1])
        return self.encode_marked(expand(text, ())[0] if expand else text)[0]

    def encode_chat(
        self, messages: Messages, *, tools: Tools = None, given: int = 0, expand: Expand | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Turn a chat into training examples: ids, and a mask that is 1 for tokens that the assistant must write.

        The mask covers the content of the assistant's turns, and the token that ends each turn, so that a model learns
        to stop. It leaves out the headers of turns, turns among the first `given` messages, and turns whose `weight`
        is 0.

        A template with {% generation %} marks the turns itself, and the chat is one example. With any other template,
        each turn is learnt as the template writes it at the end of a chat, since there the model has to write it. Turns
        that look the same inside the whole chat share one example. A turn that the template writes differently once
        messages follow, for example without its reasoning, gets an example that ends with it. If the template leaves
        out reasoning even at the end, as DeepSeek R1's does, the reasoning is written before the answer.

        `expand` inserts the texts that stand for images, of which the messages then have only `{"type": "image"}`. It
        takes a text that the template wrote, and spans of the text, and returns both with the images' texts.

        An answer at the end gets the token that the template writes between an answer and the next message, if that
        token ends generations: GLM-4.5's has no other end.

        Raises ValueError if the template does not write the messages before a turn and then the turn, if it leaves out
        a content, a call, the tools, or reasoning that is to be learnt, or if a message holds an image and nothing
        expands it.
        """
        if expand is None:
            check_text(messages)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= given]
        turns = [i for i in answers if messages[i].get("weight") != 0]
        variables = {"add_generation_prompt": False, "generation_open": OPEN, "generation_close": CLOSE}
        marked = self.render_marked(messages, tools, **variables)
        text = marked.replace(OPEN, "").replace(CLOSE, "")
        self._check_whole(marked, messages, tools, variables, turns if text != marked else ())
        text = self._ended(text, messages[-1])
        if OPEN in marked:
            skipped = [(0, given), *((i, i + 1) for i in answers if i not in turns)]
            examples = [(text, self._generated(marked, text, messages, skipped, tools))]
        else:
            examples = self._examples(text, messages, turns, tools)
        return [self._learnt(*(expand(*example) if expand else example)) for example in examples]

    def _generated(
        self, marked: str, text: str, messages: Messages, skipped: Spans, tools: Tools
    ) -> list[tuple[int, int]]:
        """Return the spans of {% generation %} blocks, without those in messages that are `skipped`, (first, end)."""
        edges = [[len(self._beginning(text, messages, number, tools)) for number in pair] for pair in skipped]
        return [span for span in _marked(marked) if not any(start <= span[0] < end for start, end in edges)]

    def _examples(
        self, text: str, messages: Messages, turns: Sequence[int], tools: Tools
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Find in a rendered chat what the assistant has to write in its `turns`; other texts for those it lacks."""
        examples = [(text, [])]
        for turn in reversed(turns):
            before, written = self._turn(messages, turn, tools)
            found = completeness.doubts([messages[turn]], written.replace(USERS, ""), (0,), self.names_role)
            doubtful = ((turn, field) for _, field in found)
            render = lambda changed, turn=turn: self._turn(changed, turn, tools)
            completeness.check_fields(doubtful, messages, (before, written), render, self._template_name)
            if not examples[-1][0].startswith(before + written):
                examples.append((self._ended(before + written, messages[turn]), []))
            examples[-1][1].append((len(before), len(before + written)))
        return [example for example in reversed(examples) if example[1]] or examples

    def _ended(self, text: str, message: Mapping[str, Any]) -> str:
        """Add to a chat that ends with an answer the token that ends it, if that is the next message's header."""
        return text + self._headers[bool(message.get("tool_calls"))] if message["role"] == "assistant" else text

    @functools.cached_property
    def _headers(self) -> tuple[str, str]:
        """The token after an answer, and that after a call.

        Each is "" unless it ends generations and the template writes no other end.
        """
        ask, answer = {"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Indeed."}
        function = {"name": "look", "arguments": {}}
        call = answer | {"tool_calls": [{"id": "abcdef123", "type": "function", "function": function}]}
        found = {"role": "tool", "tool_call_id": "abcdef123", "name": "look", "content": "Nothing."}
        ends = [token for id in self.eos if (token := self._tokenizer.id_to_token(id))]

        def header(said: dict[str, Any], following: dict[str, Any]) -> str:
            try:
                text, longer = self.render([ask, said]), self.render([ask, said, following])
            except ValueError:  # it may need a system message, or take no tools
                return ""
            if text.rstrip().endswith(tuple(ends)) or not longer.startswith(text):
                return ""
            return max((token for token in ends if longer.startswith(token, len(text))), key=len, default="")

        return header(answer, ask), header(call, found)

    def _learnt(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        ids, mask = self.encode_marked(text, spans)
        for i in range(1, len(ids)):  # the end token may be outside of the marks
            if mask[i - 1] and ids[i] in self.eos:
                mask[i] = 1
        return ids, mask

    def _beginning(self, text: str, messages: Messages, number: int, tools: Tools) -> str:
        """Render the first `number` messages, with which `text` must begin."""
        before = self.render_marked(messages[:number], tools, add_generation_prompt=False) if number else ""
        if not text.startswith(before):
            raise self._refusal(number)
        return before

    def _turn(self, messages: Messages, turn: int, tools: Tools) -> tuple[str, str]:
        """Render the chat before the assistant's message `turn`, and the text that the assistant has to write there."""
        before = self.render_marked(messages[:turn], tools, add_generation_prompt=True)
        text = self.render_marked(messages[: turn + 1], tools, add_generation_prompt=False)
        header = before.removesuffix("\n").removesuffix("<think>")  # R1's prompt ends with <think>
        opened = before[len(header) :]
        if not opened.strip():
            header, opened = before, ""
        unthinking = re.sub(r"<think>\s*</think>\s*$", "", before)
        if text.startswith(header):
            written = text[len(header) :]
        elif unthinking != before and text.startswith(unthinking):
            # The prompt of small Qwen3.5 says not to reason, unlike this answer: so the header alone is the prompt.
            before, written, opened = unthinking, text[len(unthinking) :], ""
        else:  # the turn before may be the assistant's too, and be written differently when it is not the last
            past = self.render_marked(messages[:turn], tools, add_generation_prompt=False)
            header = header.removeprefix(past)
            if not header or text.count(header) != past.count(header) + 1:
                raise self._refusal(turn)
            written = text.rpartition(header)[2]
        written = self._with_reasoning(written, opened, before, messages[turn])
        return before, written.rstrip()  # a line break after the end token belongs to no turn

    def _with_reasoning(self, written: str, opened: str, before: str, message: Mapping[str, Any]) -> str:
        """Return what the assistant has to write, with its reasoning if the template left that out.

        Args:
            written: what the template writes after the header of the assistant's turn.
            opened: what the prompt, `before`, ends with after the header, such as <think>.
        """
        if opened and written.startswith(opened):
            return written.removeprefix(opened)
        reasoning = reasoning_of(message)
        # DeepSeek V3.1's prompt ends with </think> when there is to be no reasoning.
        reasons = "</think>" in (self.chat_template or "") and not before.rstrip().endswith("</think>")
        if opened or (reasons and reasoning and reasoning not in written):
            opening = "" if opened else "<think>\n"
            answer = re.sub(r"^\n*(<think>\s*</think>\n*)?", "", written)
            return f"{opening}{reasoning}\n</think>\n\n{answer}"
        return written

    def _refusal(self, number: int) -> ValueError:
        return ValueError(
            f"{self._template_name} does not write the first {number} messages and then the next one, so "
            "what the assistant has to write there cannot be told apart. Mark it in the template with "
            "{% generation %}, split the chat after that message, or train on all of its tokens."
        )


class Stream:
    """A decoder of ids, one by one; see `Tokenizer.stream`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, before: Sequence[int], special: bool | Collection[str]):
        self._tokenizer, self._hidden = tokenizer, set()
        if special and not isinstance(special, bool):
            tokens = tokenizer.get_added_tokens_decoder().items()
            shown = lambda token: any(token.content in text for text in special)
            self._hidden = {id for id, token in tokens if token.special and not shown(token)}
        self._stream = decoders.DecodeStream(ids=list(before), skip_special_tokens=not special)

    def push(self, id: int) -> str:
        """Add an id, and return the text that it completes: empty while a character lacks some of its bytes."""
        return "" if id in self._hidden else self._stream.step(self._tokenizer, id) or ""


def _encoding(tokenizer: tokenizers.Tokenizer, text: str, special: bool) -> tokenizers.Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except TypeError as error:  # its text is only that a str is needed
        half = re.search("[\ud800-\udfff]", text)
        if half is None:
            raise
        raise ValueError(
            f"The text has half of a surrogate pair, {half[0]!r} at character {half.start()}, which is no "
            "character: whoever wrote the text cut an emoji or the like in two. Remove it."
        ) from error


def _mask(encoding: tokenizers.Encoding, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return a mask that is 1 for tokens at least partly within the spans, `(start, end)` in characters."""
    mask = [0] * len(encoding.ids)
    # Leave out tokens that the post-processor added. Each access to these properties makes a new list.
    tokens = zip(encoding.special_tokens_mask, encoding.offsets, strict=True)
    own = [(i, *offsets) for i, (added, offsets) in enumerate(tokens) if not added]
    for start, end in spans:
        # Mark all from the first to the last token, without testing each: byte-level tokenizers leave white space out
        # of offsets, so that a token of white space alone has an empty range, at its end.
        first = bisect.bisect_right(own, start, key=lambda token: token[2])
        last = bisect.bisect_left(own, end, key=lambda token: min(token[1], token[2] - 1))
        for i, *_ in own[first:last]:
            mask[i] = 1
    return mask


def _marked(text: str) -> list[tuple[int, int]]:
    """Return the spans between the marks of a text, in characters of the text without marks."""
    before, *rest = text.split(OPEN)
    spans, at = [], len(before)
    for piece in rest:
        inside, after = piece.split(CLOSE)
        spans.append((at, at + len(inside)))
        at += len(inside) + len(after)
    return spans


def source_of(folder: pathlib.Path) -> str:
    """Return the name of the file in a folder that has its tokens: tokenizer.json, or the first that is there."""
    names = ("tokenizer.json", tiktoken.NAME, tekken.NAME)
    return next((name for name in names if (folder / name).exists()), "tokenizer.json")


def _read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    file = folder / source_of(folder)
    if file.name == tiktoken.NAME:
        added = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        return tiktoken.read(file, {int(id): token["content"] for id, token in added.items()})
    if file.name == tekken.NAME:
        return tekken.read(file)
    if not file.exists():
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json, only {others[0]}. Convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            if others
            else f"{folder} has no tokenizer.json. Copy the one of the model's repository there."
        )
    regular(file)
    trial.check(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
    # Drop the limits that were set when the file was saved: callers handle lengths.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def chat_template_of(folder: pathlib.Path) -> str | None:
    """Read the chat template of a folder in Hub layout; None if it has none.

    Where the folder has none, but its model's makers publish code that writes chats, it is zoo's template of the same
    texts.
    """
    file = folder / TEMPLATE
    if file.exists():
        return file.read_text(encoding="utf-8")
    for name in "tokenizer_config.json", "chat_template.json":  # the second is of models that see
        template = _read_json(folder / name).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None:
            return template
    if (folder / tekken.NAME).exists():
        return tekken.template(folder / tekken.NAME)
    kind = _read_json(folder / "config.json").get("model_type")
    return DEEPSEEK[kind] + DEEPSEEK_TEMPLATE.read_text(encoding="utf-8") if kind in DEEPSEEK else None


def _write(path: pathlib.Path, text: str) -> None:
    """Replace a file atomically, so that no reader sees a part of it."""
    new = path.with_name(f"{path.name}.tmp")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is no file."""
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
