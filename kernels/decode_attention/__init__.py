"""Attention of one query or a few in each row of a batch over a cache: the signature and its meaning."""

from jaxtyping import Array, Float

from kernels.attention.entry import over_cache
from kernels.masks import Causal, Mask
from kernels.stacked import Stacked
from kernels.tokens import Tokens


def decode_attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"] | Stacked,
    v: Float[Array, "batch kv_seq kv_heads v_dim"] | Stacked | int,
    at: Tokens = Tokens(),  # noqa: B008 (a value)
    kv: Tokens | None = None,
    *,
    scale: float,
    mask: Mask = Causal(),  # noqa: B008 (a value)
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `attention` of one query or a few in each row of the batch, over a cache.

    Each row fills the cache to its own length. With a causal mask a query sees no slot after its position, so later
    slots may hold anything. If `kv` is None, a slot's index is its position. All else is as in `attention`.

    If k and v are layers of a cache, `kernels.stacked.Stacked`, all implementations but "reference" read in place the
    blocks that queries see, also in 8 bits.

    `implementation` is one of

    - "reference": reads every slot of the cache, and has every derivative.
    - "xla", "tpu", "tpu_heads", "triton": read only blocks with a key that is seen; "xla" reads all between
      the first and the last of them. They have first derivatives only, in reverse mode, which read every slot.
      "tpu_heads" is for caches that a TPU stores with heads before slots (`kernels.by_head`), "tpu" for others.

    None chooses as `attention` does.

    Raises:
        ValueError: as `attention` does.
    """
    kv = Tokens() if kv is None else kv
    return over_cache(
        q, k, v, at, kv, scale=scale, mask=mask, softcap=softcap, sinks=sinks, implementation=implementation
    )
