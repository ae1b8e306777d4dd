"""Products with a matrix in few bits that is dequantised to the same numbers as if it were read first."""

from jaxtyping import Array, Float

from kernels import dispatch
from kernels.coded import Coded


def coded_matmul(
    x: Float[Array, "*batch in"], w: Coded, *, implementation: str | None = None
) -> Float[Array, "*batch out"]:
    """Multiplies `x` by the transpose of `w`, (out, in), whose weights are rounded to the dtype of `x`.

    Sums are in float32, and rounded to the dtype of `x`. `w` has no gradient.

    `implementation` is one of

    - "reference": dequantises `w`, and multiplies. On a GPU or TPU it writes and reads all of `w` in the dtype of `x`.
    - "triton": for NVIDIA GPUs, and "tpu": Pallas kernels for up to 64 rows, which read `w` as it is.

    None chooses "triton" or "tpu" on their devices, and "reference" for what they refuse.

    Raises:
        ValueError: arguments contradict one another, or the implementation asked for cannot take them.
    """
    if w.dtype != x.dtype:
        raise ValueError(f"w is rounded to {w.dtype}, and x is {x.dtype}: they must be the same.")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"The rows of x have {x.shape[-1]} features, and w, (out, in), takes {w.shape[1]}.")
    return dispatch.run("coded_matmul", implementation, x, w)
