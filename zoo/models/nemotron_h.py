"""Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 (arXiv:2508.14444), Nemotron 3 Nano and Super (arXiv:2512.20848), and
Nemotron 3.5 Lightning, which is Nano with more positions.

A layer is one norm and one mixer: Mamba-2 (arXiv:2405.21060), attention, an MLP, or a mixture of experts, as the
letters of a pattern say. Attention is rare, and has no positions. MLPs and experts are not gated: down(relu(up(x))^2).
Routers are DeepSeek V3's, with sigmoids and a bias that evens the load. Super's experts work on vectors of a quarter of
the features, to and from which two projections lead. Super and Lightning have a module that predicts one more token.

The step of Mamba-2 is between the two time_step_limits, 0 and infinity. transformers 5.23 takes time_step_min for the
least one where it reads a text in one pass, and has none where it decodes; time_step_min is of random weights alone.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.delta_rule.shared import state_products
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, AbstractCache, NoCache
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Float32RMSNorm,
    Linear,
    project,
    recomputed,
)
from zoo.nn.mamba2 import Mamba2
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractMixtureConfig, Family, OneOf, Released, causal_keys
from zoo.nn.mtp import AbstractMTP, AbstractMTPModel
from zoo.nn.routing import BiasedRouter, rebalance
from zoo.nn.stack import Caches, Reports, Stack


class Kind(enum.Enum):
    """The kind of a layer: its letter in `hybrid_override_pattern`."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    MOE = "E"


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLPs
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    hybrid_override_pattern: str  # a letter for each layer
    head_dim: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    ssm_state_size: int = 128
    conv_kernel: int = 4
    chunk_size: int = 128  # unused: how some kernels cut a row, which changes no result
    expand: int = 2  # unused: mamba_num_heads and mamba_head_dim say it
    use_conv_bias: bool = True
    use_bias: bool = False  # of the projections of Mamba-2
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    time_step_min: float = 0.001  # unused: it is of random weights, and so are the next two
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None  # None: experts read and write hidden_size features
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    mlp_bias: bool = False
    layer_norm_epsilon: float = 1e-5
    num_nextn_predict_layers: int = 0  # modules that predict one more token
    mtp_hybrid_override_pattern: str = "*E"  # letters of their layers

    def __post_init__(self):
        c, pattern = self, self.hybrid_override_pattern
        if len(pattern) != c.num_hidden_layers or set(pattern) - {kind.value for kind in Kind}:
            raise ValueError(
                f"hybrid_override_pattern={pattern!r} needs one of M, *, - and E for each of the {c.num_hidden_layers} "
                "layers."
            )
        if len(c.time_step_limit) != 2:
            raise ValueError(f"time_step_limit is {list(c.time_step_limit)}; it needs the least and the largest step.")
        each, rest = divmod(c.n_routed_experts, c.n_group)
        enough = c.topk_group <= c.n_group and c.num_experts_per_tok <= c.topk_group * each
        if rest or each < 2 or not enough:
            raise ValueError(
                f"{c.num_experts_per_tok} of {c.n_routed_experts} experts cannot be chosen from topk_group "
                f"{c.topk_group} of n_group {c.n_group} groups."
            )

    @property
    def layers(self) -> tuple[Kind, ...]:
        return tuple(map(Kind, self.hybrid_override_pattern))

    def attention_products(self, layer: int, seq: int) -> float:
        kind = self.layers[layer]
        if kind is Kind.ATTENTION:
            return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values
        if kind is Kind.MAMBA:
            return float(self.mamba_num_heads * state_products(self.ssm_state_size, self.mamba_head_dim, erase=False))
        return 0.0


# fmt: off
NANO2 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NANO3 = "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME"
SUPER3 = "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
V2: dict[str, Any] = dict(hybrid_override_pattern=NANO2, mamba_head_dim=80)
V3_NANO: dict[str, Any] = dict(
    hybrid_override_pattern=NANO3, mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6,
    moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5,
)
V3_SUPER: dict[str, Any] = dict(
    hybrid_override_pattern=SUPER3, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
    moe_shared_expert_intermediate_size=5376, moe_latent_size=1024, routed_scaling_factor=5.0,
    num_nextn_predict_layers=1,
)
V3_5: dict[str, Any] = V3_NANO | dict(num_nextn_predict_layers=1)
#                           vocab hidden    mlp layers heads kv positions
NEMOTRON_NANO_9B   = Config(131072, 4480, 15680,    56,   40, 8,   131072, **V2)
NEMOTRON3_NANO_30B = Config(131072, 2688,  1856,    52,   32, 2,   262144, **V3_NANO)
NEMOTRON3_SUPER    = Config(131072, 4096,  2688,    88,   32, 2,   262144, **V3_SUPER)
NEMOTRON3_5_30B    = Config(131072, 2688,  1856,    52,   32, 2,  1048576, **V3_5)

CONFIGS = {
    "nemotron-nano-9b-v2":           Released(NEMOTRON_NANO_9B,   "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    "nemotron-nano-9b-v2-base":      Released(NEMOTRON_NANO_9B,   "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base"),
    "nemotron3-nano-30b-a3b":        Released(NEMOTRON3_NANO_30B, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "nemotron3-nano-30b-a3b-base":   Released(NEMOTRON3_NANO_30B, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"),
    "nemotron3-super-120b-a12b":     Released(NEMOTRON3_SUPER,    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
    "nemotron3.5-lightning-30b-a3b": Released(NEMOTRON3_5_30B,    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"),
}
# fmt: on


class Attention(AbstractGroupedAttention, AbstractMixer):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, key=q)
        self.k_proj = Linear(c.hidden_size, keys, key=k)
        self.v_proj = Linear(c.hidden_size, keys, key=v)
        self.o_proj = Linear(queries, c.hidden_size, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


@recomputed
def relu_squared(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes relu(x)^2 (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


class MLP(eqx.Module):
    """One MLP for all rows; or one for each expert, where expert i takes the next `sizes[i]` rows."""

    up_proj: AbstractLinear | AbstractExpertLinear
    down_proj: AbstractLinear | AbstractExpertLinear

    def __init__(self, linear: Callable[..., Any], hidden: int, width: int, *, key: PRNGKeyArray):
        up, down = jax.random.split(key)
        self.up_proj = linear(hidden, width, key=up)
        self.down_proj = linear(width, hidden, key=down)

    def __call__(self, x: Float[Array, "*rows embed"], *sizes: Int[Array, " experts"]) -> Float[Array, "*rows embed"]:
        return self.down_proj(relu_squared(self.up_proj(x, *sizes)), *sizes)


class MoE(eqx.Module):
    gate: BiasedRouter
    experts: MLP  # one MLP for each expert
    shared_experts: MLP
    fc1_latent_proj: AbstractLinear | None  # with moe_latent_size: to what experts read
    fc2_latent_proj: AbstractLinear | None  # and from what they write
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared, into, out) = config, jax.random.split(key, 5)
        latent = c.moe_latent_size or c.hidden_size
        each = lambda *sizes, key: ExpertLinear(c.n_routed_experts, *sizes, key=key)
        linear = lambda *sizes, key: Linear(*sizes, bias=c.mlp_bias, key=key)
        self.config = c
        self.gate = BiasedRouter(c.hidden_size, c.n_routed_experts, key=gate)
        self.experts = MLP(each, latent, c.moe_intermediate_size, key=experts)
        self.shared_experts = MLP(linear, c.hidden_size, c.moe_shared_expert_intermediate_size, key=shared)
        self.fc1_latent_proj = linear(c.hidden_size, latent, key=into) if c.moe_latent_size else None
        self.fc2_latent_proj = linear(latent, c.hidden_size, key=out) if c.moe_latent_size else None

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        normalise = 1e-20 if c.norm_topk_prob else None  # so that the weights add up to 1
        scores, weights, chosen = self.gate.choose(
            logits, c.num_experts_per_tok, "sigmoid", groups=c.n_group, kept=c.topk_group, normalise=normalise
        )
        weights = (c.routed_scaling_factor * weights).astype(x.dtype)
        y = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        y = moe.dispatch(self.experts, y, chosen, weights, lambda experts: experts.down_proj)
        y = y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)
        routing = moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)
        return moe.with_shared(y, self.shared_experts(x)), routing


class Block(AbstractDecoderBlock):
    norm: Float32RMSNorm
    mixer: AbstractMixer | MLP | MoE  # a Mamba2, an Attention, or one of these two
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: Kind, *, key: PRNGKeyArray):
        c = config
        self.norm = Float32RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        if kind is Kind.MAMBA:
            self.mixer = Mamba2(
                c.hidden_size,
                heads=c.mamba_num_heads,
                head_dim=c.mamba_head_dim,
                groups=c.n_groups,
                state_size=c.ssm_state_size,
                width=c.conv_kernel,
                time_step_limit=c.time_step_limit,
                eps=c.layer_norm_epsilon,
                bias=c.use_bias,
                conv_bias=c.use_conv_bias,
                key=key,
            )
        elif kind is Kind.ATTENTION:
            self.mixer = Attention(c, key=key)
        elif kind is Kind.MOE:
            self.mixer = MoE(c, key=key)
        else:
            linear = lambda *sizes, key: Linear(*sizes, bias=c.mlp_bias, key=key)
            self.mixer = MLP(linear, c.hidden_size, c.intermediate_size, key=key)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, moe.Routing | None]:
        y, routing = self.norm(x), None
        if isinstance(self.mixer, AbstractMixer):
            y, cache = self.mixer(y, cache, at)
        elif isinstance(self.mixer, MoE):
            y, routing = self.mixer(y, at.segments)
        else:
            y = self.mixer(y)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        if isinstance(self.mixer, AbstractMixer):
            return self.mixer.init_cache(layers, batch, length, dtype)
        return NoCache(jnp.array(0, jnp.int32))


class MTP(AbstractMTP):
    """Multi-token prediction: `final_layernorm(layers(eh_proj([enorm(following), hnorm(x)])))`.

    The first of its two layers has attention, the other one experts. transformers drops the module; this is how vLLM
    computes it. `x` is from `Model.hidden`, so it is normed.
    """

    enorm: Float32RMSNorm
    hnorm: Float32RMSNorm
    eh_proj: AbstractLinear
    layers: tuple[Block, Block]
    final_layernorm: Float32RMSNorm

    def __init__(self, config: Config, *, keys: Sequence[PRNGKeyArray]):
        c, (project, attention, experts) = config, keys
        self.enorm = Float32RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        self.hnorm = Float32RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        self.eh_proj = Linear(2 * c.hidden_size, c.hidden_size, key=project)
        self.layers = Block(c, Kind.ATTENTION, key=attention), Block(c, Kind.MOE, key=experts)
        self.final_layernorm = Float32RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        following: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, moe.Routing | None]:
        y = self.eh_proj(jnp.concatenate([self.enorm(following), self.hnorm(x)], axis=-1))
        y, cache, _ = self.layers[0](y, cache, at)
        y, _, report = self.layers[1](y, None, at)
        return self.final_layernorm(y), cache, report

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.layers[0].init_cache(1, batch, length, dtype)


class Model(AbstractMTPModel):
    embed_tokens: Embedding
    layers: Stack
    norm_f: Float32RMSNorm
    lm_head: AbstractLinear
    mtp: MTP | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): none."""
        c, (embed, layers, head, *mtp) = config, jax.random.split(key, 6)
        modules = c.num_nextn_predict_layers, c.mtp_hybrid_override_pattern
        if "mtp" in parts and modules != (1, "*E"):
            raise ValueError(
                "The part mtp needs num_nextn_predict_layers=1 and mtp_hybrid_override_pattern='*E', not "
                f"{modules[0]} and {modules[1]!r}."
            )
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, c.layers[n], key=key), c.layers, key=layers)
        self.norm_f = Float32RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, key=head)
        self.mtp = MTP(c, keys=mtp) if "mtp" in parts else None

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm_f(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.lm_head(x)


# The letter of each name for a kind of layer: those that transformers 5 writes, and those that it wrote before.
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*"}


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Writes lists of layers as patterns, and leaves out the norm's epsilon under other names.

    Raises:
        ValueError: for an unknown kind of layer, or different epsilons.
    """
    hub = dict(hub)
    for pattern, names in (
        ("hybrid_override_pattern", ("layers_block_type", "layer_types")),
        ("mtp_hybrid_override_pattern", ("mtp_layers_block_type",)),
    ):
        kinds = next((found for name in names if (found := hub.pop(name, None)) is not None), None)
        if kinds is not None:
            if not isinstance(kinds, list) or not all(str(kind) in LETTERS for kind in kinds):
                raise ValueError(f"{names[0]}={kinds!r} is no list of {', '.join(LETTERS)}.")
            hub.setdefault(pattern, "".join(LETTERS[kind] for kind in kinds))
    if isinstance(pattern := hub.get("hybrid_override_pattern"), str):
        hub.setdefault("num_hidden_layers", len(pattern))
    for name in ("norm_eps", "rms_norm_eps"):
        if (eps := hub.pop(name, None)) not in (None, used := hub.get("layer_norm_epsilon", 1e-5)):
            raise ValueError(f"{name}={eps!r}, but layer_norm_epsilon={used!r}: which of them norms take is not known.")
    return hub


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Nemotron-H, Nemotron 3, 3.5",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("nemotron_h",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "*layers.*.o_proj": P("fsdp", "tensor"),
        "*layers.*.in_proj": P("tensor", "fsdp"),
        "*layers.*.out_proj": P("fsdp", "tensor"),
        "*layers.*.experts.up_proj": P("expert", "tensor", "fsdp"),
        "*layers.*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*layers.*.up_proj": P("tensor", "fsdp"),
        "*layers.*.down_proj": P("fsdp", "tensor"),
        "*layers.*.fc1_latent_proj": P(None, "fsdp"),
        "*layers.*.fc2_latent_proj": P("fsdp", None),
        "*layers.*": P(),
        "norm_f.weight": P(),
        "mtp.eh_proj": P("tensor", "fsdp"),
        "mtp.*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "embed_tokens.*": "backbone.embeddings.{}",
        "mtp.layers.*.experts.*.weight": "mtp.layers.{}.experts.{expert}.{}.weight",
        "mtp.layers.*_bias.value": "mtp.layers.{}_bias",
        "mtp.layers.*": "mtp.layers.{}",
        "mtp.final_layernorm.*": "mtp.layers.1.final_layernorm.{}",
        "mtp.*": "mtp.layers.0.{}",
        "*.experts.*.weight": "backbone.{}.experts.{expert}.{}.weight",
        "*_bias.value": "backbone.{}_bias",
        "*": "backbone.{}",
    },
    redundant={"mtp.*": None},
    implied={
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "attention_bias": False,
        "mamba_hidden_act": OneOf(["silu", "swish"]),
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_hidden_act": "relu2",
        "moe_shared_expert_overlap": OneOf([True, False]),
        "n_shared_experts": 1,
        "partial_rotary_factor": 1.0,  # of attention that does not rotate; nor does it use the next one
        "rope_theta": 10_000.0,
        "rescale_prenorm_residual": OneOf([True, False]),
        "residual_in_fp32": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_mamba_kernels": OneOf([True, False]),
    },
    standard_form=standard_form,
    names_in_transformers={"backbone.": "model."},  # in adapters of PEFT
    experts_in_transformers={
        "experts.up_proj": ("experts.up_proj", None),  # there is no gate
        "experts.down_proj": ("experts.down_proj", None),
    },
    parts={"mtp": "a module that predicts the token after the next (multi-token prediction)"},
    rebalance=rebalance,
)
