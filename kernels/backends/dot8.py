"""Products of blocks in 8 bits for the Pallas-Triton kernels, in Triton's own instructions.

They are in a file of their own because they use more of Pallas-Triton than `kernels.backends.triton` does, including
names that JAX keeps private.
"""

from typing import Any

import jax.extend
import jax.numpy as jnp
from jax import core, lax
from jax._src.pallas.triton import lowering
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect as tt
from jaxtyping import Array


IMPRECISE = 128  # most products of float8 that are summed before they are added to a float32


def dot8(x: Array, w: Array) -> Array:
    """Multiplies, summing over the last axes: int8 in int32, and float8 in float32."""
    return _dot8_primitive.bind(x, w)


def _dot8_type(x: Any, w: Any) -> Any:
    return core.ShapedArray((x.shape[0], w.shape[0]), jnp.int32 if x.dtype == jnp.int8 else jnp.float32)


def _dot8_in_jax(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=_dot8_type(x, w).dtype)


def _dot8_in_triton(context: Any, x: Any, w: Any) -> Any:
    (out,) = context.avals_out
    zeros = lowering._zeros(ir.RankedTensorType.get(out.shape, lowering._dtype_to_ir_type(out.dtype)))
    return tt.dot(x, tt.trans(w, (1, 0)), zeros, max_num_imprecise_acc=IMPRECISE)


# Triton uses Hopper's float8 instructions only if it may accumulate `max_num_imprecise_acc` products before it adds
# them to a float32. JAX's own lowering cannot set that: its products are converted to float16, at half the speed.
_dot8_primitive = jax.extend.core.Primitive("dot8")
_dot8_primitive.def_abstract_eval(_dot8_type)
mlir.register_lowering(_dot8_primitive, mlir.lower_fun(_dot8_in_jax, multiple_results=False))
lowering.register_lowering(_dot8_primitive)(_dot8_in_triton)
