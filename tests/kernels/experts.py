"""The grouped products for the compile tests: those of real models' experts, as in a training step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Product(NamedTuple):
    groups: int
    tokens: int
    ins: int
    outs: int

    @property
    def largest(self) -> int:
        """Returns the number of elements of the largest array that a step reads or makes."""
        return max(self.tokens * self.ins, self.tokens * self.outs, self.groups * self.ins * self.outs)

    def arguments(self, w_dtype=jnp.bfloat16):
        """Returns the shapes of x, w, group_sizes and the gradient of the output."""
        array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
        w = array(self.groups, self.outs, self.ins, dtype=w_dtype)
        sizes = array(self.groups, dtype=jnp.int32)
        return array(self.tokens, self.ins), w, sizes, array(self.tokens, self.outs)


EXPERTS = {
    "Qwen3 30B-A3B up": Product(128, 32768, 2048, 768),
    "Qwen3 30B-A3B down": Product(128, 32768, 768, 2048),
    "Mixtral 8x7B up": Product(8, 8192, 4096, 14336),
    "Mixtral 8x7B down": Product(8, 8192, 14336, 4096),
    "gpt-oss 20B up": Product(32, 32768, 2880, 5760),
    "gpt-oss 20B down": Product(32, 32768, 2880, 2880),
    "DeepSeek-like up": Product(64, 32768, 7168, 2048),
    "DeepSeek-like down": Product(64, 32768, 2048, 7168),
}
DECODE = Product(128, 64, 2048, 768)


def training(ragged_dot):
    """Returns a step that computes the output, and the gradients of x and w."""

    def step(x, w, group_sizes, d_out):
        out, gradient = jax.vjp(lambda x, w: ragged_dot(x, w, group_sizes), x, w)
        return out, *gradient(d_out)

    return step


def fixed_matrices(ragged_dot):
    """Returns a step that computes the output, and the gradient of x alone."""

    def step(x, w, group_sizes, d_out):
        out, gradient = jax.vjp(lambda x: ragged_dot(x, w, group_sizes), x)
        return out, *gradient(d_out)

    return step
