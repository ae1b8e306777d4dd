"""Cuts a batch's tokens into chunks, for results too wide to hold for all tokens at once, such as logits."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kernels import mesh


class Chunks(NamedTuple):
    """The cut of tokens [batch, seq] into chunks: of the same positions of all rows, and no token leaves its device."""

    batch: int
    rows: int  # parts that devices split the rows into
    parts: int  # parts that devices split the positions into
    part: int  # positions in such a part
    size: int  # positions of a part that are in one chunk; the last chunk is padded to this size
    count: int  # number of chunks

    @classmethod
    def of(cls, batch: int, seq: int, tokens: int) -> "Chunks":
        """Plans chunks of about `tokens` tokens on each device, or somewhat fewer, so that the last is nearly full."""
        rows = math.prod(map(mesh.split, mesh.splitting(batch, *mesh.BATCH)))
        parts = math.prod(map(mesh.split, mesh.splitting(seq, mesh.CONTEXT)))
        part = seq // parts
        count = math.ceil(part / math.ceil(tokens * rows / batch))
        return cls(batch, rows, parts, part, math.ceil(part / count), count)

    def cut(self, a: Array) -> Array:
        """Cuts [batch, seq, ...] into [count, batch, parts * size, ...]."""
        a = a.reshape(self.batch, self.parts, self.part, *a.shape[2:])
        a = jnp.pad(a, ((0, 0), (0, 0), (0, self.count * self.size - self.part), *((0, 0),) * (a.ndim - 3)))
        a = jnp.moveaxis(a.reshape(self.batch, self.parts, self.count, self.size, *a.shape[3:]), 2, 0)
        return a.reshape(self.count, self.batch, self.parts * self.size, *a.shape[4:])

    def joined(self, a: Array) -> Array:
        """Inverts `cut`."""
        a = jnp.moveaxis(a.reshape(self.count, self.batch, self.parts, self.size, *a.shape[3:]), 0, 2)
        a = a.reshape(self.batch, self.parts, self.count * self.size, *a.shape[4:])[:, :, : self.part]
        return a.reshape(self.batch, self.parts * self.part, *a.shape[3:])

    def cut_by_shard(self, a: Array) -> Array:
        """Cuts [batch, seq, ...] into [count, shards, batch of a shard, size, ...]. Each device has one shard."""
        rows, parts, count, size, batch = self.rows, self.parts, self.count, self.size, self.batch // self.rows
        a = a.reshape(rows, batch, parts, self.part, *a.shape[2:])
        a = jnp.pad(a, ((0, 0),) * 3 + ((0, count * size - self.part),) + ((0, 0),) * (a.ndim - 4))
        a = a.reshape(rows, batch, parts, count, size, *a.shape[4:])
        return jnp.moveaxis(a, (3, 2), (0, 2)).reshape(count, rows * parts, batch, size, *a.shape[5:])
