"""Chats in the terminal, by the model's own chat template: `python -m zoo chat SOURCE`."""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import rich.console
import rich.markup
import tyro
from jax.sharding import Mesh

import zoo
from zoo.generation.engine import Completion, Engine
from zoo.generation.generate import Encoded, encode, pieces, without_text
from zoo.generation.images import part_of_images
from zoo.generation.sampling import Sampling
from zoo.generation.shapes import bucket
from zoo.generation.speculative import AbstractDraft, ModelDraft, MTPDraft, NGramDraft
from zoo.nn.model import AbstractModel, require_vision
from zoo.source import Source
from zoo.text.messages import has_images
from zoo.text.tokenizer import Tokenizer
from zoo.vision.open import open_image


with contextlib.suppress(ImportError):  # not on Windows
    import readline  # noqa: F401 (gives `input` its arrow keys and history)

Message = dict[str, Any]

HELP = "/reset starts anew, /image PATH shows an image, /exit or Ctrl-D leaves, Ctrl-C stops a reply."
REPLIES = Sampling(max_new_tokens=1024, temperature=0.7)
ROOM = 4096  # least tokens for which there is memory, if the model has so many positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for loading a model with its adapter, its draft and its tokenizer."""

    adapter: pathlib.Path | None = None
    """Folder with an adapter of the model, in PEFT's layout."""
    quantize: Literal["int8", "fp8", "nf4", "stored"] | None = None
    """Hold the layers' weights in 8 or 4 bits; stored: as the checkpoint has them (docs/weights.md)."""
    dtype: str | None = "auto"
    """Data type of the weights: float32, bfloat16 or float16. None: the checkpoint's. auto: the checkpoint's, but on a
    CPU with memory for it float32 in place of 16 bits, which is several times as fast."""
    images: bool = False
    """Load the model's vision tower too, so that messages may hold images: by /image PATH in a chat, as data: URLs in
    a request."""
    draft: str | None = None
    """A smaller model of the same vocabulary, which proposes tokens for the model to check; mtp for the model's own
    module for multi-token prediction; ngram for what followed the same tokens earlier in the text."""
    num_draft_tokens: int = 4
    """Number of tokens that the draft proposes at a time."""
    special_in_content: bool = False
    """Encode <|im_end|> and the like in messages of users and tools as control tokens, not as text, as transformers
    does."""

    ignore_keys: tuple[str, ...] = ()
    """Keys of config.json to skip where they would be refused: keys that you know not to change the model, such as
    vision_config.key of an object (docs/config.md)."""

    def open(self, source: str) -> Source:
        """Opens a zoo name, a Hub repository or a folder.

        Raises:
            OSError, ValueError: as in `Source.open`.
        """
        return Source.open(source, ignore=self.ignore_keys)

    def tokenizer(self, source: Source) -> Tokenizer:
        """Loads a model's tokenizer, with the chat template of the adapter if it has one."""
        template = zoo.peft.template_of(self.adapter)
        return zoo.tokenizer(source, chat_template=template, special_in_content=self.special_in_content)

    def model(self, source: Source, mesh: Mesh | None = None) -> tuple[AbstractModel, AbstractDraft | None]:
        """Loads a model with its adapter, and its draft, which gets the same dtype, quantisation and mesh.

        Raises:
            ValueError: both images and a draft are asked for.
        """
        if self.images and self.draft:
            raise ValueError("A draft takes no images: use --images or --draft.")
        wanted = {"vision": self.images, "mtp": self.draft == "mtp"}
        parts = [part for part, wanted in wanted.items() if wanted]
        options: dict[str, Any] = {"dtype": self.dtype, "quantize": self.quantize, "mesh": mesh}
        model = zoo.load(source, parts=parts, **options)
        if self.adapter:
            model = zoo.peft.load(model, self.adapter)
            for warning in zoo.peft.warnings_of(self.adapter, quantize=self.quantize):
                print(warning)
        if self.draft is None:
            return model, None
        if self.draft == "mtp":
            return model, MTPDraft(model, self.num_draft_tokens)
        if self.draft == "ngram":
            return model, NGramDraft(self.num_draft_tokens)
        return model, ModelDraft(zoo.load(self.open(self.draft), **options), self.num_draft_tokens)


def chat(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = REPLIES,
    load: tyro.conf.OmitArgPrefixes[LoadOptions] = LoadOptions(),
    system: str | None = None,
) -> None:
    """Talks with a model in the terminal.

    /reset starts anew, /image PATH shows an image, /exit or Ctrl-D leaves, Ctrl-C stops a reply.

    Once the conversation fills the model's positions, its oldest turns are dropped.

    Args:
        source: a zoo name, a Hub repository org/name, a folder, or a GGUF file.
        system: system message before the conversation, if the model's template has a place for it.
    """
    console, name = rich.console.Console(highlight=False), rich.markup.escape(source)
    opened = load.open(source)
    tokenizer = load.tokenizer(opened)
    opening = [] if system is None else [{"role": "system", "content": system}]
    # A template that cannot be used is refused here, before a long load.
    tokenizer.render_whole([*opening, {"role": "user", "content": "?"}])
    with console.status(f"loading {name}"):
        model, draft = load.model(opened)
    conversation = Conversation(model, tokenizer, draft, sampling, opening, console)
    console.print(f"[bold]{name}[/], {conversation.limit:,} positions. [dim]{HELP}[/]")

    for number in itertools.count():
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            console.print(f"\n[dim]{HELP}[/]")
            continue
        except EOFError:
            console.print()
            return
        if text == "/exit":
            return
        command, _, argument = text.partition(" ")
        if run := COMMANDS.get(f"{command} PATH" if argument else command):
            run(conversation, argument.strip())
        elif text.startswith("/"):
            console.print(f"[dim]{rich.markup.escape(text)} is no command. {HELP}[/]")
        elif text:
            conversation.say(text, seed=sampling.seed + number)


@dataclasses.dataclass
class Conversation:
    """A conversation with a model. It is printed as it goes on.

    The engine keeps the last reply with all that is before it, so that a turn reads only what is new. Where the text
    does not go on from there, as where the template leaves reasoning out of earlier turns, it is read anew.
    """

    model: AbstractModel
    tokenizer: Tokenizer
    draft: AbstractDraft | None
    sampling: Sampling
    opening: list[Message]
    console: rich.console.Console
    turns: list[Message] = dataclasses.field(default_factory=list)
    pictures: list[dict[str, str]] = dataclasses.field(default_factory=list)  # of the next message
    engine: Engine | None = None
    last: Completion | None = None  # the last reply; None if the engine has none

    @property
    def limit(self) -> int:
        """Returns the number of the model's positions."""
        return self.model.config.max_position_embeddings

    def reset(self, _: str) -> None:
        """Starts anew."""
        self.turns, self.pictures, self.last = [], [], None
        self.console.print("[dim]The conversation starts anew.[/]")

    def add_image(self, path: str) -> None:
        """Adds an image to the next message, unless the model takes none or the file cannot be read."""
        try:
            require_vision(self.model)
            open_image(path)
        except ValueError as error:
            self.console.print(f"[red]{rich.markup.escape(str(error))}[/]")
        else:
            self.pictures.append({"type": "image", "path": path})
            self.console.print(f"[dim]{rich.markup.escape(path)} goes with your next message.[/]")

    def say(self, text: str, *, seed: int) -> None:
        """Adds a message of the user and the model's reply, unless the message alone is too long."""
        content = [*self.pictures, {"type": "text", "text": text}] if self.pictures else text
        self.turns.append({"role": "user", "content": content})
        self.pictures = []
        prompt = self._fit()
        if prompt is None:
            self.turns.pop()
            limit = f"{self.limit:,}"
            self.console.print(f"[red]That does not fit into the model's {limit} positions; say it more shortly.[/]")
            return
        self.turns.append({"role": "assistant", "content": self._reply(prompt, seed)})

    def _fit(self) -> Encoded | None:
        """Drops the oldest turns until there is room for a reply, and returns the rest encoded.

        The rest starts with a turn of the user. Returns None, and drops nothing, if the last turn alone is too long.
        """
        room = min(self.sampling.max_new_tokens, self.limit // 2)
        for first, turn in enumerate(self.turns):
            if turn["role"] == "user":
                prompt = self._encode([*self.opening, *self.turns[first:]])
                if len(prompt.ids) + room <= self.limit:
                    if first:
                        self.turns = self.turns[first:]
                        dropped = f"its oldest {first} messages are dropped"
                        self.console.print(f"[dim]The conversation got too long; {dropped}.[/]")
                    return prompt
        return None

    def _encode(self, messages: list[Message]) -> Encoded:
        """Encodes messages. Where they go on from the last reply, its tokens stay as they were drawn."""
        if self.last is not None and not has_images(messages):
            before = self.last.prompt + self.last.tokens
            if (more := self.tokenizer.encode_after(before, messages)) is not None:
                return Encoded([*before, *more])
        return encode(self.model, self.tokenizer, messages)

    def _reply(self, prompt: Encoded, seed: int) -> str:
        """Prints the model's reply, with its reasoning dimmed, until Ctrl-C. Returns the reply without reasoning."""
        reply, reasoned, reader = "", False, self.tokenizer.reader(prompt.ids)
        try:
            for piece in reader.split(self._stream(prompt, seed)):
                self.console.out(piece.reasoning, end="", style="dim", highlight=False)
                if piece.answer and reasoned and not reply:
                    self.console.print("\n")
                self.console.out(piece.answer, end="", style="cyan", highlight=False)
                reply, reasoned = reply + piece.answer, reasoned or bool(piece.reasoning)
            self.console.print()
        except KeyboardInterrupt:
            self.engine = self.last = None  # it may have been in the middle of a step
            self.console.print(" [dim](stopped)[/]")
        return reply

    def _stream(self, prompt: Encoded, seed: int) -> Iterator[str]:
        """Yields the reply to a prompt, of which the engine reads what it has not read yet."""
        ids, new = prompt.ids, min(self.sampling.max_new_tokens, self.limit - len(prompt.ids))
        if self.engine is None or self.engine.max_tokens < len(ids) + new:
            room = min(self.limit, bucket(len(ids) + new, ROOM))
            self.last, self.engine = None, Engine(
                self.model, batch=1, max_tokens=room, cache_tokens=room, stops=self.tokenizer.eos, stride=1,
                draft=self.draft, prefixes=True,
            )  # fmt: skip
        before, last = [] if self.last is None else self.last.prompt + self.last.tokens, self.last
        if ids[: len(before)] != before:
            before, last = [], None
        key = jax.random.fold_in(jax.random.key(seed), 0)
        sampling = dataclasses.replace(without_text(self.sampling, self.tokenizer), max_new_tokens=new)
        (reply,) = self.engine.submit(
            ids[len(before) :], sampling, key=key, after=last, keep=True,
            images=part_of_images(prompt.images, len(before), len(ids)),
        )  # fmt: skip
        decoder = self.tokenizer.stream(ids, special=self.tokenizer.delimiters())
        yield from pieces(self.engine, reply, decoder, self.sampling.stop)
        if self.last is not None:
            self.engine.free(self.last)
        self.last = reply


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "/reset": Conversation.reset,
    "/image PATH": Conversation.add_image,
}
