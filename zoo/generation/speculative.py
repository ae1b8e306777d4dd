"""Speculative decoding (arXiv:2211.17192): a draft proposes tokens one by one, and the model checks them all at once.

Let q be the draft's distribution of a token, and p the model's. A token x drawn from q is accepted with probability
min(1, p(x) / q(x)). In place of the first rejected token one is drawn from max(p - q, 0), rescaled; if all are
accepted, one more is drawn from p. So tokens have the model's distribution whatever the draft proposes, and greedy text
is the model's own.

    zoo.generate(model, tokenizer, prompts, draft=zoo.ModelDraft(smaller, num_draft_tokens=4))
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from kernels import Tokens
from zoo.generation.decoding import (
    Drawn,
    Likeliest,
    Reading,
    Records,
    Rows,
    State,
    Tables,
    compiled,
    hidden,
    logprob,
    shapes_of_records,
    write,
)
from zoo.generation.sampling import Settings
from zoo.nn import rows
from zoo.nn.model import AbstractModel
from zoo.nn.mtp import module_of
from zoo.nn.rows import HostArray


class DraftState(eqx.Module):
    """The state that one round passes to the next.

    The first `accepted` of `tokens` were accepted in the last round, but not yet read by the draft. `x` are the model's
    features of the token before these, and of each of these. `rejected` is the draft's distribution q of the first
    rejected token, or zeros if all were accepted: the next token is drawn from max(p - q, 0).
    """

    x: Float[Array, "batch seq features"]
    tokens: Int[Array, "batch seq"]
    accepted: Int[Array, " batch"]
    rejected: Float[Array, "batch draft_vocab"]


class AbstractDraft(eqx.Module):
    """A draft, which proposes `num_draft_tokens` tokens a round: `y, cache = draft(x, following, cache, positions)`.

    `x` are the first `features` of the model's features at `positions`, and `following` the tokens one position later.
    `model.unembed(y)` are the draft's logits for the tokens two positions later.
    """

    model: eqx.AbstractVar[AbstractModel]
    num_draft_tokens: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def features(self) -> int:
        """Returns the number of the model's features of a token that the draft reads."""

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
        """Makes the draft's own cache, as a model's `init_cache` does."""

    def __check_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(
                f"A draft of num_draft_tokens={self.num_draft_tokens} proposes nothing; it must be at least 1."
            )

    def init_state(self, batch: int) -> DraftState:
        """Makes the state before the first round, with zeros for the prompt's features."""
        dtype = jax.tree.leaves(eqx.filter(self.model, eqx.is_inexact_array))[0].dtype
        return DraftState(
            jnp.zeros((batch, self.num_draft_tokens + 1, self.features), dtype),
            jnp.zeros((batch, self.num_draft_tokens + 1), jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, self.model.config.vocab_size), jnp.float32),
        )

    def read(
        self, x: Float[Array, "batch seq embed"], new: Reading, past: DraftState, cache: Any
    ) -> tuple[DraftState, Any]:
        """Reads what rows read, for which the model computed the features `x`, after what they still had to read.

        Tokens are given at the position before their own, the first of a text at -1, with the features of the token
        before. These are zeros for the first of a text. Padding is at -2.
        """
        unread = jnp.where(new.starts == 0, 0, past.accepted)[:, None]
        index, count = jnp.arange(past.tokens.shape[1] - 1 + x.shape[1])[None], unread + new.lengths[:, None]
        of = lambda a, index: a[jnp.arange(len(a))[:, None], index]
        earlier, later = jnp.minimum(index, past.tokens.shape[1] - 1), jnp.clip(index - unread, 0, x.shape[1] - 1)
        tokens = jnp.where(index < unread, of(past.tokens, earlier), of(jnp.asarray(new.tokens), later))
        first = jnp.where((new.starts == 0)[:, None, None], 0, past.x)
        x = x[..., : self.features].astype(first.dtype)
        before = jnp.where((index <= unread)[..., None], of(first, earlier), of(x, jnp.maximum(later - 1, 0)))
        positions = jnp.where(index < count, new.starts[:, None] - unread - 1 + index, -2)
        _, cache = self(before, tokens, cache, positions)
        last, start = x[jnp.arange(len(x)), jnp.maximum(new.lengths - 1, 0)], self.init_state(len(x))
        return eqx.tree_at(lambda d: d.x, start, start.x.at[:, 0].set(last)), cache


class ModelDraft(AbstractDraft):
    """A draft by another model of the same vocabulary. It reads only the `following` tokens, at their own positions.

    The vocabularies may be padded to different sizes, as those of a family's small and large models often are.
    """

    model: AbstractModel
    num_draft_tokens: int = eqx.field(static=True, default=4)

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
        x, cache, _ = self.model.hidden(known, cache, positions=positions + 1)
        return x, cache

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        return self.model.init_cache(batch, length, dtype)


class MTPDraft(AbstractDraft):
    """A draft by the model's own module for the token after the next. For further tokens it reads its own features.

    Models of families with the part "mtp" have one: `zoo.load(..., parts=("mtp",))` loads it.
    """

    model: AbstractModel
    num_draft_tokens: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        module_of(self.model)  # raises if there is none

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
        mtp, embed_tokens = module_of(self.model)
        y, cache, _ = mtp(x, embed_tokens(following), cache, Tokens(positions))
        return y, cache

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        return module_of(self.model)[0].init_cache(batch, length, dtype)


@compiled
def advance(
    inputs: tuple[tuple[AbstractModel, AbstractDraft], Int[HostArray, " stops"], Rows, Tables],
    state: State,
    steps: int,
    top: int,
    enough: Int[HostArray, ""],
) -> tuple[State, Drawn]:
    """Decodes as `decoding.advance` does, in rounds of one call of the model.

    A round draws up to `num_draft_tokens` + 1 tokens a row. The number of rounds is the largest that cannot exceed
    `steps` tokens, but at least 1. Penalties apply only to the model's logits, so with penalties fewer draft tokens are
    accepted.
    """
    (model, draft), stops, table, pages = inputs
    now, k, settings = table.now(state), draft.num_draft_tokens, table.settings
    batch = len(now.left)
    rounds, vocab = max(1, steps // (k + 1)), state.logits.shape[1]
    prompt = now.positions - now.drawn
    row, index = jnp.arange(batch), jnp.broadcast_to(jnp.arange(k + 1), (batch, k + 1))
    here = lambda x, at: x[row, at]

    def unfinished(carry: Any) -> Bool[Array, ""]:
        n, left, _, _ = carry
        return (n < rounds) & (jnp.sum(left > 0) > enough)

    def body(carry: Any) -> Any:
        n, left, state, drawn = carry
        (cache, draft_cache), past = state.caches, state.draft_state
        key = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(jnp.asarray(table.keys)), now.drawn + drawn.count)
        at = functools.partial(_at, left)
        start = (now.positions + drawn.count)[:, None]  # the position of the next token

        # The first token is drawn from p, or after a rejection from max(p - q, 0).
        penalized = settings.permitted(settings.penalized(state.logits, state.tokens, prompt, start[:, 0]))
        rest = _without(past.rejected, jax.nn.softmax(settings.filtered(penalized), axis=-1))
        token = _categorical(_fold(key, k + 1), jnp.log(rest))

        # The draft reads the accepted tokens again, now with the model's features, and then the first token.
        following = jnp.where(index == past.accepted[:, None], token[:, None], past.tokens)
        positions = at(start - 1 - past.accepted[:, None] + index, index <= past.accepted[:, None])
        y, draft_cache = draft(past.x, following, draft_cache, positions)
        y = here(y, past.accepted)
        drafts, q, draft_cache = _propose(draft, vocab, settings, y, draft_cache, key, at, start)

        # The model reads them all at once.
        tokens = jnp.concatenate([token[:, None], drafts], axis=1)
        x, cache, records = hidden(model, tokens, cache, at(start + index), table.record)
        logits = model.unembed(x).astype(jnp.float32)
        written = write(state.tokens, tokens, at(start + index))
        penalized = jax.vmap(settings.penalized, (1, None, None, 1), 1)(logits, written, prompt, start + 1 + index)
        p = jax.nn.softmax(settings.filtered(penalized), axis=-1)
        accepted = _accept(drafts, q, p, _fold(key, k))
        if settings.constrained is not None:  # what may come after the first token is not known yet
            accepted = jnp.where(settings.constrained, 0, accepted)
        before = jnp.concatenate([state.logits[:, None], logits[:, :k]], axis=1)
        live = left > 0
        scaled = settings.scaled(before)
        found = tokens, logprob(scaled, tokens), Likeliest.of(scaled, top), records
        left, new = _add(drawn, *found, accepted + 1, left, stops)
        # A row may end before the first rejected token. Then no distribution is rejected, as if all were accepted.
        count = new.count - drawn.count
        rejected = jnp.where((count > accepted)[:, None], here(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), accepted), 0)
        if settings.constrained is not None:
            rejected = jnp.where(jnp.asarray(settings.constrained)[:, None], 0, rejected)
        accepted = jnp.maximum(count - 1, 0)
        # Rejected tokens stay in the caches. Until they are overwritten, their positions are later than any query's, so
        # causality hides them.
        unread = DraftState(
            x[..., : draft.features].astype(past.x.dtype),
            jnp.pad(drafts, ((0, 0), (0, 1))),
            accepted,
            rejected,
        )
        # A row that had no more to draw stays as it is, so that it may go on later.
        kept = lambda old, new: jnp.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        logits, past = jax.tree.map(kept, (state.logits, past), (here(logits, accepted), unread))
        return n + 1, left, State(written, (cache, draft_cache), logits, past, state.progress), new

    state = eqx.tree_at(lambda s: s.caches, state, rows.with_tables(state.caches, pages))
    records = shapes_of_records(model, state.caches[0], batch, table.record)
    start = (jnp.array(0), now.left, state, Drawn.init(batch, rounds * (k + 1), top, records))
    _, left, state, drawn = jax.lax.while_loop(unfinished, body, start)
    return eqx.tree_at(lambda s: s.progress, state, now.after(drawn.count, left)), drawn


_fold = jax.vmap(jax.random.fold_in, (0, None))


def _categorical(keys: Key[Array, " batch"], logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Draws a token for each row, with the row's own key."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _at(
    left: Int[HostArray, " batch"], positions: Int[Array, "batch seq"], real: Bool[Array, "batch seq"] | bool = True
) -> Int[Array, "batch seq"]:
    """Returns the positions of `real` tokens in rows that have not ended, and for all else -2.

    That is padding, also for a draft that reads one position later.
    """
    return jnp.where(real & (left > 0)[:, None], positions, -2)


def _without(
    rejected: Float[Array, "batch draft_vocab"], p: Float[Array, "batch vocab"]
) -> Float[Array, "batch vocab"]:
    """Returns max(p - q, 0), not rescaled, for the distribution q in `DraftState.rejected`; p where that is zeros."""
    vocab, draft_vocab = p.shape[1], rejected.shape[1]
    q = jnp.pad(rejected[:, :vocab], ((0, 0), (0, max(vocab - draft_vocab, 0))))
    rest = jnp.maximum(p - q, 0)
    return jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p)  # p, too, if it equals q but for rounding


def _propose(
    draft: AbstractDraft,
    vocab: int,
    settings: Settings,
    y: Float[Array, "batch draft"],
    cache: Any,
    key: Key[Array, " batch"],
    at: Callable[[Int[Array, "batch 1"]], Int[Array, "batch 1"]],
    start: Int[Array, "batch 1"],
) -> tuple[Int[Array, "batch drafts"], Float[Array, "batch drafts draft_vocab"], Any]:
    """Proposes tokens of the model's `vocab` after the one at position `start`, for which the draft has computed `y`.

    Returns the tokens, the distribution q from which each was drawn, and the draft's new cache.
    """

    def draw(y: Array, n: Array | int) -> tuple[Array, Array]:
        known = jnp.arange(draft.model.config.vocab_size) < vocab
        logits = settings.filtered(jnp.where(known, draft.model.unembed(y), -jnp.inf))
        return _categorical(_fold(key, n), logits), jax.nn.softmax(logits, axis=-1)

    def another(carry: Any, n: Array) -> tuple[Any, Any]:
        y, cache, token = carry
        y, cache = draft(y[:, None, : draft.features], token[:, None], cache, at(start + n))
        token, q = draw(y[:, 0], n + 1)
        return (y[:, 0], cache, token), (token, q)

    first, q = draw(y, 0)
    (_, cache, _), others = jax.lax.scan(another, (y, cache, first), jnp.arange(draft.num_draft_tokens - 1))
    drafts, q = (jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1) for a, b in zip((first, q), others, strict=True))
    return drafts, q, cache


def _accept(
    drafts: Int[Array, "batch drafts"],
    q: Float[Array, "batch drafts draft_vocab"],
    p: Float[Array, "batch seq vocab"],
    keys: Key[Array, " batch"],
) -> Int[Array, " batch"]:
    """Counts accepted tokens: x is accepted with probability min(1, p(x) / q(x)), up to the first that is rejected."""
    k = drafts.shape[1]
    of_drafts = lambda p: jnp.take_along_axis(p[:, :k], drafts[..., None], axis=-1)[..., 0]
    u = jax.vmap(lambda key: jax.random.uniform(key, (k,)))(keys)
    return jnp.sum(jnp.cumprod(u * of_drafts(q) < of_drafts(p), axis=1), axis=1, dtype=jnp.int32)


def _add(
    drawn: Drawn,
    tokens: Int[Array, "batch seq"],
    logprobs: Float[Array, "batch seq"],
    likeliest: Likeliest,
    records: Records,
    count: Int[Array, " batch"],
    left: Int[HostArray, " batch"],
    stops: Int[HostArray, " stops"],
) -> tuple[Int[Array, " batch"], Drawn]:
    """Appends the first `count` tokens of each row, but none after a stop token, and no more than are `left`.

    Returns the new `left`, and all tokens drawn so far.
    """
    index, row = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.arange(len(tokens))[:, None]
    stopped = jnp.any(tokens[..., None] == stops[None, None], axis=-1) & (index < count[:, None])
    count = jnp.where(jnp.any(stopped, axis=1), jnp.argmax(stopped, axis=1) + 1, count)
    count = jnp.minimum(count, left).astype(jnp.int32)
    new = index < count[:, None]
    at = jnp.where(new, drawn.count[:, None] + index, drawn.tokens.shape[1])  # an index out of bounds is not written
    left = jnp.where(jnp.any(stopped & new, axis=1), 0, left - count)
    put = lambda old, new: old.at[row, at].set(new)
    of = lambda drawn: (drawn.tokens, drawn.logprobs, drawn.likeliest, drawn.records)
    tokens, logprobs, likeliest, records = jax.tree.map(put, of(drawn), (tokens, logprobs, likeliest, records))
    calls = drawn.calls + (count > 0).astype(jnp.int32)
    return left, Drawn(tokens, logprobs, likeliest, drawn.count + count, calls, records)
