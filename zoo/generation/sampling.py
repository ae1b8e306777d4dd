"""Draws tokens from logits. Each row of a batch has its own settings, which are arrays: one program serves all."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from zoo.nn.rows import HostArray


class Settings(eqx.Module):
    """The fields of `Sampling` that choose a token, as arrays with a number for each row.

    Filters that are off have values that keep every token.
    """

    temperature: Float[HostArray, " batch"]
    top_k: Int[HostArray, " batch"]
    top_p: Float[HostArray, " batch"]
    min_p: Float[HostArray, " batch"]
    repetition_penalty: Float[HostArray, " batch"]
    presence_penalty: Float[HostArray, " batch"]
    frequency_penalty: Float[HostArray, " batch"]
    reported: Float[HostArray, " batch"]  # the temperature of log-probabilities
    biased: Int[HostArray, "batch biases"] | None = None  # ids of `logit_bias`; None if no row has any
    bias: Float[HostArray, "batch biases"] | None = None
    allowed: UInt32[HostArray, "batch words"] | None = None  # bits of `AbstractConstraint`; None without constraints
    constrained: Bool[HostArray, " batch"] | None = None

    def penalized(
        self,
        logits: Float[Array, "batch vocab"],
        tokens: Int[Array, "batch seq"],
        prompt: Int[HostArray, " batch"],
        position: Int[HostArray, " batch"],
    ) -> Float[Array, "batch vocab"]:
        """Adds `logit_bias`, and applies the penalties: lowers logits of tokens among `tokens` before `position`.

        `logits` are for the token at `position`. The first `prompt` tokens of a row are its prompt, the others its
        completion. Tokens from `position` on are not read, so they may be rejected tokens.
        """
        if self.biased is not None:
            logits = logits.at[jnp.arange(len(logits))[:, None], self.biased].add(self.bias)
        off = (self.repetition_penalty == 1) & (self.presence_penalty == 0) & (self.frequency_penalty == 0)
        return jax.lax.cond(jnp.all(off), lambda: logits, lambda: self._penalize(logits, tokens, prompt, position))

    def _penalize(self, logits: Array, tokens: Array, prompt: HostArray, position: HostArray) -> Array:
        index, row = jnp.arange(tokens.shape[1])[None], jnp.arange(len(tokens))[:, None]
        drawn, before = index >= jnp.asarray(prompt)[:, None], index < jnp.asarray(position)[:, None]
        counts = jnp.zeros((2, *logits.shape), jnp.int32)
        counts = counts.at[drawn.astype(jnp.int32), row, tokens].add(before.astype(jnp.int32))
        repetition, presence, frequency = (
            _rows(a, logits) for a in (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        )
        lowered = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(jnp.any(counts > 0, axis=0), lowered, logits)
        return logits - frequency * counts[1].astype(jnp.float32) - presence * (counts[1] > 0).astype(jnp.float32)

    def permitted(self, logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
        """Sets the logits of tokens to -inf that the constraints do not allow."""
        if self.allowed is None:
            return logits
        token = jnp.arange(logits.shape[1], dtype=jnp.uint32)
        bits = jnp.take(jnp.asarray(self.allowed), token // 32, axis=1) >> (token % 32)[None]
        return jnp.where(bits & 1 == 1, logits, -jnp.inf)

    def scaled(self, logits: Float[Array, "batch *seq vocab"]) -> Float[Array, "batch *seq vocab"]:
        """Divides logits by the temperature, in float32; at temperature 0 logits stay as they are."""
        return _divided(logits, self.temperature)

    def of_logprobs(self, logits: Float[Array, "batch *seq vocab"]) -> Float[Array, "batch *seq vocab"]:
        """Divides logits by the temperature of log-probabilities, as `scaled` does by that of drawing."""
        return _divided(logits, self.reported)

    def filtered(self, logits: Float[Array, "batch *seq vocab"]) -> Float[Array, "batch *seq vocab"]:
        """Scales logits, and sets those of tokens that may not be drawn to -inf; at temperature 0 one token is left."""
        scaled = self.scaled(logits)
        greedy = _rows(self.temperature == 0, logits)
        likeliest = jnp.argmax(scaled, axis=-1, keepdims=True)
        index = jax.lax.broadcasted_iota(likeliest.dtype, scaled.shape, scaled.ndim - 1)
        alone = jnp.where(index == likeliest, 0, -jnp.inf)
        filters = (self.top_k < logits.shape[-1]) | (self.top_p < jnp.inf) | (self.min_p > 0)
        kept = jax.lax.cond(
            jnp.any(filters), lambda: self._filter(scaled), lambda: scaled
        )  # sorts only if a filter is on
        return jnp.where(greedy, alone, kept)

    def _filter(self, scaled: Float[Array, "batch *seq vocab"]) -> Float[Array, "batch *seq vocab"]:
        top_k, top_p, min_p = (_rows(a, scaled) for a in (self.top_k, self.top_p, self.min_p))
        ordered = jnp.sort(scaled, axis=-1, descending=True)
        likeliest = ordered[..., :1]
        last = jnp.broadcast_to(jnp.minimum(top_k, scaled.shape[-1]) - 1, likeliest.shape)
        least_k = jnp.take_along_axis(ordered, last, axis=-1)
        p = jax.nn.softmax(jnp.where(ordered < least_k, -jnp.inf, ordered), axis=-1)
        before = jnp.cumsum(p, axis=-1) - p  # the sum over likelier tokens
        least_p = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        least_p = jnp.minimum(least_p, likeliest)  # the likeliest always stays
        least = jnp.maximum(jnp.maximum(least_k, least_p), likeliest + jnp.log(min_p))
        return jnp.where(scaled < least, -jnp.inf, scaled)

    def draw(self, logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"]) -> Int[Array, " batch"]:
        """Draws one token for each row, with the row's own key."""
        greedy = lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32)
        random = lambda: jax.vmap(jax.random.categorical)(keys, self.filtered(logits)).astype(jnp.int32)
        return jax.lax.cond(jnp.any(self.temperature > 0), random, greedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for sampling a continuation.

    The penalties apply first, in vLLM's order: repetition, frequency, presence. Then come the temperature and the
    filters top_k, top_p and min_p. Negative penalties, and a repetition penalty below 1, make tokens likelier.

    Raises:
        ValueError: a number is out of its range.
    """

    max_new_tokens: int = 128
    """Largest number of tokens of a continuation."""
    temperature: float = 0.0
    """0 takes the likeliest token; higher values make texts more varied."""
    top_k: int | None = None
    """Draw only from the top_k likeliest tokens."""
    top_p: float | None = None
    """Draw only from the fewest tokens whose probabilities add up to top_p, from 0 to 1."""
    min_p: float | None = None
    """Draw only from tokens at least min_p times as probable as the likeliest, from 0 to 1."""
    repetition_penalty: float | None = None
    """Divides the positive logits of tokens that the prompt or the continuation has, and multiplies the negative ones,
    as in transformers (arXiv:1909.05858, section 4.1); 1 is off. None takes the value in the checkpoint's
    generation_config.json, or 1 where only tokens are known."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the continuation has it, as in OpenAI's API; from -2 to
    2."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the continuation has, as in OpenAI's API; from -2 to 2."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """Added to the logits of these tokens before the penalties, as in OpenAI's API; from -100 to 100."""
    seed: int = 0
    """Seed of the random numbers. With the same seed, the same prompts get the same texts."""
    stop: Sequence[str] = ()
    """Texts before the first of which a continuation ends."""

    def __post_init__(self):
        bounds = {"temperature": (0, np.inf), "top_k": (1, np.inf), "top_p": (0, 1), "min_p": (0, 1)}
        bounds |= {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}  # OpenAI's and vLLM's
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < np.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 changes nothing.")
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value} is not between {low} and {high}.")
        for token, value in self.logit_bias.items():
            if token < 0 or not -100 <= value <= 100:
                raise ValueError(f"logit_bias={token}: {value} is not from -100 to 100, for a token from 0 on.")

    def changed(self, options: "SamplingOptions") -> "Sampling":
        """Returns these options with others in the place of some.

        Raises:
            TypeError: an option has a name that is no field's.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in options:
            if name not in names:
                raise TypeError(
                    f"{name!r} is neither an argument nor a field of Sampling, which has {', '.join(names)}."
                )
        return dataclasses.replace(self, **options)


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keywords of `generate`, `stream` and `complete`."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]


def settings(
    samplings: Sequence[Sampling],
    *,
    allowed: Sequence[UInt32[np.ndarray, " words"] | None] = (),
    constrained: Sequence[bool] = (),
    raw_logprobs: bool = False,
) -> Settings:
    """Returns the options that choose a token, as arrays: row n has those of sampling n.

    `raw_logprobs` leaves the temperature out of log-probabilities. If any row is `constrained`, `allowed` has each
    row's tokens (`AbstractConstraint.allowed`).
    """
    column = lambda name, off, dtype: np.array(
        [off if getattr(s, name) is None else getattr(s, name) for s in samplings], dtype
    )
    biased, bias = _biases([s.logit_bias for s in samplings])
    words = max((len(each) for each in allowed if each is not None), default=1)
    every = np.full(words, 2**32 - 1, np.uint32)
    return Settings(
        temperature=column("temperature", 0, np.float32),
        top_k=column("top_k", np.iinfo(np.int32).max, np.int32),
        top_p=column("top_p", np.inf, np.float32),
        min_p=column("min_p", 0, np.float32),
        repetition_penalty=column("repetition_penalty", 1, np.float32),
        presence_penalty=column("presence_penalty", 0, np.float32),
        frequency_penalty=column("frequency_penalty", 0, np.float32),
        reported=np.zeros(len(samplings), np.float32) if raw_logprobs else column("temperature", 0, np.float32),
        biased=biased,
        bias=bias,
        allowed=np.stack([every if each is None else each for each in allowed]) if any(constrained) else None,
        constrained=np.array(constrained, bool) if any(constrained) else None,
    )


def _biases(
    rows: Sequence[Mapping[int, float]],
) -> tuple[Int[np.ndarray, "batch biases"] | None, Float[np.ndarray, "batch biases"] | None]:
    """Returns the tokens and biases of each row, padded by zeros to a power of 32; None if there are none."""
    if not (most := max(map(len, rows))):
        return None, None
    width = 32  # few sizes, so that little is compiled
    while width < most:
        width *= 32
    biased = np.zeros((len(rows), width), np.int32)
    bias = np.zeros(biased.shape, np.float32)
    for n, row in enumerate(rows):
        biased[n, : len(row)], bias[n, : len(row)] = list(row), list(row.values())
    return biased, bias


def _divided(logits: Float[Array, "batch *seq vocab"], temperature: HostArray) -> Float[Array, "batch *seq vocab"]:
    return logits.astype(jnp.float32) / _rows(jnp.where(temperature == 0, 1, temperature), logits)


def _rows(values: HostArray, like: Array) -> Any:
    """Reshapes one value a row so that it broadcasts against `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
