"""The best options of each row, and their scores, as in routers of mixtures of experts: signature and meaning."""

from jaxtyping import Array, Float

from kernels import dispatch
from kernels.stacked import Stacked
from kernels.top_k.shared import Best, Score


def top_k(
    logits: Float[Array, "*rows options"],
    k: int,
    *,
    score: Score | None = None,
    bias: Float[Array, " options"] | Stacked | None = None,
    groups: int = 1,
    kept: int = 1,
    normalise: float | None = None,
    implementation: str | None = None,
) -> Best:
    """Finds the k options with the highest scores in each row, in the order of `jax.lax.top_k`, ties included.

    Args:
        logits: of the options.
        k: the number of options to find.
        score: "softmax" or "sigmoid" of the logits, in float32; None: the logits themselves.
        bias: is added to the scores by which options are found, but not to those that are returned. It has no gradient.
            A layer of a stack (`kernels.stacked.Stacked`) is not copied by "triton".
        groups: the number of groups of neighbouring options, all of one size.
        kept: the number of groups in which options are found: those whose two highest scores have the largest sum.
        normalise: is added to the sum of the scores found, by which these are divided; None: they are not divided.
        implementation: is one of

            - "reference": plain JAX.
            - "triton": one kernel for up to 256 pairs of a row and an option found, of up to 1,024 options, for NVIDIA
              GPUs. On a CPU it is interpreted.

            None chooses "triton" on a GPU, and "reference" for what it refuses.

    Raises:
        ValueError: the groups do not have k options in all, or the implementation asked for cannot take the arguments.
    """
    each, rest = divmod(logits.shape[-1], groups)
    if rest or (groups > 1 and each < 2) or not 0 < kept <= groups or not 0 < k <= kept * each:
        raise ValueError(f"{k} of {logits.shape[-1]} options cannot be found in {kept} of {groups} groups.")
    return dispatch.run(
        "top_k", implementation, logits, bias, k=k, score=score, groups=groups, kept=kept, normalise=normalise
    )
