"""Generates text, all at once or as a stream. The `Engine` below works on tokens only."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
from jax.typing import DTypeLike

from zoo.generation.engine import Completion, Engine, bucket, check
from zoo.generation.sampling import Sampler
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel, Images
from zoo.text.prompts import encode_prompt
from zoo.text.tokenizer import Messages, Tokenizer, has_images


class Encoded(NamedTuple):
    """An encoded prompt, as `encode` returns it. Given to `encode` again, it is returned unchanged."""

    ids: list[int]
    images: Images | None = None


Prompt = str | Sequence[int] | Messages | Encoded


@overload
def generate(model: AbstractModel, tokenizer: Tokenizer, prompts: Prompt, **options: Any) -> str: ...


@overload
def generate(model: AbstractModel, tokenizer: Tokenizer, prompts: Sequence[Prompt], **options: Any) -> list[str]: ...


def generate(  # pyright: ignore[reportInconsistentOverload] (options are documented once)
    model: AbstractModel,
    tokenizer: Tokenizer,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    batch: int = 64,
    cache_dtype: DTypeLike | None = None,
    draft: AbstractDraft | None = None,
) -> str | list[str]:
    """Continues each prompt, and returns only the new text: one text for one prompt, a list for several.

    A prompt is a text; or messages, `[{"role": "user", "content": "Hello"}]`, which the tokenizer's chat template turns
    into text and to which the assistant replies; or token ids. Messages may hold images, if the model takes them
    (docs/vision.md).

    A continuation ends before the first end token of the tokenizer, before the first of the `stop` strings, or after
    `max_new_tokens` tokens. `temperature` 0 (greedy) is the default; see `Sampler` for filters and penalties. As in
    transformers, generation_config.json's `repetition_penalty` holds unless another is given. The same `seed` gives the
    same text. Up to `batch` prompts are continued at once. `cache_dtype` "int8" keeps the cache in 8 bits. A `draft`
    proposes tokens for the model to check (docs/generation.md). If several processes hold parts of the model, all must
    call this, and all get the texts.

    Raises:
        ValueError: a prompt has no tokens, has tokens that the model does not have, or is too long for the model;
            messages are given and there is no template; or the draft has another vocabulary.
    """
    one = is_one(prompts)
    encoded = [encode(model, tokenizer, prompt) for prompt in ([prompts] if one else prompts)]
    ids = [row for row, _ in encoded]
    if not ids:
        return []
    for n, row in enumerate(ids):
        check(model, row, max_new_tokens, f"Prompt {n}")
    engine = Engine(
        model,
        batch=min(batch, len(ids)),
        max_tokens=bucket(max(map(len, ids))) + max_new_tokens,
        stops=tokenizer.eos,
        cache_dtype=cache_dtype,
        draft=draft,
    )
    repetition = tokenizer.repetition_penalty if repetition_penalty is None else repetition_penalty
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition, presence_penalty, frequency_penalty)
    key = jax.random.key(seed)
    numbers: dict[Completion, int] = {}
    for n, (row, images) in enumerate(encoded):
        own = jax.random.fold_in(key, n)
        (completion,) = engine.submit(row, max_new_tokens=max_new_tokens, sampler=sampler, key=own, images=images)
        numbers[completion] = n
    texts = [""] * len(ids)
    while not engine.idle:
        for completion in engine.step():
            n = numbers[completion]
            if stop or completion.finished:
                text = continuation(tokenizer, ids[n], completion)
                at = first(text, stop)
                texts[n] = text[:at]
                if at is not None:
                    engine.cancel(completion)
    return texts[0] if one else texts


def stream(
    model: AbstractModel,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    special: bool = False,
    cache_dtype: DTypeLike | None = None,
    draft: AbstractDraft | None = None,
) -> Iterator[str]:
    """Continues one prompt as `generate` does, and yields the text in pieces as they are decoded.

    Text is held back while it may be the beginning of a stop string, or while its last character is incomplete. With
    `special` the text includes special tokens, except the one that ends it.
    """
    ids, images = encode(model, tokenizer, prompt)
    check(model, ids, max_new_tokens)
    room = bucket(len(ids)) + max_new_tokens
    engine = Engine(
        model, batch=1, max_tokens=room, stops=tokenizer.eos, stride=1, cache_dtype=cache_dtype, draft=draft
    )
    repetition = tokenizer.repetition_penalty if repetition_penalty is None else repetition_penalty
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition, presence_penalty, frequency_penalty)
    key = jax.random.fold_in(jax.random.key(seed), 0)
    (completion,) = engine.submit(ids, max_new_tokens=max_new_tokens, sampler=sampler, key=key, images=images)
    decoder, text, shown = tokenizer.stream(ids, special=special), "", 0
    while not engine.idle:
        (new,) = engine.step().values()
        ended = completion.ended
        text += "".join(map(decoder.push, new[:-1] if ended else new))
        if (at := first(text, stop)) is not None:
            text, ended = text[:at], True
        held = 0 if ended else begun(text, stop)
        if len(text) - held > shown:
            yield text[shown : len(text) - held]
            shown = len(text) - held
        if ended:
            return
    if shown < len(text):
        yield text[shown:]


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


def begun(text: str, stop: Sequence[str]) -> int:
    """Counts the characters at the end of a text that may be the beginning of a stop string."""
    lengths = ((s, n) for s in stop for n in range(1, min(len(s), len(text) + 1)))
    return max((n for s, n in lengths if text.endswith(s[:n])), default=0)


def continuation(tokenizer: Tokenizer, prompt: list[int], completion: Completion) -> str:
    """Decodes the text after the prompt, together with the prompt, because a tokenizer may put a space between them."""
    new = completion.tokens[:-1] if completion.ended else completion.tokens
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]
