"""Qwen3-VL (arXiv:2511.21631): Qwen3's decoder, dense or a mixture of experts, which sees images and videos.

Features of images are turned by three rotary coordinates, which the frequencies of each head share in turn. Images keep
their shape, and take as many tokens as it has. What the tower, the part "vision", gives in between is added after the
first layers (DeepStack). Without the part it is the text model, and saved as one: text alone has no use for the three
coordinates.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.model import AbstractMixtureConfig, AbstractVisionModel, Family, Images, OneOf, Released, causal_keys
from zoo.nn.rope import MultiAxisRotary, RopeScaling
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVisionConfig, by_parts
from zoo.vision.towers import qwen3_vl


# config.json's model_type of a dense model and of a mixture, and what transformers calls each without and with a tower.
ARCHITECTURES = {
    "qwen3_vl_text": ("Qwen3VLTextModel", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe_text": ("Qwen3VLMoeTextModel", "Qwen3VLMoeForConditionalGeneration"),
}


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig, AbstractVisionConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP in dense layers
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    max_position_embeddings: int = 128_000
    num_experts: int = 0  # 0, and the next two too: a dense model
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    vision: qwen3_vl.VisionConfig | None = None
    model_type: str = ""  # this and the next: those of a dense model or of a mixture
    architectures: tuple[str, ...] = ()

    def __post_init__(self):
        mixture = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        model_type = self.model_type or tuple(ARCHITECTURES)[self.num_experts > 0]
        if model_type not in ARCHITECTURES or set(self.architectures) - set(ARCHITECTURES[model_type]):
            known = "; ".join(f"{kind} with {' or '.join(names)}" for kind, names in ARCHITECTURES.items())
            raise ValueError(
                f"model_type={model_type!r} with architectures={list(self.architectures)} is not implemented: {known}."
            )
        for name in mixture:
            if (getattr(self, name) > 0) != (model_type == "qwen3_vl_moe_text"):
                needs = "has not" if getattr(self, name) else "needs"
                raise ValueError(f"{name}={getattr(self, name)}, which {model_type} {needs}.")
        object.__setattr__(self, "model_type", model_type)
        object.__setattr__(self, "architectures", ARCHITECTURES[model_type][:1])
        if self.vision is not None:
            self.vision.check(self.hidden_size)

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        step = self.decoder_sparse_step
        return self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % step == 0


# fmt: off
#                        hidden   mlp  depth  heads
SMALL = qwen3_vl.Config(  1024,  4096,    24,    16, deepstack_visual_indexes=(5, 11, 17))
LARGE = qwen3_vl.Config(  1152,  4304,    27,    16, deepstack_visual_indexes=(8, 16, 24))
VISION = qwen3_vl.VisionConfig(  # what a silent config.json means
    LARGE, mrope_section=(24, 20, 20), image_token_id=151_655, video_token_id=151_656, vision_start_token_id=151_652,
    vision_end_token_id=151_653,
)
vision_of = lambda tower, width: dataclasses.replace(VISION, tower=dataclasses.replace(tower, out_hidden_size=width))
QWEN: dict[str, Any] = dict(max_position_embeddings=262_144, rope_theta=5_000_000.0)
TIED: dict[str, Any] = QWEN | dict(tie_word_embeddings=True)
MOE_30B: dict[str, Any] = QWEN | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
MOE_235B: dict[str, Any] = MOE_30B | dict(moe_intermediate_size=1536)
#                       vocab hidden    mlp  layers heads kv
QWEN3_VL_2B   = Config(151936,  2048,  6144,    28,   16, 8, vision=vision_of(SMALL, 2048), **TIED)
QWEN3_VL_4B   = Config(151936,  2560,  9728,    36,   32, 8, vision=vision_of(SMALL, 2560), **TIED)
QWEN3_VL_8B   = Config(151936,  4096, 12288,    36,   32, 8, vision=vision_of(LARGE, 4096), **QWEN)
QWEN3_VL_32B  = Config(151936,  5120, 25600,    64,   64, 8, vision=vision_of(LARGE, 5120), **QWEN)
QWEN3_VL_30B  = Config(151936,  2048,  6144,    48,   32, 4, vision=vision_of(LARGE, 2048), **MOE_30B)
QWEN3_VL_235B = Config(151936,  4096, 12288,    94,   64, 4, vision=vision_of(LARGE, 4096), **MOE_235B)

CONFIGS = {
    "qwen3-vl-2b":                     Released(QWEN3_VL_2B,   "Qwen/Qwen3-VL-2B-Instruct"),
    "qwen3-vl-2b-fp8":                 Released(QWEN3_VL_2B,   "Qwen/Qwen3-VL-2B-Instruct-FP8"),
    "qwen3-vl-2b-thinking":            Released(QWEN3_VL_2B,   "Qwen/Qwen3-VL-2B-Thinking"),
    "qwen3-vl-2b-thinking-fp8":        Released(QWEN3_VL_2B,   "Qwen/Qwen3-VL-2B-Thinking-FP8"),
    "qwen3-vl-4b":                     Released(QWEN3_VL_4B,   "Qwen/Qwen3-VL-4B-Instruct"),
    "qwen3-vl-4b-fp8":                 Released(QWEN3_VL_4B,   "Qwen/Qwen3-VL-4B-Instruct-FP8"),
    "qwen3-vl-4b-thinking":            Released(QWEN3_VL_4B,   "Qwen/Qwen3-VL-4B-Thinking"),
    "qwen3-vl-4b-thinking-fp8":        Released(QWEN3_VL_4B,   "Qwen/Qwen3-VL-4B-Thinking-FP8"),
    "qwen3-vl-8b":                     Released(QWEN3_VL_8B,   "Qwen/Qwen3-VL-8B-Instruct"),
    "qwen3-vl-8b-fp8":                 Released(QWEN3_VL_8B,   "Qwen/Qwen3-VL-8B-Instruct-FP8"),
    "qwen3-vl-8b-thinking":            Released(QWEN3_VL_8B,   "Qwen/Qwen3-VL-8B-Thinking"),
    "qwen3-vl-8b-thinking-fp8":        Released(QWEN3_VL_8B,   "Qwen/Qwen3-VL-8B-Thinking-FP8"),
    "qwen3-vl-32b":                    Released(QWEN3_VL_32B,  "Qwen/Qwen3-VL-32B-Instruct"),
    "qwen3-vl-32b-fp8":                Released(QWEN3_VL_32B,  "Qwen/Qwen3-VL-32B-Instruct-FP8"),
    "qwen3-vl-32b-thinking":           Released(QWEN3_VL_32B,  "Qwen/Qwen3-VL-32B-Thinking"),
    "qwen3-vl-32b-thinking-fp8":       Released(QWEN3_VL_32B,  "Qwen/Qwen3-VL-32B-Thinking-FP8"),
    "qwen3-vl-30b-a3b":                Released(QWEN3_VL_30B,  "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen3-vl-30b-a3b-fp8":            Released(QWEN3_VL_30B,  "Qwen/Qwen3-VL-30B-A3B-Instruct-FP8"),
    "qwen3-vl-30b-a3b-thinking":       Released(QWEN3_VL_30B,  "Qwen/Qwen3-VL-30B-A3B-Thinking"),
    "qwen3-vl-30b-a3b-thinking-fp8":   Released(QWEN3_VL_30B,  "Qwen/Qwen3-VL-30B-A3B-Thinking-FP8"),
    "qwen3-vl-235b-a22b":              Released(QWEN3_VL_235B, "Qwen/Qwen3-VL-235B-A22B-Instruct"),
    "qwen3-vl-235b-a22b-fp8":          Released(QWEN3_VL_235B, "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8"),
    "qwen3-vl-235b-a22b-thinking":     Released(QWEN3_VL_235B, "Qwen/Qwen3-VL-235B-A22B-Thinking"),
    "qwen3-vl-235b-a22b-thinking-fp8": Released(QWEN3_VL_235B, "Qwen/Qwen3-VL-235B-A22B-Thinking-FP8"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: MultiAxisRotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        sections = c.vision.mrope_section if c.vision else ()
        self.rotary = MultiAxisRotary(c.head_dim, c.rope_theta, c.rope_scaling, sections)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.rotary(self.q_norm(q), at)
        k = self.rotary(self.k_norm(k), at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class MoE(eqx.Module):
    gate: Router
    experts: moe.GatedExperts
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts) = config, jax.random.split(key)
        self.gate = Router(c.hidden_size, c.num_experts, key=gate)
        self.experts = moe.GatedExperts(c.num_experts, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.top_k = c.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.gate(x)
        probability, weights, chosen = moe.choose(logits, self.top_k, "softmax", normalise=0.0)
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.down_proj)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MoE | MLP

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config, key=mlp) if config.sparse(layer) else MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        a = self.self_attn
        return KV.init(layers, batch, length, a.k_proj.shape[-2] // a.head_dim, a.head_dim, dtype)


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: qwen3_vl.Tower | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, tower) = by_parts(config, parts), jax.random.split(key, 4)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        deep = range(len(c.vision.tower.deepstack_visual_indexes) if c.vision else 0)
        # The first layers, after which DeepStack adds something, are kinds of their own: none is in a run that repeats.
        kinds = [n if n in deep else f"sparse={c.sparse(n)}" for n in range(c.num_hidden_layers)]
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), kinds, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else qwen3_vl.Tower(c.vision.tower, key=tower)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x, deep = self.embed_text(tokens, images), []
        if self.vision is not None and images is not None:
            features, *deep = self.vision.levels(jnp.asarray(images.patches), jnp.asarray(images.grids))
            x = images.splice(x, features)
            # A model of fewer layers than the tower has levels takes the first levels.
            deep = [images.splice(jnp.zeros_like(x), level) for level in deep[: self.layers.num_layers]]
        merge = None if self.vision is None else self.vision.config.spatial_merge_size
        at, cache, delta = qwen3_vl.with_coordinates(at, x, images, merge, cache)
        x, cache, reports = self.layers(x, cache, at, deep)
        return self.norm(x), None if cache is None else (*cache, *delta), reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a config.json of either form into the flat one, as `qwen3_vl.flat` does, and renames a key."""
    text = qwen3_vl.flat(hub, VISION)
    if "text_config" in hub:
        text["architectures"] = hub.get("architectures") or []
    if "num_local_experts" in text:  # as transformers 5 writes it
        text["num_experts"] = text.pop("num_local_experts")
    return text


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Inverts `standard_form` for a model with a tower; a text model's keys stay as they are."""
    return qwen3_vl.nested(hub, "rope_scaling", ARCHITECTURES[hub["model_type"]][1])


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Qwen3-VL",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    partition_rules={
        **{f"vision.{path}": spec for path, spec in qwen3_vl.PARTITION_RULES.items()},
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate.weight": P(),
        "layers.*.experts.gate_up_proj": P("expert", "tensor", "fsdp"),
        "layers.*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        **qwen3_vl.CHECKPOINT_NAMES,
        "lm_head.*": "lm_head.{}",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{}^T?",  # on the Hub; as transformers saves it, without
        "*": "model.{}",
    },
    beginnings=qwen3_vl.BEGINNINGS,
    aliases=qwen3_vl.ALIASES,
    fp8_blocks=["layers.*_proj.weight"],
    fused={  # the files in FP8 have experts one by one
        ".experts.gate_up_proj": (".experts.{}.gate_proj.weight", ".experts.{}.up_proj.weight"),
        ".experts.down_proj": (".experts.{}.down_proj.weight",),
    },
    redundant={"lm_head.weight": "model.embed_tokens.weight", "model.visual.*": None},
    parts={"vision": "its vision tower, so that the model takes images and videos"},
    implied={"hidden_act": OneOf(["silu", "swish"]), "norm_topk_prob": True},
    standard_form=standard_form,
    published_form=published_form,
)
