"""Speculative decoding (arXiv:2211.17192): a draft proposes tokens one by one, and the model checks them all at once.

Let q be the draft's distribution of a token, and p the model's. A token x drawn from q is accepted with probability
min(1, p(x) / q(x)). In place of the first rejected token one is drawn from max(p - q, 0), rescaled; if all are
accepted, one more is drawn from p. So tokens have the model's distribution whatever the draft proposes, and greedy text
is the model's own.

    zoo.generate(model, tokenizer, prompts, draft=zoo.ModelDraft(smaller, num_draft_tokens=4))
    zoo.generate(model, tokenizer, prompts, draft=zoo.NGramDraft(num_draft_tokens=4))
"""

import abc
import functools
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
    rejected: Float[Array, "batch vocab"]


class Round(eqx.Module):
    """Texts of a batch to propose tokens after, each with a token that was just drawn.

    `tokens` have it at `position`. Rows in which no tokens are `left` have ended. The model has `vocab` tokens.
    """

    tokens: Int[Array, "batch seq"]
    token: Int[Array, " batch"]
    position: Int[Array, "batch 1"]
    left: Int[HostArray, " batch"]
    keys: Key[Array, " batch"]
    settings: Settings
    vocab: int = eqx.field(static=True)


Proposal = tuple[Int[Array, "batch drafts"], Float[Array, "batch drafts vocab"], Any]
"""Tokens, the distribution q from which each was drawn, and the draft's new cache."""


class AbstractDraft(eqx.Module):
    """A draft, which proposes tokens each round."""

    @property
    @abc.abstractmethod
    def num_draft_tokens(self) -> int:
        """Returns the number of tokens that it proposes."""

    @property
    @abc.abstractmethod
    def models(self) -> tuple[AbstractModel, ...]:
        """Returns the models that it runs."""

    @property
    @abc.abstractmethod
    def features(self) -> int:
        """Returns the number of the model's features of a token that the draft reads."""

    @abc.abstractmethod
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """Makes the draft's own cache, as a model's `init_cache` does; None if it has none."""

    @abc.abstractmethod
    def read(
        self, x: Float[Array, "batch seq embed"], new: Reading, past: DraftState, cache: Any
    ) -> tuple[DraftState, Any]:
        """Reads what rows read, for which the model computed the features `x`, after what they still had to read."""

    @abc.abstractmethod
    def propose(self, now: Round, past: DraftState, cache: Any) -> Proposal:
        """Proposes tokens after those that were just drawn."""

    def __check_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(
                f"A draft of num_draft_tokens={self.num_draft_tokens} proposes nothing; it must be at least 1."
            )

    def init_state(self, batch: int, vocab: int) -> DraftState:
        """Makes the state before the first round, for a model of `vocab` tokens, with zeros as features."""
        leaves = jax.tree.leaves(eqx.filter(self.models, eqx.is_inexact_array))
        return DraftState(
            jnp.zeros((batch, self.num_draft_tokens + 1, self.features), leaves[0].dtype if leaves else jnp.float32),
            jnp.zeros((batch, self.num_draft_tokens + 1), jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, vocab), jnp.float32),
        )


class NGramDraft(AbstractDraft):
    """A draft without a model: proposes what followed the same tokens earlier in the row's own text ("prompt lookup").

    It looks for the last `ngram` tokens, or else for as many of the last ones as occurred, at their last occurrence.
    Where what followed ends, it repeats. Texts that repeat themselves or their prompt, as code and summaries do, gain.
    """

    num_draft_tokens: int = eqx.field(static=True, default=4)
    ngram: int = eqx.field(static=True, default=3)

    def __check_init__(self):
        if self.ngram < 1:
            raise ValueError(f"A draft of ngram={self.ngram} has nothing to look for; it must be at least 1.")

    @property
    def models(self) -> tuple[AbstractModel, ...]:
        return ()

    @property
    def features(self) -> int:
        return 0

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> None:
        return None

    def read(
        self, x: Float[Array, "batch seq embed"], new: Reading, past: DraftState, cache: Any
    ) -> tuple[DraftState, Any]:
        return jax.tree.map(jnp.zeros_like, past), cache

    def propose(self, now: Round, past: DraftState, cache: Any) -> Proposal:
        tokens, end, seq = now.tokens, now.position, now.tokens.shape[1]
        index, alike = jnp.arange(seq)[None], jnp.ones(tokens.shape, bool)
        length = jnp.zeros(tokens.shape, jnp.int32)  # of what is alike up to each token, counted from the last one
        for n in range(self.ngram):
            last = jnp.take_along_axis(tokens, jnp.maximum(end - n, 0), axis=1)
            alike &= (index >= n) & (jnp.roll(tokens, n, axis=1) == last)
            length += alike.astype(jnp.int32)
        length = jnp.where(index < end, length, 0)
        longest = seq - 1 - jnp.argmax(length[:, ::-1], axis=1)[:, None]  # and of these the last
        at = jnp.minimum(longest, end - 1)  # if nothing is alike, the last token is proposed again
        ahead = at + 1 + jnp.arange(self.num_draft_tokens)[None] % (end - at)
        drafts = jnp.take_along_axis(tokens, jnp.maximum(ahead, 0), axis=1)
        return drafts, jax.nn.one_hot(drafts, now.vocab, dtype=jnp.float32), cache


class AbstractReadingDraft(AbstractDraft):
    """A draft that reads what the model reads: `y, cache = draft(x, following, cache, positions)`.

    `x` are the first `features` of the model's features at `positions`, and `following` the tokens one position later.
    `model.unembed(y)` are the draft's logits for the tokens two positions later.
    """

    model: eqx.AbstractVar[AbstractModel]

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "batch seq features"],
        following: Int[Array, "batch seq"],
        cache: Any,
        positions: Int[Array, "batch seq"],
    ) -> tuple[Float[Array, "batch seq draft"], Any]: ...

    @property
    def models(self) -> tuple[AbstractModel, ...]:
        return (self.model,)

    def read(
        self, x: Float[Array, "batch seq embed"], new: Reading, past: DraftState, cache: Any
    ) -> tuple[DraftState, Any]:
        """Reads tokens as `AbstractDraft.read` says.

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
        last, start = x[jnp.arange(len(x)), jnp.maximum(new.lengths - 1, 0)], jax.tree.map(jnp.zeros_like, past)
        return eqx.tree_at(lambda d: d.x, start, start.x.at[:, 0].set(last)), cache

    def propose(self, now: Round, past: DraftState, cache: Any) -> Proposal:
        """Proposes tokens one by one. It first reads the tokens that were accepted, now with the model's features."""
        index, accepted = jnp.arange(self.num_draft_tokens + 1)[None], past.accepted[:, None]
        following = jnp.where(index == accepted, now.token[:, None], past.tokens)
        positions = _at(now.left, now.position - 1 - accepted + index, index <= accepted)
        y, cache = self(past.x, following, cache, positions)

        def draw(y: Array, n: Array | int) -> tuple[Array, Array]:
            known = jnp.arange(self.model.config.vocab_size) < now.vocab
            logits = now.settings.filtered(jnp.where(known, self.model.unembed(y), -jnp.inf))
            return _categorical(_fold(now.keys, n), logits), jax.nn.softmax(logits, axis=-1)

        def another(carry: Any, n: Array) -> tuple[Any, Any]:
            y, cache, token = carry
            at = _at(now.left, now.position + n)
            y, cache = self(y[:, None, : self.features], token[:, None], cache, at)
            token, q = draw(y[:, 0], n + 1)
            return (y[:, 0], cache, token), (token, q)

        y = y[jnp.arange(len(y)), past.accepted]
        first, q = draw(y, 0)
        (_, cache, _), others = jax.lax.scan(another, (y, cache, first), jnp.arange(self.num_draft_tokens - 1))
        drafts, q = (jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1) for a, b in zip((first, q), others, strict=True))
        q = q[..., : now.vocab]  # padded where the model's vocabulary is
        return drafts, jnp.pad(q, ((0, 0), (0, 0), (0, now.vocab - q.shape[-1]))), cache


class ModelDraft(AbstractReadingDraft):
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


class MTPDraft(AbstractReadingDraft):
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

        known = write(state.tokens, token[:, None], at(start))
        ahead = Round(known, token, start, left, key, settings, vocab)
        drafts, q, draft_cache = draft.propose(ahead, past, draft_cache)

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
        scaled = settings.of_logprobs(before)
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


def _without(rejected: Float[Array, "batch vocab"], p: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    """Returns max(p - q, 0), not rescaled, for the distribution q in `DraftState.rejected`; p where that is zeros."""
    rest = jnp.maximum(p - rejected, 0)
    return jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p)  # p, too, if it equals q but for rounding


def _accept(
    drafts: Int[Array, "batch drafts"],
    q: Float[Array, "batch drafts vocab"],
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
