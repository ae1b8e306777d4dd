"""Constrained decoding: a constraint says before each token of a sequence which tokens may come next.

A batch that has constraints is decoded one token at a time, in two programs: `draw` draws the tokens, and `read` gives
them to the model. The host computes the next constraints while the device reads. With a draft, a constrained row draws
one token a round, from the model's distribution, so that it has the same tokens as without a draft.
"""

import abc
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from zoo.generation.decoding import Drawn, Likeliest, Records, Rows, State, Tables, compiled, hidden, logprob, write
from zoo.nn import rows
from zoo.nn.model import AbstractModel


class AbstractConstraint(abc.ABC):
    """The tokens that may come next in one sequence."""

    @abc.abstractmethod
    def allowed(self) -> UInt32[np.ndarray, " words"] | None:
        """Returns the allowed tokens, at least one: bit b of word w is token 32 w + b. None allows all."""

    @abc.abstractmethod
    def push(self, token: int) -> None:
        """Adds the token that has come, unless it ends the sequence."""

    @property
    @abc.abstractmethod
    def complete(self) -> bool:
        """Whether the sequence may end here."""


class Delayed(AbstractConstraint):
    """A constraint that begins later if the sequence begins with certain tokens, such as those of reasoning.

    `opens` maps these tokens to the one after which the constraint begins, or to None if it never does. `until` is that
    token from the beginning on, and None to begin at once.
    """

    def __init__(self, constraint: AbstractConstraint, opens: Mapping[int, int | None], until: int | None = None):
        self._constraint, self._opens, self._until = constraint, opens, until
        self._free, self._first = until is not None, True

    def allowed(self) -> UInt32[np.ndarray, " words"] | None:
        if self._free or (words := self._constraint.allowed()) is None:
            return None
        if self._first:
            words = words.copy()
            for token in self._opens:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def push(self, token: int) -> None:
        if self._free:
            self._free = token != self._until
        elif self._first and token in self._opens:
            self._free, self._until = True, self._opens[token]
        else:
            self._constraint.push(token)
        self._first = False

    @property
    def complete(self) -> bool:
        return (self._free and self._until is None) or self._constraint.complete


@functools.partial(compiled, options=None, donate=False)
def draw(
    table: Rows, tokens: Int[Array, "batch seq"], logits: Float[Array, "batch vocab"], top: int
) -> tuple[Drawn, Int[Array, "batch seq"]]:
    """Draws a token for each row, and finds the `top` likeliest. Returns these, and `tokens` with the drawn ones."""
    at, settings, now = _positions(table), table.settings, table.progress
    live = (jnp.asarray(now.left) > 0).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(jnp.asarray(table.keys)), now.drawn)
    permitted = settings.permitted(settings.penalized(logits, tokens, now.positions - now.drawn, at))
    token = settings.draw(permitted, keys)[:, None]
    scaled = settings.of_logprobs(logits)[:, None]
    drawn = Drawn(token, logprob(scaled, token), Likeliest.of(scaled, top), live, live, {})
    return drawn, write(tokens, token, at[:, None])


@compiled
def read(
    inputs: tuple[AbstractModel, Rows, Tables, Int[Array, "batch 1"], Int[Array, "batch seq"]], state: State
) -> tuple[State, Records]:
    """Gives the model the tokens that `draw` has drawn, and returns the state for the next ones."""
    model, table, pages, token, tokens = inputs
    at = _positions(table)[:, None]
    x, cache, records = hidden(model, token, rows.with_tables(state.caches, pages)[0], at, table.record)
    logits = jnp.where(at >= 0, model.unembed(x)[:, 0].astype(jnp.float32), state.logits)
    return State(tokens, (cache, None), logits, None, state.progress), records


def _positions(table: Rows) -> Int[Array, " batch"]:
    """Returns each row's position; -1, that of padding, for free rows."""
    return jnp.where(jnp.asarray(table.progress.left) > 0, table.progress.positions, -1)
