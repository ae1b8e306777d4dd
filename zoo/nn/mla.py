"""Multi-head latent attention (arXiv:2405.04434, section 2.1): its cache has one vector per token for all heads."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.stacked import read
from kernels.sums import spread
from zoo.nn.cache import LatentKV
from zoo.nn.clip import AbstractScalableAttention
from zoo.nn.layers import AbstractLinear, Linear, RMSNorm, project
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractMixtureConfig
from zoo.nn.rope import InterleavedRotary


class AbstractLatentConfig(AbstractMixtureConfig):
    """The config of a model with experts and latent attention."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentAttention(AbstractScalableAttention, AbstractMixer):
    """Attention of keys and values that are projections of one latent vector per token, `c_kv`.

    Queries and keys have features of each head, `nope`, and features `pe`, whose key all heads share. The cache holds
    `c_kv` and that key in the place of all heads' keys and values.
    """

    q_proj: AbstractLinear | None  # without q_lora_rank; the next three with it
    q_a_proj: AbstractLinear | None
    q_a_layernorm: RMSNorm | None
    q_b_proj: AbstractLinear | None
    kv_a_proj_with_mqa: AbstractLinear
    kv_a_layernorm: RMSNorm
    kv_b_proj: AbstractLinear
    o_proj: AbstractLinear
    rotary: InterleavedRotary | None = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    config: AbstractLatentConfig = eqx.field(static=True)

    def __init__(
        self,
        config: AbstractLatentConfig,
        *,
        q_rank: int | None,
        rotary: InterleavedRotary | None,
        scale: float,
        key: PRNGKeyArray,
    ):
        """Initialise random weights, in float32.

        Args:
            config: has the sizes.
            q_rank: features of the latent vector of queries; None: they are projected from x.
            rotary: rotates the qk_rope_head_dim features by positions; None: nothing does.
            scale: multiplies scores.
            key: random key.
        """
        c, (q_a, q_b, kv_a, kv_b, o) = config, jax.random.split(key, 5)
        self.config, self.rotary, self.scale = c, rotary, scale
        queries, eps = c.num_attention_heads * c.head_dim, 1e-6  # latents do not use rms_norm_eps
        self.q_proj = None if q_rank else Linear(c.hidden_size, queries, key=q_b)
        self.q_a_proj = Linear(c.hidden_size, q_rank, key=q_a) if q_rank else None
        self.q_a_layernorm = RMSNorm(q_rank, eps) if q_rank else None
        self.q_b_proj = Linear(q_rank, queries, key=q_b) if q_rank else None
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, key=kv_a)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), key=kv_b)
        self.o_proj = Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: LatentKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], LatentKV | None]:
        return self.attend(*self.projected(x), cache, at)

    def projected(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq features"], Float[Array, "batch seq latent"], Float[Array, "batch seq shared"]]:
        """Projects queries, the latents of keys and values, and the key that heads share; nothing is rotated yet."""
        rank = self.config.kv_lora_rank
        if self.q_proj is not None:
            q, latents = project(x, self.q_proj, self.kv_a_proj_with_mqa)
            c_kv, k_pe = jnp.split(latents, [rank], axis=-1)
            return q, self.kv_a_layernorm(c_kv), k_pe
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        q, latents = project(x, self.q_a_proj, self.kv_a_proj_with_mqa)
        q, c_kv = kernels.rms_norms((q, self.q_a_layernorm), (latents, self.kv_a_layernorm))
        return self.q_b_proj(q), c_kv, latents[..., rank:]

    def attend(
        self,
        q: Float[Array, "batch seq features"],
        c_kv: Float[Array, "batch seq latent"],
        k_pe: Float[Array, "batch seq shared"],
        cache: LatentKV | None,
        at: Tokens,
    ) -> tuple[Float[Array, "batch seq embed"], LatentKV | None]:
        """Rotates queries and keys, and attends with these queries to these latents and to those in the cache."""
        c = self.config
        heads = lambda y: y.reshape(*y.shape[:2], c.num_attention_heads, -1)
        after_nope = lambda y: jnp.split(y, [c.qk_nope_head_dim], axis=-1)
        q = heads(q)
        q_nope, q_pe = after_nope(q)
        if self.rotary is not None:
            q_pe, k_pe = self.rotary(q_pe, at), self.rotary(k_pe[:, :, None], at)[:, :, 0]
        cached = None  # all latents, those of the cache too
        k_at = at  # where the keys stand
        if cache is not None:
            cache, cached, k_at = cache.update(jnp.concatenate([c_kv, k_pe], axis=-1), at)
        if cached is not None and q.shape[1] <= kernels.FEW:
            # Move kv_b_proj, W, to the query and to the result: q (W c) = (q W) c, and mean(W c) = W mean(c). For few
            # tokens this is cheaper than projecting all cached latents, which now are keys and values of one head.
            w = self.kv_b_proj.weight if type(self.kv_b_proj) is Linear else self.kv_b_proj.matrix(q.dtype)
            q_latent = kernels.head_products(q, w, 0, c.qk_nope_head_dim, to_latent=True)
            q = jnp.concatenate([q_latent, q_pe], axis=-1)
            y = kernels.attention(q, cached, c.kv_lora_rank, at, k_at, scale=self.scale)
            y = kernels.head_products(y, w, c.qk_nope_head_dim, c.v_head_dim, to_latent=False)
        else:
            if cached is not None:
                c_kv, k_pe = jnp.split(read(cached)[:, :, 0], [c.kv_lora_rank], axis=-1)
            k_nope, v = after_nope(heads(self.kv_b_proj(c_kv)))
            k_pe = spread(k_pe[:, :, None], (*k_nope.shape[:3], c.qk_rope_head_dim))
            q, k = jnp.concatenate([q_nope, q_pe], axis=-1), jnp.concatenate([k_nope, k_pe], axis=-1)
            y = kernels.attention(q, k, v, at, k_at, scale=self.scale)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> LatentKV:
        c = self.config
        return LatentKV.init(layers, batch, length, c.kv_lora_rank, c.qk_rope_head_dim, dtype)

    def row_factors(self, factor: Float[Array, " heads"]) -> dict[str, Float[Array, " rows"]]:
        c, root = self.config, jnp.sqrt(factor)
        # A logit is q_nope k_nope + q_pe k_pe. Only k_nope is the head's own: all heads read k_pe.
        rows = lambda *parts: jnp.concatenate([jnp.repeat(a[:, None], n, axis=1) for a, n in parts], axis=1).reshape(-1)
        queries = rows((root, c.qk_nope_head_dim), (factor, c.qk_rope_head_dim))
        keys_and_values = rows((root, c.qk_nope_head_dim), (jnp.ones_like(factor), c.v_head_dim))
        return {"q_proj" if self.q_b_proj is None else "q_b_proj": queries, "kv_b_proj": keys_and_values}
