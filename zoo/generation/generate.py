"""Generates text, all at once or as a stream. The `Engine` below works on tokens only."""

import dataclasses
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack, overload

import jax
from jax.typing import DTypeLike

from zoo.generation.engine import Completion, Engine, check
from zoo.generation.sampling import Sampling, SamplingOptions
from zoo.generation.shapes import rounded
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel, Images
from zoo.text.messages import Messages, has_images
from zoo.text.prompts import encode_prompt
from zoo.text.tokenizer import Stream, Tokenizer


class Encoded(NamedTuple):
    """An encoded prompt, as `encode` returns it. Given to `encode` again, it is returned unchanged."""

    ids: list[int]
    images: Images | None = None


Prompt = str | Sequence[int] | Messages | Encoded


@overload
def generate(
    model: AbstractModel,
    tokenizer: Tokenizer,
    prompts: Prompt,
    sampling: Sampling = ...,
    *,
    batch: int = ...,
    cache_dtype: DTypeLike | None = ...,
    draft: AbstractDraft | None = ...,
    **options: Unpack[SamplingOptions],
) -> str: ...


@overload
def generate(
    model: AbstractModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling = ...,
    *,
    batch: int = ...,
    cache_dtype: DTypeLike | None = ...,
    draft: AbstractDraft | None = ...,
    **options: Unpack[SamplingOptions],
) -> list[str]: ...


def generate(
    model: AbstractModel,
    tokenizer: Tokenizer,
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling = Sampling(),  # noqa: B008 (a value)
    *,
    batch: int = 64,
    cache_dtype: DTypeLike | None = None,
    draft: AbstractDraft | None = None,
    **options: Unpack[SamplingOptions],
) -> str | list[str]:
    """Continues each prompt, and returns only the new text: one text for one prompt, a list for several.

    A prompt is a text; or messages, `[{"role": "user", "content": "Hello"}]`, which the tokenizer's chat template turns
    into text and to which the assistant replies; or token ids. Messages may hold images, if the model takes them
    (docs/vision.md).

    Fields of `Sampling` may be given by keyword: `generate(model, tokenizer, "Hi", temperature=0.7)`. They take the
    place of those of `sampling`. A continuation ends before the first end token of the tokenizer, before the first of
    the `stop` strings, or after `max_new_tokens` tokens. Greedy text is the default.

    Up to `batch` prompts are continued at once. `cache_dtype` "int8" keeps the cache in 8 bits. A `draft` proposes
    tokens for the model to check (docs/generation.md). If several processes hold parts of the model, all must call
    this, and all get the texts.

    Raises:
        TypeError: a keyword is no field of `Sampling`.
        ValueError: a field of `Sampling` is out of its range; a prompt has no tokens, has tokens that the model does
            not have, or is too long for the model; messages are given and there is no template; or the draft has
            another vocabulary.
    """
    sampling = sampling.changed(options)
    of_tokens = without_text(sampling, tokenizer)
    one = is_one(prompts)
    encoded = [encode(model, tokenizer, prompt) for prompt in ([prompts] if one else prompts)]
    ids = [row for row, _ in encoded]
    if not ids:
        return []
    for n, row in enumerate(ids):
        check(model, row, sampling.max_new_tokens, f"Prompt {n}")
    longest = max(map(len, ids)) + sampling.max_new_tokens
    engine = Engine(
        model,
        batch=rounded(len(ids), batch),
        max_tokens=rounded(longest, model.config.max_position_embeddings),
        stops=tokenizer.eos,
        cache_dtype=cache_dtype,
        draft=draft,
    )
    key = jax.random.key(sampling.seed)
    numbers: dict[Completion, int] = {}
    for n, (row, images) in enumerate(encoded):
        own = jax.random.fold_in(key, n)
        (completion,) = engine.submit(row, of_tokens, key=own, images=images)
        numbers[completion] = n
    texts = [""] * len(ids)
    while not engine.idle:
        for completion in engine.step():
            n = numbers[completion]
            if sampling.stop or completion.finished:
                text = continuation(tokenizer, ids[n], completion)
                at = first(text, sampling.stop)
                texts[n] = text[:at]
                if at is not None:
                    engine.cancel(completion)
    return texts[0] if one else texts


def stream(
    model: AbstractModel,
    tokenizer: Tokenizer,
    prompt: Prompt,
    sampling: Sampling = Sampling(),  # noqa: B008 (a value)
    *,
    special: bool | Collection[str] = False,
    cache_dtype: DTypeLike | None = None,
    draft: AbstractDraft | None = None,
    **options: Unpack[SamplingOptions],
) -> Iterator[str]:
    """Continues one prompt as `generate` does, and yields the text in pieces as they are decoded.

    Text is held back while it may be the beginning of a stop string, or while its last character is incomplete. With
    `special` the text includes special tokens (`Tokenizer.stream`), except the one that ends it.
    """
    sampling = sampling.changed(options)
    ids, images = encode(model, tokenizer, prompt)
    check(model, ids, sampling.max_new_tokens)
    room = rounded(len(ids) + sampling.max_new_tokens, model.config.max_position_embeddings)
    engine = Engine(
        model, batch=1, max_tokens=room, stops=tokenizer.eos, stride=1, cache_dtype=cache_dtype, draft=draft
    )
    key = jax.random.fold_in(jax.random.key(sampling.seed), 0)
    (completion,) = engine.submit(ids, without_text(sampling, tokenizer), key=key, images=images)
    return pieces(engine, completion, tokenizer.stream(ids, special=special), sampling.stop)


def pieces(engine: Engine, completion: Completion, decoder: Stream, stop: Sequence[str]) -> Iterator[str]:
    """Yields the text of an engine's only completion, as it is decoded, and ends it at a stop string."""
    text, shown = "", 0
    while not engine.idle:
        (new,) = engine.step().values()
        ended = completion.ended
        text += "".join(map(decoder.push, new[:-1] if ended else new))
        if (at := first(text, stop)) is not None:
            text, ended = text[:at], True
            engine.cancel(completion)
        held = 0 if ended else partial_stop_length(text, stop)
        if len(text) - held > shown:
            yield text[shown : len(text) - held]
            shown = len(text) - held
        if ended:
            return
    if shown < len(text):
        yield text[shown:]


def without_text(sampling: Sampling, tokenizer: Tokenizer) -> Sampling:
    """Returns the options for an engine, which has no tokenizer.

    They have no stop strings, and the checkpoint's repetition penalty if none was given.
    """
    given = sampling.repetition_penalty
    return dataclasses.replace(
        sampling, stop=(), repetition_penalty=tokenizer.repetition_penalty if given is None else given
    )


def is_one(prompts: Any) -> bool:
    """Whether this is one prompt (a text, messages or token ids), and not a sequence of prompts."""
    item = None if isinstance(prompts, str | Mapping | Encoded) else next(iter(prompts), ())
    return item is None or isinstance(item, Mapping | int) or getattr(item, "ndim", None) == 0


def encode(model: AbstractModel, tokenizer: Tokenizer, prompt: Any) -> Encoded:
    """Returns the token ids of a prompt, and its images, if messages hold some.

    A prompt is a text, messages that the assistant replies to, or token ids.

    Raises:
        ValueError: the prompt is none of these; there is no chat template for messages; or there are images, and the
            model takes none or one cannot be read.
    """
    if isinstance(prompt, Encoded):
        return prompt
    if isinstance(prompt, str):
        return Encoded(tokenizer.encode(prompt))
    try:
        if len(prompt) and isinstance(prompt[0], Mapping):
            if has_images(prompt):
                return Encoded(*encode_prompt(model, tokenizer, prompt))
            return Encoded(tokenizer.encode_prompt(prompt))
        return Encoded([operator.index(id) for id in prompt])
    except (TypeError, KeyError) as error:
        raise ValueError(f"{prompt!r:.80} is no prompt: give a text, a list of messages or token ids.") from error


def first(text: str, stop: Sequence[str]) -> int | None:
    """Returns the index at which the first stop string of a text starts; None if there is none."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def partial_stop_length(text: str, stop: Sequence[str]) -> int:
    """Counts the characters at the end of a text that may be the beginning of a stop string."""
    lengths = ((s, n) for s in stop for n in range(1, min(len(s), len(text) + 1)))
    return max((n for s, n in lengths if text.endswith(s[:n])), default=0)


def continuation(tokenizer: Tokenizer, prompt: list[int], completion: Completion) -> str:
    """Decodes the text after the prompt, together with the prompt, because a tokenizer may put a space between them."""
    new = completion.tokens[:-1] if completion.ended else completion.tokens
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]
