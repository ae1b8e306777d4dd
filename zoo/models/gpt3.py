"""GPT-3 (arXiv:2005.14165) and GPT-2 (Radford et al., 2019), which share one architecture.

Learned position embeddings, a LayerNorm before attention and before the MLP, biases everywhere, GELU without a gate,
and an output head tied to the embedding. Only GPT-2's weights were published, so config.json and the tensors' names are
those of GPT-2's checkpoints. The gpt3-* sizes are those that MaxText trains from scratch. As in MaxText, attention is
dense in every layer; the paper's models alternate dense with locally banded sparse attention. Dropout, which GPT-2 was
trained with, is left out.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.mesh import split_lookup
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV
from zoo.nn.clip import AbstractScalableAttention
from zoo.nn.layers import AbstractLinear, Embedding, LayerNorm, Linear, gelu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import coordinates
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    vocab_size: int = 50_257
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_positions: int = 1024
    n_inner: int | None = None  # width of the MLP; None: 4 * n_embd
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is no multiple of n_head {self.n_head}.")

    # The names that other families use.
    @property
    def hidden_size(self) -> int:
        return self.n_embd

    @property
    def intermediate_size(self) -> int:
        return self.n_inner or 4 * self.n_embd

    @property
    def num_hidden_layers(self) -> int:
        return self.n_layer

    @property
    def num_attention_heads(self) -> int:
        return self.n_head

    @property
    def num_key_value_heads(self) -> int:
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def max_position_embeddings(self) -> int:
        return self.n_positions

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values


# fmt: off
#                     vocab  hidden  layers  heads  positions
GPT2        = Config( 50257,    768,     12,    12,       1024)
GPT2_MEDIUM = Config( 50257,   1024,     24,    16,       1024)
GPT2_LARGE  = Config( 50257,   1280,     36,    20,       1024)
GPT2_XL     = Config( 50257,   1600,     48,    25,       1024)
GPT3_52K    = Config(  1024,     16,      1,     2,       2048)
GPT3_6B     = Config( 32768,   3072,     48,    12,      16384)
GPT3_22B    = Config( 32768,   6144,     48,    24,      16384)
GPT3_175B   = Config( 50304,  12288,     96,    96,      16384)

CONFIGS = {
    "gpt2":        Released(GPT2,        "openai-community/gpt2"),
    "gpt2-medium": Released(GPT2_MEDIUM, "openai-community/gpt2-medium"),
    "gpt2-large":  Released(GPT2_LARGE,  "openai-community/gpt2-large"),
    "gpt2-xl":     Released(GPT2_XL,     "openai-community/gpt2-xl"),
    "gpt3-52k":    Released(GPT3_52K,    tokenizer="hf-internal-testing/tiny-random-GPT2LMHeadModel"),
    "gpt3-6b":     Released(GPT3_6B,     tokenizer="mistralai/Mistral-7B-v0.3"),
    "gpt3-22b":    Released(GPT3_22B,    tokenizer="mistralai/Mistral-7B-v0.3"),
    "gpt3-175b":   Released(GPT3_175B,   tokenizer="openai-community/gpt2"),
}
# fmt: on


class Attention(AbstractScalableAttention):
    c_attn: AbstractLinear  # queries, keys and values, concatenated
    c_proj: AbstractLinear
    n_head: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (attn, proj) = config, jax.random.split(key)
        self.n_head = c.n_head
        self.c_attn = Linear(c.n_embd, 3 * c.n_embd, bias=True, key=attn)
        self.c_proj = Linear(c.n_embd, c.n_embd, bias=True, std=0.02 * (2 * c.n_layer) ** -0.5, key=proj)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], self.n_head, -1)
        q, k, v = (heads(y) for y in jnp.split(self.c_attn(x), 3, axis=-1))
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=q.shape[-1] ** -0.5)
        return self.c_proj(y.reshape(*y.shape[:2], -1)), cache

    def row_factors(self, factor: Float[Array, " heads"]) -> dict[str, Float[Array, " rows"]]:
        root = jnp.repeat(jnp.sqrt(factor), self.c_attn.shape[-2] // (3 * self.n_head))
        return {"c_attn": jnp.concatenate([root, root, jnp.ones_like(root)])}


class MLP(eqx.Module):
    c_fc: AbstractLinear
    c_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc, proj) = config, jax.random.split(key)
        self.c_fc = Linear(c.n_embd, c.intermediate_size, bias=True, key=fc)
        self.c_proj = Linear(c.intermediate_size, c.n_embd, bias=True, std=0.02 * (2 * c.n_layer) ** -0.5, key=proj)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.c_proj(gelu(self.c_fc(x)))


def check_length(length: int, n_positions: int) -> None:
    """Refuses positions beyond the table: looking them up would silently give the last one's vector."""
    if length > n_positions:
        raise ValueError(f"{length} positions are asked for, but the model has learned {n_positions}.")


class Block(AbstractDecoderBlock):
    ln_1: LayerNorm
    attn: Attention
    ln_2: LayerNorm
    mlp: MLP
    n_positions: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, key=attention)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config, key=mlp)
        self.n_positions = config.n_positions

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, None]:
        y, cache = self.attn(self.ln_1(x), cache, at)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        check_length(length, self.n_positions)
        heads, embed = self.attn.n_head, self.attn.c_proj.shape[-1]
        return KV.init(layers, batch, length, heads, embed // heads, dtype)


class Model(AbstractModel):
    wte: Embedding
    wpe: Embedding
    layers: Stack
    ln_f: LayerNorm
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32; projections onto the residual stream are smaller in deeper models."""
        c, (tokens, positions, layers) = config, jax.random.split(key, 3)
        self.config = c
        self.wte = Embedding(c.vocab_size, c.n_embd, key=tokens)
        self.wpe = Embedding(c.n_positions, c.n_embd, key=positions)
        self.layers = Stack(lambda n, *, key: Block(c, key=key), ["full"] * c.n_layer, key=layers)
        self.ln_f = LayerNorm(c.n_embd, c.layer_norm_epsilon)

    @property
    def embed_tokens(self) -> Embedding:
        """`wte`, by the name of the contract."""
        return self.wte

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.wte(tokens)
        if at.positions is None:
            check_length(x.shape[1], self.config.n_positions)
        x += split_lookup(self.wpe.weight, coordinates(at, x.shape[1]))
        x, cache, reports = self.layers(x, cache, at)
        return self.ln_f(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.wte.attend(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="GPT-2, GPT-3",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("gpt2",),
    partition_rules={
        "w[tp]e": P("tensor", "fsdp"),
        "layers.*.c_attn": P("tensor", "fsdp"),
        "layers.*.c_fc": P("tensor", "fsdp"),
        "layers.*.c_proj": P("fsdp", "tensor"),
        "*ln_*": P(),
    },
    checkpoint_names={
        "layers.*.c_*.weight": "transformer.h.{}.c_{}.weight^T",  # ^T: the last two axes are swapped
        "layers.*": "transformer.h.{}",
        "*": "transformer.{}",
    },
    # Names in OpenAI's repositories have no "transformer." in front.
    aliases={f"{part}.": f"transformer.{part}." for part in ("wte", "wpe", "h", "ln_f")},
    redundant={
        "lm_head.weight": "transformer.wte.weight",
        "transformer.h.*.attn.bias": None,  # a buffer: the causal mask
        "transformer.h.*.attn.masked_bias": None,  # a buffer: the logit of masked keys
    },
    implied={
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": OneOf(["gelu_new", "gelu_pytorch_tanh"]),
        "tie_word_embeddings": True,
        "add_cross_attention": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": OneOf([False, True]),  # about rounding; the softmax is in float32 here
    },
)
