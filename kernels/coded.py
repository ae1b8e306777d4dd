"""Matrices in four or eight bits with a scale for some neighbours in a row, which products dequantise as they read."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from kernels.stacked import Stacked, read


# The formats of weights. In four bits a byte holds two codes, the first in its upper half, and a table has the number
# that each code stands for.
Code = Literal["float8", "int4", "nf4", "mxfp4"]
# NF4 (QLoRA, arXiv:2305.14314, appendix E): quantiles of a normal distribution, scaled to -1...1, with an exact 0.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
# float4_e2m1fn (Open Compute Project, Microscaling Formats, version 1.0, section 5.3.3); the second half is negative.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TABLES = {"nf4": NF4, "int4": np.arange(-8, 8, dtype=np.float32), "mxfp4": np.concatenate([FP4, -FP4])}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """A matrix (out, in), or one for each of several groups, in few bits. A weight is its number times its scale.

    The product is computed in float32, and rounded once to `dtype`. Each of values and scales may be a layer of a
    stack, which a kernel reads without a copy.
    """

    values: Any  # [*groups, out, in] in float8, or uint8 [*groups, out, in / 2] for four bits
    scale: Any  # [*groups, out, blocks], as `factors` takes them. The blocks of a row are equally long
    code: Code = dataclasses.field(metadata=dict(static=True))
    dtype: np.dtype = dataclasses.field(metadata=dict(static=True))

    @property
    def packed(self) -> int:
        """Returns how many weights are in a value."""
        return 2 if self.code in TABLES else 1

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], self.values.shape[-1] * self.packed

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.values.size * self.packed

    def read(self) -> Float[Array, "..."]:
        """Dequantises all of it."""
        return dequantize(read(self.values), read(self.scale), self.code, self.dtype)

    def group(self, number: Any) -> Float[Array, "out in"]:
        """Dequantises the matrix of one group."""
        values, scale = (
            x.stack[x.layer, number] if isinstance(x, Stacked) else x[number] for x in (self.values, self.scale)
        )
        return dequantize(values, scale, self.code, self.dtype)


def dequantize(
    values: Shaped[Array, "*rows stored"], scale: Shaped[Array, "*rows blocks"], code: Code, dtype: DTypeLike
) -> Float[Array, "*rows in"]:
    """Returns numbers times scales, computed in float32 and rounded once to `dtype`."""
    if code in TABLES:
        codes = jnp.stack([values >> 4, values & 15], axis=-1).reshape(*scale.shape, -1)
        numbers = jnp.asarray(TABLES[code])[codes.astype(jnp.int32)]
    else:
        numbers = values.reshape(*scale.shape, -1).astype(jnp.float32)
    return (numbers * factors(scale)[..., None]).reshape(*scale.shape[:-1], -1).astype(dtype)


def factors(scale: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns scales in float32. They are floats, or the bits of floats that nothing may round.

    Of 32 bits these are a float32, of 16 a bfloat16, and of 8 a float8_e8m0fnu, an exponent of 2 plus 127. An exponent
    of 0, which would be 2**-127, is taken for 0.
    """
    if not jnp.issubdtype(scale.dtype, jnp.unsignedinteger):
        return scale.astype(jnp.float32)
    shift = {1: 23, 2: 16, 4: 0}[scale.dtype.itemsize]
    return lax.bitcast_convert_type(scale.astype(jnp.uint32) << shift, jnp.float32)
