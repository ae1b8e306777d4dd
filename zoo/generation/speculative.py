"""Speculative decoding (arXiv:2211.17192): a draft proposes tokens one by one, and the model checks them all at once.

A token x, drafted with probability q(x), stays with probability min(1, p(x) / q(x)), where p is the model's. At the
first that does not stay another is drawn, from the positive part of p - q; after the last, one more from p. So what is
written has the model's distribution, whatever the draft says, and greedy text is the model's own.

    zoo.generate(model, tokenizer, prompts, draft=zoo.ModelDraft(smaller, tokens=4))
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kernels import Tokens
from zoo.generation.decoding import Drawn, Rows, State, logprob, write
from zoo.generation.sampling import HostArray


class Drafted(eqx.Module):
    """What a round leaves to the next one: tokens that have stayed, which the draft has yet to read, and what has not.

    `x` are the model's features of the token before the drafted `tokens` and of these, of which the first `count`
    stayed. `refused` are the draft's probabilities where the next one did not, and 0 if there was none: the next token
    is drawn from what they leave of the model's. They are as many as the draft has tokens.
    """

    x: Float[Array, "batch seq features"]
    tokens: Int[Array, "batch seq"]
    count: Int[Array, " batch"]
    refused: Float[Array, "batch drafted"]


class AbstractDraft(eqx.Module):
    """What proposes `tokens` tokens a round: `y, cache = draft(x, following, cache, positions)`.

    It reads features `x` of the model, as many as it says, and the token that follows each; `model.unembed(y)` are its
    logits of the one after that.
    """

    model: eqx.AbstractVar[Any]
    tokens: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def features(self) -> int:
        """How many of a token's features it reads."""

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "batch seq features"],
        following: Int[Array, "batch seq"],
        cache: Any,
        positions: Int[Array, "batch seq"],
    ) -> tuple[Float[Array, "batch seq draft"], Any]: ...

    @abc.abstractmethod
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """Of the draft's own, as a model's."""

    def __check_init__(self):
        if self.tokens < 1:
            raise ValueError(f"A draft of tokens={self.tokens} proposes nothing; it must be at least 1.")

    def init_state(self, batch: int) -> Drafted:
        """Before the first round, of a prompt without features."""
        dtype = jax.tree.leaves(eqx.filter(self.model, eqx.is_inexact_array))[0].dtype
        return Drafted(
            jnp.zeros((batch, self.tokens + 1, self.features), dtype),
            jnp.zeros((batch, self.tokens + 1), jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, self.model.config.vocab_size), jnp.float32),
        )

    def prefill(
        self,
        x: Float[Array, "batch seq embed"],
        prompts: Int[HostArray, "batch seq"],
        lengths: Int[HostArray, " batch"],
        cache: Any,
    ) -> tuple[Drafted, Any]:
        """Reads right-padded prompts, whose features in the model are `x`."""
        x, index = x[..., : self.features], jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        # The first token of a prompt follows what lies at -1; -2 is padding.
        _, cache = self(before, jnp.asarray(prompts), cache, jnp.where(index < lengths[:, None], index - 1, -2))
        last, start = x[jnp.arange(len(x)), lengths - 1], self.init_state(len(x))
        return eqx.tree_at(lambda d: d.x, start, start.x.at[:, 0].set(last)), cache


class ModelDraft(AbstractDraft):
    """A model of the same vocabulary as draft: it reads the `following` tokens, one position on.

    Its vocabulary may be padded to another size, as those of Qwen2.5's and Gemma 3's small and large models are.
    """

    model: Any
    tokens: int = eqx.field(static=True, default=4)

    @property
    def features(self) -> int:
        return 0

    def __call__(
        self,
        x: Float[Array, "batch seq features"],
        following: Int[Array, "batch seq"],
        cache: Any,
        positions: Int[Array, "batch seq"],
    ) -> tuple[Float[Array, "batch seq draft"], Any]:
        known = jnp.minimum(following, self.model.config.vocab_size - 1)
        return self.model.hidden(known, cache, positions=positions + 1)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        return self.model.init_cache(batch, length, dtype)


class MTPDraft(AbstractDraft):
    """The model's module for the token after the next, `further`, which for more tokens reads what it wrote itself.

    DeepSeek V3 and R1 have one, which `zoo.load(..., mtp=True)` brings.
    """

    model: Any
    tokens: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        if getattr(self.model, "mtp", None) is None:
            raise ValueError("The model has no module to draft with; load DeepSeek V3 or R1 with mtp=True.")

    @property
    def features(self) -> int:
        return self.model.config.hidden_size

    def __call__(
        self,
        x: Float[Array, "batch seq features"],
        following: Int[Array, "batch seq"],
        cache: Any,
        positions: Int[Array, "batch seq"],
    ) -> tuple[Float[Array, "batch seq draft"], Any]:
        model = eqx.tree_at(lambda m: m.mtp.block, self.model, _Remembering(self.model.mtp.block, cache))
        return model.further(x, following, positions=positions)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        return self.model.mtp.block.init_cache(1, batch, length, dtype)


class _Remembering(eqx.Module):
    """`further` knows of no cache: this block brings its own, and reports the new one."""

    block: Any
    cache: Any

    def __call__(self, x: Array, cache: None, at: Tokens) -> tuple[Array, Any]:
        return self.block(x, self.cache, at)


@eqx.filter_jit(donate="all-except-first")
def advance(
    inputs: tuple[tuple[Any, AbstractDraft], Int[HostArray, " stops"], Rows],
    state: State,
    steps: int,
    enough: Int[HostArray, ""],
) -> tuple[State, Drawn]:
    """`decoding.advance` in rounds, as many as surely draw no more than `steps` tokens a row, but at least one.

    In each round the model is called once, and a row gets up to `draft.tokens` + 1 tokens. Penalties apply to
    the model's logits alone, so fewer drafted tokens stay with them.
    """
    (model, draft), stops, rows = inputs
    batch, k, settings = len(rows.left), draft.tokens, rows.settings
    vocab, drafted = state.logits.shape[1], draft.model.config.vocab_size
    rounds = max(1, steps // (k + 1))
    prompt = rows.positions - rows.drawn
    row, index = jnp.arange(batch), jnp.broadcast_to(jnp.arange(k + 1), (batch, k + 1))
    here = lambda x, at: x[row, at]
    fold = jax.vmap(jax.random.fold_in, (0, None))
    categorical = lambda keys, logits: jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

    def unfinished(carry: Any) -> Bool[Array, ""]:
        n, left, _, _ = carry
        return (n < rounds) & (jnp.sum(left > 0) > enough)

    def body(carry: Any) -> Any:
        n, left, state, drawn = carry
        (cache, draft_cache), past = state.caches, state.drafted
        key = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(jnp.asarray(rows.keys)), rows.drawn + drawn.count)
        # -2 is padding even to a draft that reads one position on; so are rows that have ended.
        at = lambda positions, real=True: jnp.where(real & (left > 0)[:, None], positions, -2)
        start = (rows.positions + drawn.count)[:, None]  # of the next token

        penalized = settings.penalized(state.logits, state.tokens, prompt, start[:, 0])
        p = jax.nn.softmax(settings.filtered(penalized), axis=-1)
        rest = jnp.maximum(p - jnp.pad(past.refused[:, :vocab], ((0, 0), (0, max(vocab - drafted, 0)))), 0)
        rest = jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p)  # where both round alike
        token = categorical(fold(key, k + 1), jnp.log(rest))

        # The draft reads what it drafted once more, this time with the model's features.
        following = jnp.where(index == past.count[:, None], token[:, None], past.tokens)
        positions = at(start - 1 - past.count[:, None] + index, index <= past.count[:, None])
        y, draft_cache = draft(past.x, following, draft_cache, positions)

        def propose(y: Array, n: Array | int) -> tuple[Array, Array]:
            logits = settings.filtered(jnp.where(jnp.arange(drafted) < vocab, draft.model.unembed(y), -jnp.inf))
            return categorical(fold(key, n), logits), jax.nn.softmax(logits, axis=-1)

        def another(carry: Any, n: Array) -> tuple[Any, Any]:
            y, cache, token = carry
            y, cache = draft(y[:, None, : draft.features], token[:, None], cache, at(start + n))
            token, q = propose(y[:, 0], n + 1)
            return (y[:, 0], cache, token), (token, q)

        y = here(y, past.count)
        first, q = propose(y, 0)
        (_, draft_cache, _), others = jax.lax.scan(another, (y, draft_cache, first), jnp.arange(k - 1))
        drafts, q = (jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1) for a, b in zip((first, q), others, strict=True))

        tokens = jnp.concatenate([token[:, None], drafts], axis=1)
        x, cache = model.hidden(tokens, cache, positions=at(start + index))
        logits = model.unembed(x).astype(jnp.float32)
        written = write(state.tokens, tokens, at(start + index))
        penalized = jax.vmap(settings.penalized, (1, None, None, 1), 1)(logits, written, prompt, start + 1 + index)
        p = jax.nn.softmax(settings.filtered(penalized), axis=-1)
        of_drafts = lambda p: jnp.take_along_axis(p[:, :k], drafts[..., None], axis=-1)[..., 0]
        u = jax.vmap(lambda key: jax.random.uniform(key, (k,)))(fold(key, k))
        count = jnp.sum(jnp.cumprod(u * of_drafts(q) < of_drafts(p), axis=1), axis=1, dtype=jnp.int32)

        before = jnp.concatenate([state.logits[:, None], logits[:, :k]], axis=1)
        left, drawn = _add(drawn, tokens, logprob(settings.scaled(before), tokens), count + 1, left, stops)
        # What was refused stays in the caches, at later positions than all that is looked up before they are rewritten.
        past = Drafted(
            x[..., : draft.features].astype(past.x.dtype),
            jnp.pad(drafts, ((0, 0), (0, 1))),
            count,
            here(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), count),
        )
        return n + 1, left, State(written, (cache, draft_cache), here(logits, count), past), drawn

    start = (jnp.array(0), rows.left, state, Drawn.init(batch, rounds * (k + 1)))
    _, _, state, drawn = jax.lax.while_loop(unfinished, body, start)
    return state, drawn


def _add(
    drawn: Drawn,
    tokens: Int[Array, "batch seq"],
    logprobs: Float[Array, "batch seq"],
    count: Int[Array, " batch"],
    left: Int[HostArray, " batch"],
    stops: Int[HostArray, " stops"],
) -> tuple[Int[Array, " batch"], Drawn]:
    """Appends the first `count` tokens of each row, up to a stop token and to what is `left`; also what then is."""
    index, row = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.arange(len(tokens))[:, None]
    stopped = jnp.any(tokens[..., None] == stops[None, None], axis=-1) & (index < count[:, None])
    count = jnp.where(jnp.any(stopped, axis=1), jnp.argmax(stopped, axis=1) + 1, count)
    count = jnp.minimum(count, left).astype(jnp.int32)
    new = index < count[:, None]
    at = jnp.where(new, drawn.count[:, None] + index, drawn.tokens.shape[1])  # out of bounds: not written
    left = jnp.where(jnp.any(stopped & new, axis=1), 0, left - count)
    return left, Drawn(
        drawn.tokens.at[row, at].set(tokens),
        drawn.logprobs.at[row, at].set(logprobs),
        drawn.count + count,
        drawn.calls + (count > 0).astype(jnp.int32),
    )
