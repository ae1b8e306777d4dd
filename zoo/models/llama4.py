"""Llama 4 Scout and Maverick (Meta, 2025), which take images: each tile of one becomes 144 tokens.

Three of four layers have rotary positions and attend within the token's chunk of 8,192 positions. Every fourth has no
positional encoding, attends to all tokens before it, and scales its queries up as the context grows (arXiv:2501.19399).
The router picks one expert, beside a shared one, and its score multiplies the expert's input, not its output. Scout has
experts in every layer, and norms its rotated queries and keys. Maverick has experts in every second layer, and no such
norms. To the text model a tile's tokens are like others: each sees only those before it. The vision tower is an
optional part: loaded without parts=("vision",), the model is the text model alone, and saved as one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import pick, scaled
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, rms_normalized, swiglu
from zoo.nn.model import AbstractMixtureConfig, AbstractVisionModel, Family, Images, OneOf, Released
from zoo.nn.rope import InterleavedRotary, Llama3Scaling, RopeScaling, coordinates
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVision, AbstractVisionConfig, AbstractVisionKeys, Nested, by_parts
from zoo.vision.processors.llama4 import Llama4
from zoo.vision.towers import llama4 as tiles


@dataclasses.dataclass(frozen=True)
class VisionConfig(AbstractVisionKeys):
    """The keys of a multimodal config.json beside its `text_config`."""

    tower: tiles.Config
    boi_token_index: int = 200_080
    eoi_token_index: int = 200_081
    image_token_index: int = 200_092


class Kind(NamedTuple):
    """The kind of a layer."""

    rotates: bool  # whether it has rotary positions
    chunk: int | None  # the positions of a chunk, within which it attends; None: it attends to all before a token
    has_experts: bool


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig, AbstractVisionConfig):
    vocab_size: int = 202_048
    hidden_size: int = 5120
    intermediate_size: int = 8192  # width of each expert, and of the shared one
    intermediate_size_mlp: int = 16_384  # width of the MLP in layers without experts
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int = 8
    head_dim: int = 128
    num_local_experts: int = 16
    max_position_embeddings: int = 131_072
    interleave_moe_layer_step: int = 1
    moe_layers: tuple[int, ...] | None = None  # None: every interleave_moe_layer_step-th
    no_rope_layer_interval: int = 4
    no_rope_layers: tuple[int, ...] = ()  # 0: no rotary positions; (): 0 at each no_rope_layer_interval-th
    layer_types: tuple[str, ...] = ()  # (): "chunked_attention" with rotary positions, "full_attention" without
    attention_chunk_size: int | None = 8192
    num_experts_per_tok: int = 1
    attn_temperature_tuning: bool = True
    attn_scale: float = 0.1
    floor_scale: int = 8192
    use_qk_norm: bool = True
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    vision: VisionConfig | None = None

    def __post_init__(self):
        # Fill in the lists as transformers does, so that equivalent configs compare equal.
        layers, of = range(1, self.num_hidden_layers + 1), ("full_attention", "chunked_attention")
        rotary = self.no_rope_layers or tuple(int(n % self.no_rope_layer_interval > 0) for n in layers)
        kinds = self.layer_types or tuple(of[bool(rotates)] for rotates in rotary)
        if self.moe_layers is None:
            moe_layers = tuple(n - 1 for n in layers if n % self.interleave_moe_layer_step == 0)
            object.__setattr__(self, "moe_layers", moe_layers)
        object.__setattr__(self, "no_rope_layers", rotary)
        object.__setattr__(self, "layer_types", kinds)
        if min(len(rotary), len(kinds)) < len(layers):
            raise ValueError(f"no_rope_layers or layer_types has fewer entries than the {len(layers)} layers.")
        if unknown := set(kinds) - set(of):
            raise ValueError(f"layer_types has {', '.join(sorted(unknown))}; llama4 has {' and '.join(of)}.")

    @property
    def layers(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        chunks = [self.attention_chunk_size if kind == "chunked_attention" else None for kind in self.layer_types]
        kind = lambda n: Kind(self.no_rope_layers[n] != 0, chunks[n], n in (self.moe_layers or ()))
        return tuple(map(kind, range(self.num_hidden_layers)))

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.layers[layer].chunk

    def attention_products(self, layer: int, seq: int) -> float:
        chunk = min(self.window(layer) or seq, seq)
        chunks, rest = divmod(seq, chunk)  # a token attends to its chunk, up to itself
        keys = (chunks * chunk**2 + rest**2) / (2 * seq)
        return self.num_attention_heads * 2 * self.head_dim * keys  # 2: scores, values


# fmt: off
VISION = VisionConfig(tiles.Config(1408, 5632, 34, 16, image_size=336, vision_output_dim=4096))
SCOUT: dict[str, Any] = dict(rope_scaling=Llama3Scaling(16.0, 1.0, 1.0, 8192), vision=VISION)
MAVERICK: dict[str, Any] = dict(interleave_moe_layer_step=2, use_qk_norm=False, vision=VISION)
#                       vocab hidden expert    mlp layers heads kv head experts positions
LLAMA4_SCOUT    = Config(202048, 5120, 8192, 16384,    48,   40, 8, 128,    16, 10485760, **SCOUT)
LLAMA4_MAVERICK = Config(202048, 5120, 8192, 16384,    48,   40, 8, 128,   128,  1048576, **MAVERICK)

CONFIGS = {
    "llama4-scout":             Released(LLAMA4_SCOUT,    "meta-llama/Llama-4-Scout-17B-16E"),
    "llama4-scout-instruct":    Released(LLAMA4_SCOUT,    "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "llama4-maverick":          Released(LLAMA4_MAVERICK, "meta-llama/Llama-4-Maverick-17B-128E"),
    "llama4-maverick-instruct": Released(LLAMA4_MAVERICK, "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
}
# fmt: on


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Scale queries up with their position, so that the softmax over a very long context stays sharp."""

    scale: float
    floor: int

    def __call__(self, q: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        positions = jnp.maximum(coordinates(at, q.shape[1]), 0)
        factor = 1 + self.scale * jnp.log1p(((positions + 1) // self.floor).astype(jnp.float32))
        return (q.astype(jnp.float32) * factor[:, :, None, None]).astype(q.dtype)


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    rotary: InterleavedRotary | None = eqx.field(static=True)
    norm_eps: float | None = eqx.field(static=True)  # None: no norms of queries and keys
    temperature: Temperature | None = eqx.field(static=True)

    def __init__(self, config: Config, kind: Kind, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.chunk = kind.chunk
        self.rotary = InterleavedRotary(c.head_dim, c.rope_theta, c.rope_scaling) if kind.rotates else None
        self.norm_eps = c.rms_norm_eps if kind.rotates and c.use_qk_norm else None
        tuned = c.attn_temperature_tuning and not kind.rotates
        self.temperature = Temperature(c.attn_scale, c.floor_scale) if tuned else None
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        k_at = at  # where the keys stand
        if self.rotary is not None:
            q, k = self.rotary(q, at), self.rotary(k, at)
        if self.norm_eps is not None:
            q, k = rms_normalized(q, self.norm_eps), rms_normalized(k, self.norm_eps)
        if self.temperature is not None:
            q = self.temperature(q, at)
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        mask = kernels.Causal() if self.chunk is None else kernels.Causal() & kernels.Chunk(self.chunk)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, embed: int, width: int, *, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = Linear(embed, width, key=gate)
        self.up_proj = Linear(embed, width, key=up)
        self.down_proj = Linear(width, embed, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class MoE(eqx.Module):
    router: Router
    experts: moe.GatedExperts
    shared_expert: MLP
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        router, experts, shared = jax.random.split(key, 3)
        self.router = Router(config.hidden_size, config.num_local_experts, key=router)
        self.experts = moe.GatedExperts(
            config.num_local_experts, config.hidden_size, config.intermediate_size, key=experts
        )
        self.shared_expert = MLP(config.hidden_size, config.intermediate_size, key=shared)
        self.top_k = config.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.router(x)
        scores = jax.nn.sigmoid(logits.astype(jnp.float32))
        chosen = moe.choose(logits, self.top_k).indices
        weights = pick(scores, chosen).astype(x.dtype)
        y = kernels.apart(self.shared_expert(x))  # see `moe.with_shared`
        for i in range(self.top_k):  # weights scale the experts' inputs, so each choice has its own rows
            choice = chosen[..., i : i + 1]
            rows, ones = scaled(x, weights[..., i : i + 1]), jnp.ones_like(choice, x.dtype)
            y = y + moe.dispatch(self.experts, rows, choice, ones, lambda experts: experts.down_proj)
        probability = scores / jnp.sum(scores, axis=-1, keepdims=True)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    feed_forward: MLP | MoE

    def __init__(self, config: Config, kind: Kind, *, key: PRNGKeyArray):
        c, (attention, feed_forward) = config, jax.random.split(key)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, kind, key=attention)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if kind.has_experts:
            self.feed_forward = MoE(c, key=feed_forward)
        else:
            self.feed_forward = MLP(c.hidden_size, c.intermediate_size_mlp, key=feed_forward)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y, feed_forward = self.post_attention_layernorm(x), self.feed_forward
        y, routing = feed_forward(y, at.segments) if isinstance(feed_forward, MoE) else (feed_forward(y), None)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.chunk)


class Projector(eqx.Module):
    """Makes the tower's features those of tokens."""

    linear_1: AbstractLinear

    def __init__(self, config: VisionConfig, hidden_size: int, *, key: PRNGKeyArray):
        self.linear_1 = Linear(config.tower.vision_output_dim, hidden_size, key=key)

    def __call__(self, x: Float[Array, "tiles features dim"]) -> Float[Array, "tiles features embed"]:
        return self.linear_1(x)


class Vision(AbstractVision):
    tower: tiles.Tower
    projector: Projector
    processor: ClassVar[type[Llama4]] = Llama4

    def __init__(self, config: VisionConfig, hidden_size: int, *, key: PRNGKeyArray):
        tower, projector = jax.random.split(key)
        self.tower = tiles.Tower(config.tower, key=tower)
        self.projector = Projector(config, hidden_size, key=projector)

    def __call__(
        self, patches: Float[Array, "tiles patches pixels"], grids: Int[Array, "tiles 2"]
    ) -> Float[Array, "tiles features embed"]:
        return self.projector(self.tower(patches))


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: Vision | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, vision) = by_parts(config, parts), jax.random.split(key, 4)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, c.layers[n], key=key), c.layers, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else Vision(c.vision, c.hidden_size, key=vision)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x, cache, reports = self.layers(self.embed(tokens, images), cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


NESTED = Nested(VisionConfig, names={"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"})
REPEATED = ("dtype", "torch_dtype", "transformers_version")  # in text_config and beside it


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested config.json (with a `text_config`), and drop `nope_layer_interval`, a key of Maverick's, if it
    says the default of `no_rope_layer_interval`.

    transformers ignores that key, so with another value it is skipped with a warning.

    Raises:
        ValueError: from `Nested.flat`.
    """
    return {key: value for key, value in NESTED.flat(hub).items() if (key, value) != ("nope_layer_interval", 4)}


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `standard_form`."""
    return {key: hub[key] for key in REPEATED if key in hub} | NESTED.nested(hub)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Llama 4",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("llama4", "llama4_text"),
    partition_rules={
        **{f"vision.tower.{path}": spec for path, spec in tiles.PARTITION_RULES.items()},
        "vision.projector.linear_1": P("tensor", "fsdp"),
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.router.weight": P(),
        "layers.*.experts.gate_up_proj": P("expert", "tensor", "fsdp"),
        "layers.*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "vision.tower.layers.*": "vision_model.model.layers.{}",
        "vision.tower.patch_embedding.*": "vision_model.patch_embedding.linear.{}",
        "vision.tower.vision_adapter.*": "vision_model.vision_adapter.mlp.{}",
        "vision.tower.*": "vision_model.{}",
        "vision.projector.*": "multi_modal_projector.{}",
        "lm_head.*": "lm_head.{}",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{}^T",  # ^T: the last two axes are swapped
        "*": "model.{}",
    },
    # In files with a vision tower, the text model's names begin otherwise.
    beginnings={"vision": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}},
    # A copy of another tensor, to which it must be equal; and what only the part "vision" needs (None).
    redundant={"lm_head.weight": "model.embed_tokens.weight", "vision_model.*": None, "multi_modal_projector.*": None},
    parts={"vision": "the vision tower, so that the model takes images"},
    implied={
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": OneOf(["silu", "swish"]),
        "for_llm_compressor": False,
    },
    standard_form=standard_form,
    published_form=published_form,
    experts_swapped_in_peft=True,
)
