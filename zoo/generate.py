"""Text from a model: one prefill, one jitted decode loop, sampling.

The whole of a generation lives in `Generation`; `advance` is the one compiled loop, for a call that wants everything at
once and for a stream that looks after every token.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from zoo.gather import gathered
from zoo.tokenizer import Tokenizer


Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn from its logits. Filters apply in the order of the fields, as in transformers.

    `temperature` 0 takes the likeliest. `top_k` keeps the k likeliest; `top_p` the fewest whose probabilities add up to
    p; `min_p` those at least p times as probable as the likeliest.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        bounds = {"temperature": (0, np.inf), "top_k": (1, np.inf), "top_p": (0, 1), "min_p": (0, 1)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value} is not between {low} and {high}.")

    def __call__(self, logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"]) -> Int[Array, " batch"]:
        """One token a row, drawn with the row's own key."""
        logits = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
            before = jnp.cumsum(ordered, axis=-1) - ordered  # what the likelier ones add up to
            least = jnp.min(jnp.where(before < self.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
            least = jnp.minimum(least, ordered[:, :1])  # the likeliest always stays
            logits = jnp.where(jax.nn.softmax(logits, axis=-1) < least, -jnp.inf, logits)
        if self.min_p is not None:
            probability = jax.nn.softmax(logits, axis=-1)
            least = self.min_p * jnp.max(probability, axis=-1, keepdims=True)
            logits = jnp.where(probability < least, -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys, logits)


class Generation(eqx.Module):
    """A generation under way. Row r has written `length[r]` tokens of its `tokens[r]`, unless `done[r]` it goes on."""

    cache: Any
    logits: Float[Array, "batch vocab"]  # of each row's next token
    positions: Int[Array, " batch"]  # of each row's next token
    tokens: Int[Array, "batch new"]
    length: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    step: Int[Array, ""]
    keys: Key[Array, " batch"]  # one for each row, so that what is drawn does not depend on the rest of the batch


@eqx.filter_jit
def start(
    model: Any, prompts: Int[Array, "batch seq"], lengths: Int[Array, " batch"], new: int, key: PRNGKeyArray
) -> Generation:
    """Prefills right-padded prompts. The cache has a slot for every token of the longest prompt and `new` more.

    Padding has no position, so the cache does not keep it.
    """
    batch, seq = prompts.shape
    dtype = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))[0].dtype
    cache = model.init_cache(batch, seq + new, dtype)
    indices = jnp.broadcast_to(jnp.arange(seq), prompts.shape)
    x, cache = model.hidden(prompts, cache, positions=jnp.where(indices < lengths[:, None], indices, -1))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return Generation(
        cache=cache,
        logits=model.unembed(last)[:, 0],
        positions=lengths,
        tokens=jnp.zeros((batch, new), jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        step=jnp.array(0),
        keys=jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch)),
    )


@eqx.filter_jit(donate="all-except-first")
def advance(
    inputs: tuple[Any, Int[Array, " stops"]], generation: Generation, sampler: Sampler, until: Int[Array, ""]
) -> Generation:
    """Decodes up to step `until`, or until every row has drawn a stop token. `inputs`: the model, and those tokens."""
    model, stops = inputs

    def unfinished(g: Generation) -> Bool[Array, ""]:
        return (g.step < until) & ~jnp.all(g.done)

    def body(g: Generation) -> Generation:
        token = sampler(g.logits, jax.vmap(jax.random.fold_in, (0, None))(g.keys, g.step)).astype(jnp.int32)
        done = g.done | jnp.any(token[:, None] == stops[None], axis=-1)
        tokens = jax.lax.dynamic_update_slice(g.tokens, token[:, None], (0, g.step))
        logits, cache = model.decode(token[:, None], g.cache, positions=g.positions[:, None])
        length = g.length + (~done).astype(jnp.int32)
        return Generation(cache, logits[:, 0], g.positions + 1, tokens, length, done, g.step + 1, g.keys)

    return jax.lax.while_loop(unfinished, body, generation)


def begin(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Prompt], new: int, seed: int
) -> tuple[list[list[int]], Generation]:
    """The prompts' tokens, and the generation that they start."""
    if new < 1:
        raise ValueError(f"max_new_tokens={new} asks for nothing; it must be at least 1.")
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    limit = model.config.max_position_embeddings
    for n, row in enumerate(ids):
        if not row:
            raise ValueError(f"Prompt {n} has no tokens; there is nothing to continue.")
        if max(row) >= model.config.vocab_size:
            raise ValueError(
                f"Prompt {n} has token {max(row)}, but the model's vocabulary has {model.config.vocab_size}; is this "
                f"tokenizer ({tokenizer.folder}) the model's?"
            )
        if len(row) + new > limit:
            raise ValueError(
                f"Prompt {n} has {len(row)} tokens, which with max_new_tokens={new} exceeds the model's {limit} "
                "positions; shorten one of them."
            )
    lengths = np.array([len(row) for row in ids])
    padded = np.zeros((len(ids), lengths.max()), np.int32)
    for row, tokens in zip(padded, ids, strict=True):
        row[: len(tokens)] = tokens
    return ids, start(model, jnp.asarray(padded), jnp.asarray(lengths), new, jax.random.key(seed))


def generate(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """The continuation of each prompt, without the prompt and without what ended it.

    A prompt is a text, or token ids: those of a chat, whose template has written the special tokens itself, are
    `tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True), special=False)`.

    A continuation ends before the first of the tokenizer's end tokens or `stop` strings, or after `max_new_tokens`
    tokens. `temperature` 0 (greedy) is the default; see `Sampler` for the filters. The same `seed` gives the same text.
    If several processes hold parts of the model, all call this, and all get the texts.

    Raises:
        ValueError: for a prompt without tokens, or one too long for the model's positions.
    """
    if not prompts:
        return []
    sampler = Sampler(temperature, top_k, top_p, min_p)
    ids, generation = begin(model, tokenizer, prompts, max_new_tokens, seed)
    stride = 16 if stop else max_new_tokens  # stop strings are looked for between strides
    texts = [""] * len(ids)
    for until in range(stride, max_new_tokens + stride, stride):
        generation = advance(
            (model, jnp.array(tokenizer.eos, jnp.int32)), generation, sampler, jnp.array(min(until, max_new_tokens))
        )
        tokens, lengths = gathered(generation.tokens), gathered(generation.length)
        texts = [
            continuation(tokenizer, row, new[:n].tolist()) for row, new, n in zip(ids, tokens, lengths, strict=True)
        ]
        if stop:
            stopped = [first(text, stop) for text in texts]
            texts = [text[:at] for text, at in zip(texts, stopped, strict=True)]
            done = generation.done | jnp.array([at is not None for at in stopped])
            generation = eqx.tree_at(lambda g: g.done, generation, done)
        if bool(jnp.all(generation.done)):
            break
    return texts


def stream(
    model: Any,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """The same continuation as `generate`'s for one prompt, in pieces as they come; joined, they are its text.

    A piece is held back while it may still turn into a stop string, or while its last character is incomplete.
    """
    sampler = Sampler(temperature, top_k, top_p, min_p)
    (ids,), generation = begin(model, tokenizer, [prompt], max_new_tokens, seed)
    decoder, text, shown = tokenizer.stream(before=ids), "", 0
    for until in range(1, max_new_tokens + 1):
        generation = advance((model, jnp.array(tokenizer.eos, jnp.int32)), generation, sampler, jnp.array(until))
        ended = bool(generation.done[0])
        if not ended:
            text += decoder.push(int(generation.tokens[0, until - 1]))
        if (at := first(text, stop)) is not None:
            text, ended = text[:at], True
        held = 0 if ended else max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        if len(text) - held > shown:
            yield text[shown : len(text) - held]
            shown = len(text) - held
        if ended:
            return
    if shown < len(text):
        yield text[shown:]


def first(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings starts."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text that `new` adds to the prompt: decoded with it, since a tokenizer may join tokens with a space."""
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]
