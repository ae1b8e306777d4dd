"""Cross-entropy over a large vocabulary, with its gradient: the signature and its meaning."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from kernels import dispatch


def cross_entropy(
    unembed: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]],
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Int[Array, "batch seq"],
    *,
    chunk: int = 2048,
    z_loss: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Sums the cross-entropy, in nats, of the targets whose `mask` is not 0. The others add nothing, even if NaN.

    `unembed` maps features to logits: the product with a matrix, and whatever else a model does there, such as a
    softcap. Arrays that `unembed` closes over get gradients, too.

    Returns the sum to minimise, to which every target also adds `z_loss * log(Z)**2` (Z: the sum of the exponentials
    of its logits; PaLM, arXiv:2204.02311, section 5), and two sums for metrics, without gradients: `loss`, without that
    term, and `correct`, the number of targets whose logit is the largest.

    `implementation` is one of

    - "xla": calls `unembed` for about `chunk` tokens at a time on each device, the same positions of every sequence.
      It computes gradients in the same pass, so no product is computed twice. It has first derivatives only, in
      reverse mode.
    - "reference": computes the logits of all tokens at once. It has every derivative, and computes float64 in float64.

    None means "xla", or "reference" for arguments that "xla" refuses.

    Raises:
        ValueError: the implementation asked for cannot take these arguments.
    """
    minimised, loss, correct = dispatch.run(
        "cross_entropy", implementation, unembed, x, targets, mask != 0,
        chunk=chunk, z_loss=z_loss,
    )  # fmt: skip
    return minimised, {"loss": jax.lax.stop_gradient(loss), "correct": jax.lax.stop_gradient(correct)}
