"""A selection of the GPU kernels, compiled for an RTX 4090: they fit in its 99 KB, and spill no register.

The modules for the H200 have all shapes. This one has a shape for each row of sizes that other cards have for
themselves.
"""

import jax
import jax.numpy as jnp

from kernels.ragged_dot import triton
from tests.kernels import test_compile_gpu, test_compile_matmul_gpu
from tests.kernels.experts import Product, training
from tests.kernels.gpu import Case, complaints, needs_compiler
from tests.kernels.test_compile_gpu import BACKWARD, OF_WIDE_HEADS


def attention(card: str, dim: int, backward=BACKWARD, dtype=jnp.bfloat16, **options) -> Case:
    shapes = dict(heads=4, kv_heads=2, seq=2048, megabytes=200)
    return in_dtype(
        dtype, test_compile_gpu.attention(dim=dim, packed=True, backward=backward, **shapes | options), card
    )


def ragged_dot(card: str, product: Product) -> Case:
    names = ("ragged_dot_out", "ragged_dot_dx", "ragged_dot_dw")
    return Case(training(triton.ragged_dot), product.arguments(), names, temporary=64 << 10, card=card)


def in_dtype(dtype, case: Case, card: str) -> Case:
    """Returns the case with this dtype in place of bfloat16. Tensor cores do not multiply float32."""
    change = lambda x: jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == jnp.bfloat16 else x.dtype)
    hgmma = () if dtype == jnp.float32 else case.hgmma
    return case._replace(arguments=jax.tree.map(change, case.arguments), hgmma=hgmma, card=card)


def dq_alone(case: Case) -> Case:
    """Returns the case without the kernels of dk and dv, which XLA drops where their results are unused."""
    return case._replace(function=lambda *arguments: case.function(*arguments)[0])


def int8(card: str, rows: int) -> Case:
    return test_compile_matmul_gpu.case(jnp.int8, "channel", rows, 1024, 1024, hgmma=())._replace(card=card)


# Sums over up to 1,024 rows a group, and over more; matrices with up to 1,024 columns, and with more.
SHALLOW, DEEP = Product(16, 4096, 768, 512), Product(4, 8192, 2048, 1536)
CASES = {
    "D64": attention("4090", 64),
    "D128, float16": attention("4090", 128, dtype=jnp.float16),
    "D192": attention("4090", 192, v_dim=128),
    "D256": attention("4090", 256, OF_WIDE_HEADS, softcap=50.0),
    "D256, float32, dq": dq_alone(attention("4090", 256, OF_WIDE_HEADS, dtype=jnp.float32)),
    "ragged_dot, shallow": ragged_dot("4090", SHALLOW),
    "ragged_dot, deep": ragged_dot("4090", DEEP),
    "decode": test_compile_gpu.decode(heads=8, kv_heads=2, dim=128, batch=4)._replace(card="4090"),
    "weights only": int8("4090", 16),
}


@needs_compiler
def test_gpu():
    assert not complaints(__file__)
