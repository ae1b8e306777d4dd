"""The gated delta rule (arXiv:2412.06464) as layers run it: a matrix for each head, whose size does not grow with the
text, behind a short convolution."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kernels
from kernels import Tokens
from kernels.delta_rule.shared import state_products
from zoo.nn.fields import fill_layers
from zoo.nn.layers import l2_normalized
from zoo.nn.model import AbstractConfig, causal_keys
from zoo.nn.recurrent import RecurrentCache, State, recur


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """The recurrence of a layer whose heads have these sizes (section 3 of the paper):

        S_t = A_t S_{t-1} + beta_t k_t (v_t - (A_t S_{t-1})^T k_t)^T,        y_t = S_t^T q_t / sqrt(key_dim)

    q, k and v come from a short convolution and a silu; q and k have length one. Value heads share key heads in groups
    of neighbours. A family projects its features to the inputs, in the order in which its checkpoints have them.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # tokens that the convolution sees, its own among them

    @property
    def keys(self) -> int:
        """The number of features of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The number of features of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of features of all queries, keys and values: the channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def products(self) -> float:
        """Multiplications, each with its addition, of one token with the states of all heads."""
        return float(self.value_heads * state_products(self.key_dim, self.value_dim, erase=True))

    def __call__(
        self,
        qkv: Float[Array, "batch seq channels"],
        decay: Float[Array, "batch seq v_heads"] | Float[Array, "batch seq v_heads dim"],
        beta: Float[Array, "batch seq v_heads"],
        cache: RecurrentCache | None,
        at: Tokens,
        *,
        conv: Float[Array, "channels width"],
        split: Callable[[Float[Array, "batch seq channels"]], Sequence[Float[Array, "batch seq _ _"]]],
    ) -> tuple[Float[Array, "batch seq v_heads v_dim"], RecurrentCache | None]:
        """Runs the recurrence over tokens, and returns the outputs of its heads and the new cache.

        Args:
            qkv: queries, keys and values, before the convolution, in any order.
            decay: the logarithm of A_t, of each head or of each channel of its keys.
            beta: how much is written.
            cache: from `init_cache`. None: these tokens are all there is.
            at: where the tokens stand; those of a row are in order.
            conv: the convolution's weights, in the order of `qkv`.
            split: splits channels in that order into q, k and v, each [batch, seq, heads, features].
        """

        def step(
            inputs: tuple[Array, Array, Array], state: State, tail: Array | None, at: Tokens
        ) -> tuple[Array, State, Array]:
            qkv, decay, beta = inputs
            qkv, last = kernels.causal_conv(qkv, conv, at, tail=tail)
            q, k, v = split(jax.nn.silu(qkv))
            q, k, scale = l2_normalized(q), l2_normalized(k), self.key_dim**-0.5
            y, state = kernels.delta_rule(q, k, v, decay, beta, at, scale=scale, state=state)
            return y, state, last

        return recur(step, (qkv, decay, beta), cache, at)

    def init_cache(self, layers: int, batch: int, dtype: DTypeLike) -> RecurrentCache:
        """Makes an empty cache of so many layers. `dtype` is that of the convolution's inputs."""
        state = self.value_heads, self.key_dim, self.value_dim
        return RecurrentCache.init(layers, batch, state, (self.width - 1, self.channels), dtype)


class AbstractDeltaConfig(AbstractConfig):
    """The config of a model in which some layers have a gated delta rule, and the others attention."""

    full_attention_interval: int
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...]  # (): by full_attention_interval
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    def __post_init__(self) -> None:
        """Fills in `layer_types` if it is empty, so that equivalent configs compare equal.

        Raises:
            ValueError: if it has too few entries or too many, or if key heads cannot be shared evenly.
        """
        every = self.full_attention_interval
        fill_layers(self, "layer_types", lambda n: "linear_attention" if (n + 1) % every else "full_attention")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} is no multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}."
            )

    @property
    def delta(self) -> GatedDelta:
        """The recurrence of the linear layers."""
        heads = self.linear_num_key_heads, self.linear_num_value_heads
        return GatedDelta(*heads, self.linear_key_head_dim, self.linear_value_head_dim, self.linear_conv_kernel_dim)

    def attention_products(self, layer: int, seq: int) -> float:
        if self.layer_types[layer] == "linear_attention":
            return self.delta.products
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values
