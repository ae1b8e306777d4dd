"""Fast operations on arrays: one signature each, several implementations, all tested against the operation's reference.

Each operation is a folder. `__init__` has the signature and its meaning, `reference` the definition in plain JAX. Each
other implementation is one more file, which `kernels.dispatch` finds there.

Under a mesh (`jax.set_mesh`) whose axes have the names in `kernels.mesh`, each device computes its share.

This package knows no model, and imports only jax, numpy and jaxtyping.
"""

from kernels.attention import FEW, attention
from kernels.cache_write import cache_write
from kernels.causal_conv import causal_conv
from kernels.coded import Coded
from kernels.coded_matmul import coded_matmul
from kernels.cross_entropy import cross_entropy
from kernels.decode_attention import decode_attention
from kernels.delta_rule import delta_rule
from kernels.dispatch import explain, prefer
from kernels.gated_products import gated_products
from kernels.head_products import head_products
from kernels.masks import Around, Causal, Chunk, Full, Mask, Spans, Window, sliding
from kernels.products import FEW_ROWS, apart, product, products
from kernels.quantized_matmul import fp8_matmul, int8_matmul
from kernels.ragged_dot import ragged_dot, rounded_ragged_dot
from kernels.rms_norms import rms_norms
from kernels.sort_rows import sort_rows
from kernels.stacked import Slots, Stacked
from kernels.tokens import Tokens, counted
from kernels.top_k import top_k


__all__ = [
    "FEW",
    "FEW_ROWS",
    "Around",
    "Causal",
    "Chunk",
    "Coded",
    "Full",
    "Mask",
    "Slots",
    "Spans",
    "Stacked",
    "Tokens",
    "Window",
    "apart",
    "attention",
    "cache_write",
    "causal_conv",
    "coded_matmul",
    "counted",
    "cross_entropy",
    "decode_attention",
    "delta_rule",
    "explain",
    "fp8_matmul",
    "gated_products",
    "head_products",
    "int8_matmul",
    "prefer",
    "product",
    "products",
    "ragged_dot",
    "rms_norms",
    "rounded_ragged_dot",
    "sliding",
    "sort_rows",
    "top_k",
]
