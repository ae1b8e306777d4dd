"""Rotary position embedding (RoFormer, arXiv:2104.09864), and how checkpoints scale its frequencies."""

import abc
import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels import Tokens, counted


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): divides every frequency by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: divides low frequencies by `factor`, keeps high ones, and interpolates between them.

    Low frequencies have wavelengths above `original_max_position_embeddings / low_freq_factor` tokens, high ones below
    `original_max_position_embeddings / high_freq_factor`.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is above high_freq_factor {self.high_freq_factor}."
            )

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
        if self.low_freq_factor == self.high_freq_factor:  # as Llama 4 Scout: a step, no ramp
            keep = (turns >= self.high_freq_factor).astype(np.float64)
        else:
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0, 1)
        return keep * frequencies + (1 - keep) * frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): divides frequencies below `beta_slow` turns in the original context by `factor`, keeps
    those above `beta_fast` turns, with a ramp over the dimensions between, and multiplies cos and sin.

    `truncate` rounds the ramp's ends to whole dimensions. Cos and sin are multiplied by `attention_factor`, or without
    one by what follows from `factor` and, for DeepSeek, `mscale` and `mscale_all_dim`.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        half = len(frequencies)
        low, high = (
            half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        # Where both ends meet, the ramp is a step, one thousandth wide as in transformers.
        stretch = np.clip((np.arange(half) - low) / ((high - low) or 0.001), 0, 1)
        return (1 - stretch) * frequencies + stretch * frequencies / self.factor, self.magnitude

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)
        return self.yarn_mscale(1.0)

    def yarn_mscale(self, m: float) -> float:
        """Returns YaRN's factor for a longer context, with `m` in front of the logarithm of `factor`."""
        return 0.1 * m * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling: in a sequence longer than `max_position_embeddings`, theta grows with the length.

    As in transformers, the length counts all tokens so far, and a cached key keeps the angle that it was cached with.
    So decoding differs a little from one pass over the whole sequence.
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float
    max_position_embeddings: int

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        return frequencies, 1.0

    def stretched(self, frequencies: np.ndarray, length: Int[Array, "batch 1"]) -> Float[Array, "batch half"]:
        """Returns the frequencies in sequences of these lengths."""
        half, beyond = len(frequencies), jnp.maximum(length / self.max_position_embeddings, 1) - 1
        powers = jnp.arange(half)[None] / max(half - 1, 1)  # the last frequency is divided by all of theta's growth
        return (1 + self.factor * beyond) ** -powers * frequencies[None]


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): divides each frequency by a factor of its own, and multiplies cos and sin by one.

    Sequences longer than `original_max_position_embeddings` have the factors of `long_factor`, others those of
    `short_factor`. As in transformers, a cached key keeps the angle that it was cached with.
    """

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        if {len(self.short_factor), len(self.long_factor)} != {len(frequencies)}:
            raise ValueError(f"short_factor and long_factor need {len(frequencies)} numbers each, half the head size.")
        grown = math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_max_position_embeddings))
        magnitude = grown if self.attention_factor is None else self.attention_factor
        return frequencies / np.array(self.short_factor), magnitude

    def stretched(self, frequencies: np.ndarray, length: Int[Array, "batch 1"]) -> Float[Array, "batch half"]:
        """Returns the frequencies in sequences of these lengths."""
        longer = frequencies * np.divide(self.short_factor, self.long_factor, dtype=np.float32)
        return jnp.where(length > self.original_max_position_embeddings, longer[None], frequencies[None])


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling


@dataclasses.dataclass(frozen=True)
class AbstractRotary(abc.ABC):
    """Rotates pairs of a head's features by angles `position * theta ** (-2 i / dim)`. Subclasses choose the pairs."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self):
        """Raises ValueError if these parameters give no usable angles."""
        usable = self.dim % 2 == 0 and self.dim <= 2**16  # or the list of frequencies could take all memory
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                frequencies, magnitude = self.frequencies() if usable else (np.zeros(1), 1.0)
            turns = (frequencies > 0) & (frequencies <= 2 * math.pi)  # more than a full turn tells nothing
            usable = np.all(turns) and magnitude >= 0
        except ArithmeticError:
            usable = False
        if not usable:
            raise ValueError(
                f"rope_theta={self.theta!r} and rope_scaling={self.scaling} give no angles for heads of {self.dim}."
            )

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Returns radians a position, float32 of shape `[dim / 2]`, and the factor on cos and sin.

        Where they depend on the length of the sequence, they are those of a short one.
        """
        frequencies = self.theta ** -(np.arange(self.dim // 2) / (self.dim // 2))
        frequencies, magnitude = self.scaling(frequencies, self.theta) if self.scaling else (frequencies, 1.0)
        return frequencies.astype(np.float32), magnitude

    def turns(
        self, positions: Int[Array, "batch seq *half"]
    ) -> tuple[Float[Array, "batch seq 1 half"], Float[Array, "batch seq 1 half"]]:
        """Computes cos and sin of every angle, in float32. A token has one position, or one for each frequency."""
        frequencies, magnitude = self.frequencies()
        if isinstance(self.scaling, DynamicScaling | LongRopeScaling):
            # For each row by itself, so that rows of a batch do not affect each other.
            frequencies = self.scaling.stretched(frequencies, jnp.max(positions, axis=1, keepdims=True) + 1)
        tokens, each = "bsh"[: positions.ndim], "h" if frequencies.ndim == 1 else "bh"
        angle = jnp.einsum(f"{tokens},{each}->bsh", positions.astype(jnp.float32), frequencies)[:, :, None]
        return magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]: ...


class Rotary(AbstractRotary):
    """Rotates the pairs `(x[i], x[i + dim / 2])`, as in Hugging Face checkpoints.

    Angles are computed in float32; cos and sin are cast to the dtype of `x` before they are used. Heads may have more
    features than `dim`: those after the first `dim` stay as they are (partial rotary positions).
    """

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        return rotated(x, *self.turns(coordinates(at, x.shape[1])))


@dataclasses.dataclass(frozen=True)
class ProportionalRotary(AbstractRotary):
    """`Rotary` of the first `turning` of the dim / 2 frequencies alone; the pairs of the others stay as they are."""

    turning: int = 0

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        cos, sin = (turn[..., : self.turning] for turn in self.turns(coordinates(at, x.shape[1])))
        still = (*((0, 0),) * 3, (0, self.dim // 2 - self.turning))
        return rotated(x, jnp.pad(cos, still, constant_values=1), jnp.pad(sin, still))


@dataclasses.dataclass(frozen=True)
class MultiAxisRotary(AbstractRotary):
    """`Rotary` where tokens may have coordinates of several axes, `Tokens.rotary` [batch, seq, axes], as the features
    of images have (Qwen2-VL, arXiv:2409.12191). Others stand at the same place along all axes.

    The axes take turns, frequency by frequency, as in Qwen3-VL: of the first three, one is of each axis. An axis has no
    more of them than `sections` says, but the first, which has all that the others leave.
    """

    sections: tuple[int, ...] = ()

    @property
    def axes(self) -> Int[np.ndarray, " half"]:
        """The axis of each frequency."""
        axes = np.zeros(self.dim // 2, int)
        for axis, count in enumerate(self.sections[1:], start=1):
            axes[axis : count * len(self.sections) : len(self.sections)] = axis
        return axes

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        if at.rotary is not None and at.rotary.ndim == 3:
            return rotated(x, *self.turns(at.rotary[..., self.axes]))
        return rotated(x, *self.turns(coordinates(at, x.shape[1])))


class InterleavedRotary(AbstractRotary):
    """Rotates the pairs `(x[2 i], x[2 i + 1])`, in float32, as Meta's and DeepSeek's own code does."""

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        cos, sin = self.turns(coordinates(at, x.shape[1]))
        a, b = (x[..., start::2].astype(jnp.float32) for start in (0, 1))
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape).astype(x.dtype)


def rotated(
    x: Float[Array, "batch seq heads dim"],
    cos: Float[Array, "rows seq 1 half"],
    sin: Float[Array, "rows seq 1 half"],
) -> Float[Array, "batch seq heads dim"]:
    """Rotates the pairs `(x[i], x[i + half])` of each head, in its dtype, and leaves what comes after them."""
    cos, sin, half = cos.astype(x.dtype), sin.astype(x.dtype), cos.shape[-1]
    a, b, *rest = jnp.split(x, [half, 2 * half][: 1 + (x.shape[-1] > 2 * half)], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1)


def coordinates(at: Tokens, seq: int) -> Int[Array, "batch seq"]:
    """Returns the coordinates by which tokens along one axis are rotated: their positions, or `at.rotary` if given.

    Raises:
        ValueError: if they have rotary coordinates of several axes.
    """
    if at.rotary is not None and at.rotary.ndim == 3:
        raise ValueError("These rotary embeddings rotate by positions, not by coordinates of several axes.")
    given = at.positions if at.rotary is None else at.rotary
    if given is None and at.segments is not None:
        return counted(at.segments)
    return jnp.arange(seq)[None] if given is None else given
