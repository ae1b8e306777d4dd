"""Chats in the terminal, by the model's own chat template: `python -m zoo chat SOURCE`."""

import contextlib
import itertools
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import rich.console
import rich.markup
import tyro

import zoo
from zoo.generation.generate import Encoded, encode
from zoo.generation.speculative import AbstractDraft, ModelDraft, MTPDraft
from zoo.nn.model import AbstractModel, seeing
from zoo.text.harmony import Parts
from zoo.text.tokenizer import Tokenizer
from zoo.vision.open import open_image


with contextlib.suppress(ImportError):  # not on Windows
    import readline  # noqa: F401 (gives `input` its arrow keys and history)

Message = dict[str, Any]

COMMANDS = "/reset starts anew, /image PATH shows an image, /exit or Ctrl-D leaves, Ctrl-C stops a reply."


def chat(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    adapter: pathlib.Path | None = None,
    system: str | None = None,
    max_new_tokens: int = 1024,
    temperature: float = 0.7,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    quantize: Literal["int8", "fp8", "nf4"] | None = None,
    dtype: str | None = None,
    images: bool = False,
    draft: str | None = None,
    num_draft_tokens: int = 4,
    special_in_content: bool = False,
) -> None:
    """Talks with a model in the terminal.

    /reset starts anew, /image PATH shows an image, /exit or Ctrl-D leaves, Ctrl-C stops a reply.

    Once the conversation fills the model's positions, its oldest turns are dropped.

    Args:
        source: a zoo name, a Hub repository org/name, or a folder.
        adapter: a folder with an adapter of the model, in PEFT's layout.
        system: system message before the conversation, if the model's template has a place for it.
        max_new_tokens: largest number of tokens of a reply.
        temperature: 0 takes the likeliest token; higher values make replies more varied.
        top_p: draw only from the fewest tokens whose probabilities add up to top_p, from 0 to 1.
        repetition_penalty: divides the positive logits of tokens that the chat already has, and multiplies the negative
            ones; 1 is off, None takes the value in the checkpoint's generation_config.json.
        presence_penalty: subtracted from the logit of each token that the reply has; from -2 to 2.
        frequency_penalty: subtracted from a token's logit once for each time that the reply has it; from -2 to 2.
        seed: random seed of sampling. With the same seed, the same inputs get the same replies.
        quantize: hold the layers' weights in 8 or 4 bits.
        dtype: data type of the weights: float32, bfloat16 or float16. None: the checkpoint's.
        images: load the model's vision tower too, so that /image PATH shows it an image with your next message.
        draft: a smaller model of the same vocabulary, which proposes tokens for the model to check; mtp for the model's
            own module for multi-token prediction.
        num_draft_tokens: number of tokens that the draft proposes at a time.
        special_in_content: encode <|im_end|> and the like in your messages as control tokens, not as text, as
            transformers does.
    """
    console = rich.console.Console(highlight=False)
    tokenizer = zoo.tokenizer(
        source, chat_template=zoo.peft.template_of(adapter), special_in_content=special_in_content
    )
    opening = [] if system is None else [{"role": "system", "content": system}]
    # A template that cannot be used is refused here, before a long load.
    tokenizer.render_whole([*opening, {"role": "user", "content": "?"}])
    with console.status(f"loading {rich.markup.escape(source)}"):
        model, drafting = load(source, adapter, draft, num_draft_tokens, images, dtype=dtype, quantize=quantize)
    limit = model.config.max_position_embeddings
    console.print(f"[bold]{rich.markup.escape(source)}[/], {limit:,} positions. [dim]{COMMANDS}[/]")

    turns: list[Message] = []
    pictures: list[dict[str, str]] = []  # images of the next message
    for number in itertools.count():
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            console.print(f"\n[dim]{COMMANDS}[/]")
            continue
        except EOFError:
            console.print()
            return
        if text == "/exit":
            return
        if text == "/reset":
            turns, pictures = [], []
            console.print("[dim]The conversation starts anew.[/]")
        elif text.startswith("/image "):
            path = text.removeprefix("/image ").strip()
            try:
                seeing(model)
                open_image(path)
            except ValueError as error:
                console.print(f"[red]{rich.markup.escape(str(error))}[/]")
            else:
                pictures.append({"type": "image", "path": path})
                console.print(f"[dim]{rich.markup.escape(path)} goes with your next message.[/]")
        elif text.startswith("/"):
            console.print(f"[dim]{rich.markup.escape(text)} is no command. {COMMANDS}[/]")
        elif text:
            content = [*pictures, {"type": "text", "text": text}] if pictures else text
            turns.append({"role": "user", "content": content})
            pictures = []
            dropped, prompt = fit(model, tokenizer, opening, turns, limit, min(max_new_tokens, limit // 2))
            if dropped == len(turns):
                turns.pop()
                console.print(f"[red]That does not fit into the model's {limit:,} positions; say it more shortly.[/]")
                continue
            if dropped:
                turns = turns[dropped:]
                console.print(f"[dim]The conversation got too long; its oldest {dropped} messages are dropped.[/]")
            reply, reasoned, parts = "", False, Parts(tokenizer.channels)
            try:
                for piece in zoo.stream(
                    model,
                    tokenizer,
                    prompt,
                    max_new_tokens=min(max_new_tokens, limit - len(prompt.ids)),
                    temperature=temperature,
                    top_p=top_p,
                    repetition_penalty=repetition_penalty,
                    presence_penalty=presence_penalty,
                    frequency_penalty=frequency_penalty,
                    seed=seed + number,
                    special=tokenizer.channels,
                    draft=drafting,
                ):
                    reasoning, answer = parts.push(piece)
                    console.out(reasoning, end="", style="dim", highlight=False)
                    if answer and reasoned and not reply:
                        console.print("\n")
                    console.out(answer, end="", style="cyan", highlight=False)
                    reply, reasoned = reply + answer, reasoned or bool(reasoning)
                console.print()
            except KeyboardInterrupt:
                console.print(" [dim](stopped)[/]")
            turns.append({"role": "assistant", "content": reply})


def load(
    source: str,
    adapter: pathlib.Path | None,
    draft: str | None,
    num_draft_tokens: int,
    images: bool,
    **options: Any,
) -> tuple[AbstractModel, AbstractDraft | None]:
    """Loads a model with its adapter, and its draft: "mtp" or a model's name, loaded with the same options.

    Raises:
        ValueError: both images and a draft are asked for.
    """
    if images and draft:
        raise ValueError("A draft takes no images: use --images or --draft.")
    parts = {"vision": images, "mtp": draft == "mtp"}
    model = zoo.load(source, parts=[part for part, wanted in parts.items() if wanted], **options)
    if adapter:
        model = zoo.peft.load(model, adapter)
        for warning in zoo.peft.warnings_of(adapter, quantize=options["quantize"]):
            print(warning)
    if draft is None:
        return model, None
    if draft == "mtp":
        return model, MTPDraft(model, num_draft_tokens)
    return model, ModelDraft(zoo.load(draft, **options), num_draft_tokens)


def fit(
    model: AbstractModel,
    tokenizer: Tokenizer,
    opening: Sequence[Message],
    turns: Sequence[Message],
    limit: int,
    room: int,
) -> tuple[int, Encoded]:
    """Drops the oldest turns until `room` of `limit` positions are free. Returns their number, and the rest encoded.

    The rest starts with a turn of the user. All turns are dropped if the last one alone is too long.
    """
    for first, turn in enumerate(turns):
        if turn["role"] == "user":
            prompt = encode(model, tokenizer, [*opening, *turns[first:]])
            if len(prompt.ids) + room <= limit:
                return first, prompt
    return len(turns), Encoded([])
