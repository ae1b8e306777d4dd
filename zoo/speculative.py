"""Speculative decoding (arXiv:2211.17192): a draft proposes tokens one by one, and the model checks them all at once.

A token x, drafted with probability q(x), stays with probability min(1, p(x) / q(x)), where p is the model's. At the
first that does not stay another is drawn, from the positive part of p - q; after the last, one more from p. So what is
written has the model's distribution, whatever the draft says, and greedy text is the model's own.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

import zoo.cache
from zoo.decoding import logprob
from zoo.engine import Completion, bucket, check, padded
from zoo.gather import gathered
from zoo.sampling import Given, Sampler, Settings, settings


class ModelDraft(eqx.Module):
    """A model of the same vocabulary as draft: it reads the `following` tokens, one position on."""

    model: Any

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        following: Int[Array, "batch seq"],
        cache: Any,
        positions: Int[Array, "batch seq"],
    ) -> tuple[Float[Array, "batch seq draft"], Any]:
        return self.model.hidden(following, cache, positions=positions + 1)

    def init_cache(self, batch: int, slots: int, dtype: DTypeLike) -> Any:
        return self.model.init_cache(batch, slots, dtype)


class MTPDraft(eqx.Module):
    """The model's module for the token after the next, `further`, which for more tokens reads what it wrote itself."""

    model: Any

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        following: Int[Array, "batch seq"],
        cache: Any,
        positions: Int[Array, "batch seq"],
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        model = eqx.tree_at(lambda m: m.mtp.block, self.model, _Remembering(self.model.mtp.block, cache))
        return model.further(x, following, positions=positions)

    def init_cache(self, batch: int, slots: int, dtype: DTypeLike) -> Any:
        return self.model.mtp.block.init_cache(1, batch, slots, dtype)


class _Remembering(eqx.Module):
    """`further` knows of no cache: this block brings its own, and reports the new one."""

    block: Any
    cache: Any

    def __call__(self, x: Array, cache: None, **shared: Any) -> tuple[Array, Any]:
        return self.block(x, self.cache, **shared)


class Text(eqx.Module):
    """What is written so far."""

    tokens: Int[Array, "batch new"]
    logprobs: Float[Array, "batch new"]
    length: Int[Array, " batch"]
    done: Bool[Array, " batch"]

    def add(
        self,
        tokens: Int[Array, "batch seq"],
        logprobs: Float[Array, "batch seq"],
        count: Int[Array, " batch"],
        stops: Int[Given, " stops"],
    ) -> "Text":
        """The first `count` of them, up to a stop token, as far as there is room; none where the text is done."""
        indices = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        room, new = self.tokens.shape[1] - self.length, self.tokens.shape[1]
        stopped = jnp.any(tokens[..., None] == stops[None, None], axis=-1) & (indices < count[:, None])
        count = jnp.where(jnp.any(stopped, axis=1), jnp.argmax(stopped, axis=1) + 1, count)
        count = jnp.where(self.done, 0, jnp.minimum(count, room)).astype(jnp.int32)
        at = jnp.where(indices < count[:, None], self.length[:, None] + indices, new)  # out of bounds: not written
        at = (jnp.arange(len(tokens))[:, None], at)
        ended = jnp.any(stopped & (indices < count[:, None]), axis=1)
        return Text(
            self.tokens.at[at].set(tokens),
            self.logprobs.at[at].set(logprobs),
            self.length + count,
            self.done | ended | (count == room),
        )


class Round(eqx.Module):
    """Where a round begins. The model has read all but the last `token`, and the draft has read that too."""

    text: Text
    cache: Any
    draft_cache: Any
    token: Int[Array, " batch"]
    position: Int[Array, " batch"]  # of `token`
    y: Float[Array, "batch draft"]  # what the draft's model unembeds: logits of the next token
    number: Int[Array, ""]
    accepted: Int[Array, " batch"]
    drafted: Int[Array, " batch"]


@eqx.filter_jit
def run(
    model: Any,
    draft: ModelDraft | MTPDraft,
    prompts: Int[Given, "batch seq"],
    lengths: Int[Given, " batch"],
    stops: Int[Given, " stops"],
    keys: Key[Array, " batch"],
    settings: Settings,
    new: int,
    k: int,
    cache_dtype: DTypeLike | None,
) -> Round:
    """The last round, of a generation of up to `new` tokens with `k` drafted ones in each round."""
    batch, seq = prompts.shape
    rows, steps = jnp.arange(batch), jnp.broadcast_to(jnp.arange(k + 1), (batch, k + 1))
    empty = lambda m: zoo.cache.empty(m, batch, seq + new + k + 1, cache_dtype, widen=k + 1)
    draw = jax.vmap(jax.random.categorical)
    fold = lambda keys, n: jax.vmap(jax.random.fold_in, (0, None))(keys, n)

    def start() -> Round:
        index = jnp.broadcast_to(jnp.arange(seq + 1), (batch, seq + 1))
        at = jnp.where(index[:, :seq] < lengths[:, None], index[:, :seq], -1)
        x, cache = model.hidden(prompts, empty(model), positions=at)
        logits = model.unembed(x[rows, lengths - 1])
        token = settings.draw(logits, fold(keys, 0))
        nothing = Text(
            jnp.zeros((batch, new), jnp.int32), jnp.zeros((batch, new), jnp.float32),
            jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool),
        )  # fmt: skip
        logs = logprob(settings.scaled(logits), token)
        text = nothing.add(token[:, None], logs[:, None], jnp.ones(batch, jnp.int32), stops)
        # To the draft the first token of a prompt follows what lies at -1; -2 is its padding.
        following = jnp.pad(prompts, ((0, 0), (0, 1))).at[rows, lengths].set(token)
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
        y, draft_cache = draft(before, following, empty(draft), jnp.where(index <= lengths[:, None], index - 1, -2))
        none = jnp.zeros(batch, jnp.int32)
        return Round(
            text, cache, draft_cache, token, jnp.asarray(lengths), y[rows, lengths], jnp.array(1, jnp.int32), none, none
        )

    def body(r: Round) -> Round:
        key = fold(keys, r.number)
        at = jnp.where(r.text.done[:, None], -2, r.position[:, None] + steps)

        def propose(y: Array, n: Array | int) -> tuple[Array, Array]:
            logits = settings.filtered(draft.model.unembed(y))
            return draw(fold(key, n), logits).astype(jnp.int32), jax.nn.softmax(logits, axis=-1)

        def another(carry: Any, n: Array) -> tuple[Any, Any]:
            y, cache, token = carry
            y, cache = draft(y[:, None], token[:, None], cache, at[:, n][:, None])
            token, q = propose(y[:, 0], n + 1)
            return (y[:, 0], cache, token), (token, q)

        first, q_first = propose(r.y, 0)
        (_, draft_cache, _), (others, q_others) = jax.lax.scan(another, (r.y, r.draft_cache, first), jnp.arange(k - 1))
        drafts = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, 1)
        q = jnp.moveaxis(jnp.concatenate([q_first[None], q_others]), 0, 1)

        x, cache = model.hidden(jnp.concatenate([r.token[:, None], drafts], axis=1), r.cache, positions=at)
        logits = model.unembed(x)
        p = jax.nn.softmax(settings.filtered(logits), axis=-1)
        of_drafts = lambda p: jnp.take_along_axis(p[:, :k], drafts[..., None], axis=-1)[..., 0]
        u = jax.vmap(lambda key: jax.random.uniform(key, (k,)))(fold(key, k))
        stays = jnp.cumprod((u * of_drafts(q) < of_drafts(p)).astype(jnp.int32), axis=1)
        count = jnp.sum(stays, axis=1)
        rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)[rows, count]  # after the last, p itself
        rest = jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p[rows, count])  # where both round alike
        token = draw(fold(key, k + 1), jnp.log(rest)).astype(jnp.int32)
        tokens = jnp.where(steps < count[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), token[:, None])

        # What the draft reads beyond `token` is made up, and later positions than all that is looked up before they
        # are written again. So it is in the model's cache.
        y, draft_cache = draft(x, tokens, draft_cache, at)
        live = (~r.text.done).astype(jnp.int32)
        return Round(
            r.text.add(tokens, logprob(settings.scaled(logits), tokens), count + 1, stops),
            cache, draft_cache, token, r.position + count + 1, y[rows, count], r.number + 1,
            r.accepted + live * count, r.drafted + live * k,
        )  # fmt: skip

    return jax.lax.while_loop(lambda r: ~jnp.all(r.text.done), body, start())


def speculate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    draft: Any = None,
    drafted: int = 4,
    max_new_tokens: int,
    sampler: Sampler = Sampler(),  # noqa: B008 (a value)
    stops: Sequence[int] = (),
    seed: int = 0,
    cache_dtype: DTypeLike | None = None,
) -> tuple[list[Completion], float]:
    """A completion of each prompt, all decoded together, and the share of the drafted tokens that stayed.

    `draft` is a model of the same vocabulary; None means the model's own module for further tokens, which
    `zoo.load(..., mtp=True)` brings. In each round `drafted` tokens are proposed. Rows advance by as many as stay.

    Raises:
        ValueError: where there is no draft, or one of another vocabulary; and as `zoo.complete`.
    """
    if draft is None and getattr(model, "mtp", None) is None:
        raise ValueError("There is nothing to draft with: give draft=model, or load DeepSeek V3 or R1 with mtp=True.")
    if draft is not None and draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"The draft has a vocabulary of {draft.config.vocab_size}, and the model's is {model.config.vocab_size}; "
            "they have to be the same."
        )
    if drafted < 1:
        raise ValueError(f"drafted={drafted} proposes nothing; it must be at least 1.")
    if not prompts:
        return [], 0.0
    for n, prompt in enumerate(prompts):
        check(model, prompt, max_new_tokens, f"Prompt {n}")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(prompts)))
    last = run(
        model,
        MTPDraft(model) if draft is None else ModelDraft(draft),
        *padded(prompts, len(prompts), bucket(max(map(len, prompts)))),
        np.array(stops, np.int32),
        keys,
        settings([sampler] * len(prompts)),
        max_new_tokens,
        drafted,
        cache_dtype,
    )
    tokens, logprobs, lengths = (gathered(a) for a in (last.text.tokens, last.text.logprobs, last.text.length))
    completions = [
        Completion(ids[:n].tolist(), logs[:n].tolist(), ended=ids[n - 1] in stops, finished=True)
        for ids, logs, n in zip(tokens, logprobs, lengths, strict=True)
    ]
    return completions, float(gathered(last.accepted).sum() / max(1, gathered(last.drafted).sum()))
