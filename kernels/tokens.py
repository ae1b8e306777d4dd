"""Positions and documents of tokens: `Tokens`, and the properties of tokens that operations need."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


Ids = Int[Array, "..."] | Int[np.ndarray, "..."]


class Tokens(NamedTuple):
    """The positions and documents of tokens. A model passes them to the kernels, which pass them to the masks.

    The arrays are [batch, seq], or broadcast to that.

    - `positions`: the order of a row's tokens. Masks compare them, and they choose the slots of a cache. They count
      from 0, and may restart in packed documents; padding has negative ones. None: tokens are in order, and those of
      each document count from 0 (`counted`). Prefer None for such tokens: the fastest kernels need to know the order.
    - `segments`: numbers of the documents packed into a row, which do not see each other. None: one document a row.
    - `spans`: ids of tokens that see each other both ways, for masks with `Spans()`. None: there are none.
    - `rotary`: the coordinates for rotary embeddings, if they differ from the positions: [batch, seq], or [batch, seq,
      axes], as for the patches of an image. Kernels do not read them.
    - `branches`: numbers of the branches into which a document parts. Its beginning is branch 0, the trunk, which all
      of them see; they do not see each other. Each goes on from the trunk's positions, which have to be given. None:
      documents are single lines.
    """

    positions: Int[Array, "..."] | None = None
    segments: Int[Array, "..."] | None = None
    spans: Int[Array, "..."] | None = None
    rotary: Int[Array, "..."] | None = None
    branches: Int[Array, "..."] | None = None

    @property
    def in_order(self) -> bool:
        """Whether masks compare indices, which `kernels.attention` keeps in numpy: they are known when tracing."""
        return isinstance(self.positions, np.ndarray)


def given(ids: Ids | None) -> Any:
    """Returns the ids, which are not None here: `kernels.attention` fills in positions and checks the others."""
    assert ids is not None, "kernels.attention fills in positions, and refuses a mask of segments or spans without ids"
    return ids


def padding(at: Tokens, shape: tuple[int, ...]) -> Bool[Array, "batch seq"]:
    """Whether each of the tokens, [batch, seq], is padding: of segment 0, or at a position below 0."""
    none = jnp.zeros(shape, bool)
    if at.segments is not None:
        none |= at.segments == 0
    return none if at.positions is None else none | (jnp.asarray(at.positions) < 0)


def begins(at: Tokens, shape: tuple[int, ...]) -> Bool[Array, "batch seq"]:
    """Whether each of the tokens, [batch, seq], is the first of a document that follows another one in its row.

    Raises:
        ValueError: documents have branches.
    """
    refuse_branches(at)
    if at.segments is None:
        return jnp.zeros(shape, bool)
    changes = at.segments[:, 1:] != at.segments[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0))) & (at.segments != 0)


def refuse_branches(at: Tokens) -> None:
    """Raises a ValueError if documents have branches: a branch's first token does not follow the one before it."""
    if at.branches is not None:
        raise ValueError("Recurrent layers and convolutions read documents in one line: give every branch its trunk.")


def first_of_document(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns for each token the index at which its document starts. Each document's tokens are neighbours."""
    start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(start, jnp.arange(segments.shape[1])[None], 0), axis=1)


def last_of_document(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns for each token the index of its document's last token. Each document's tokens are neighbours."""
    return segments.shape[1] - 1 - first_of_document(segments[:, ::-1])[:, ::-1]


def each_in_one_piece(q: Tokens, kv: Tokens) -> Bool[Array, ""]:
    """Whether queries and keys are in the same documents, and each document's tokens are neighbours.

    True only if ids never fall, except to the 0 of padding at the end.
    """
    ids = jnp.where(given(q.segments) == 0, jnp.iinfo(jnp.int32).max, given(q.segments))
    return jnp.all(ids[:, 1:] >= ids[:, :-1]) & jnp.all(given(q.segments) == given(kv.segments))


def counted(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns the positions of tokens that are in order: they count from 0 in each document."""
    return jnp.arange(segments.shape[1])[None] - first_of_document(segments)
