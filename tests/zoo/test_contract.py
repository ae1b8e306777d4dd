"""A recurrent layer that no family has, but that the contract allows: its state is no list of keys.

Its cache has five axes like keys, but heads are the third of them. It may not be rounded, and it can't roll tokens
back. Its tokens must come in order, documents restart it, and padding does not affect it.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zoo
from kernels import Tokens
from kernels.mesh import BATCH, TENSOR
from tests.close import close
from tests.zoo.programs import MODEL
from train.base.flops import products_per_token
from train.state.mesh import check_mesh, put_batch
from train.step.language import features
from zoo import registry, surgery
from zoo.generation.decoding import init_state
from zoo.nn import cache as caches
from zoo.nn.block import AbstractDecoderBlock, AbstractSharingBlock
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.nn.stack import Stack
from zoo.verify import Recorder


HEADS, DIM = 4, 8


class State(caches.AbstractCache):
    """The state of linear attention: the decaying sum of k v^T."""

    kv: jax.Array  # [layers, batch, heads, dim, dim], float32
    layer: jax.Array
    rewinds: ClassVar[bool] = False

    def partition_specs(self, sizes):
        spec = P(
            None,
            caches.split_over(self.kv.shape[1], BATCH, sizes),
            caches.split_over(self.kv.shape[2], (TENSOR,), sizes),
        )
        return eqx.tree_at(lambda c: (c.kv, c.layer), self, (spec, P()))

    def in_int8(self):
        return self

    def widened(self, more):
        return self

    def paged(self, pages, slots, length):
        return self

    def of_rows(self):
        return caches.all_of_rows(self)


class Recurrence(AbstractDecoderBlock):
    """S_t = S_{t-1} / 2 + k_t v_t^T, and y_t = q_t S_t, in float32.

    Its input is normed, because the product of three numbers would cube their size, and the rounding error, in each
    layer.
    """

    norm: RMSNorm
    qkv: AbstractLinear
    out: AbstractLinear
    ordered: ClassVar[bool] = True

    def __init__(self, config, *, key):
        qkv, out = jax.random.split(key)
        self.norm = RMSNorm(config.hidden_size, 1e-6)
        self.qkv = Linear(config.hidden_size, 3 * HEADS * DIM, std=0.3, key=qkv)
        self.out = Linear(HEADS * DIM, config.hidden_size, std=0.3, key=out)

    def __call__(self, x, cache, at):
        batch, seq, _ = x.shape
        q, k, v = (a.reshape(batch, seq, HEADS, DIM) for a in jnp.split(self.qkv(self.norm(x)), 3, axis=-1))
        real = jnp.ones((batch, seq), bool) if at.positions is None else at.positions >= 0
        new = jnp.zeros((batch, seq), bool)
        if at.segments is not None:
            new = new.at[:, 1:].set(at.segments[:, 1:] != at.segments[:, :-1])

        def step(state, token):
            q, k, v, real, new = token
            wide = lambda a: a[:, None, None, None]
            state = jnp.where(wide(new), 0, state)
            state = jnp.where(wide(real), state / 2 + jnp.einsum("bhi,bhj->bhij", k, v), state)
            return state, jnp.einsum("bhi,bhij->bhj", q, state)

        start = jnp.zeros((batch, HEADS, DIM, DIM)) if cache is None else cache.kv[cache.layer]
        tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, real, new))
        state, y = jax.lax.scan(step, start, tokens)
        if cache is not None:
            cache = State(cache.kv.at[cache.layer].set(state), cache.layer)
        return x + self.out(jnp.moveaxis(y, 0, 1).reshape(batch, seq, -1)), cache, None

    def init_cache(self, layers, batch, length, dtype):
        return State(jnp.zeros((layers, batch, HEADS, DIM, DIM)), jnp.array(0, jnp.int32))


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    vocab_size: int = 64
    hidden_size: int = 16
    num_hidden_layers: int = 3
    num_attention_heads: int = HEADS
    num_key_value_heads: int = HEADS
    head_dim: int = DIM
    max_position_embeddings: int = 64

    def attention_products(self, layer, seq):
        return HEADS * 2 * DIM * DIM  # independent of the length


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    config: Config = eqx.field(static=True)

    def __init__(self, config, *, key):
        embed, layers = jax.random.split(key)
        self.config, self.embed_tokens = config, Embedding(config.vocab_size, config.hidden_size, std=1.0, key=embed)
        self.norm = RMSNorm(config.hidden_size, 1e-6)
        self.layers = Stack(lambda n, *, key: Recurrence(config, key=key), ["recurrent"] * 3, key=layers)

    def forward(self, tokens, cache, at):
        return self.layers(self.embed_tokens(tokens), cache, at)

    def unembed(self, x):
        return self.embed_tokens.attend(self.norm(x))


FAMILY = Family(
    title="A recurrence",
    Config=Config,
    Model=Model,
    configs={},
    model_types=("recurrence",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "*qkv": P("tensor", "fsdp"),
        "*out": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={"*": "{}"},
    implied={},
)
TOKENS = np.random.RandomState(0).randint(0, 64, (2, 11))
SEGMENTS = np.repeat([[1, 2, 3], [4, 5, 6]], [6, 1, 9], axis=1)


@pytest.fixture(scope="module")
def model():
    return eqx.filter_jit(lambda: Model(Config(), key=jax.random.key(0)))()


@pytest.fixture(scope="module")
def forward():
    @eqx.filter_jit
    def forward(model, tokens, segments):
        return model.unembed(model.hidden(tokens, segments=segments)[0])

    return lambda model, tokens, segments=None: np.asarray(forward(model, tokens, segments))


def test_it_is_placed_as_it_says(model):
    """The cache is split over its heads, which are not the fourth axis; it is not rounded where vectors are."""
    mesh = zoo.make_mesh("fsdp=4,tensor=2")
    ((), (state,), ()), _ = init_state(model, None, 4, 16, "int8", mesh).caches
    assert state.kv.sharding.spec == P(None, ("fsdp",), ("tensor",)) and state.kv.dtype == jnp.float32


def test_documents_restart_it(model, forward):
    packed = forward(model, TOKENS, np.repeat([[1] * 4 + [2] * 7], 2, axis=0))
    alone = forward(model, TOKENS[:, 4:])
    close(packed[:, 4:], alone, terms=MODEL)
    assert np.abs(forward(model, TOKENS)[:, 4:] - alone).max() > 0.1  # so this test can fail


def test_padding_does_not_touch_it(model, forward):
    """Right-padded prompts, then single tokens and rows that have ended, give the same logits."""
    decode = eqx.filter_jit(lambda model, tokens, cache, at: model.decode(tokens, cache, positions=at))
    lengths, index = np.array([[8], [5]]), np.arange(8)[None]
    cache = caches.init_cache(model, 2, 16)
    _, cache = decode(model, TOKENS[:, :8], cache, np.where(index < lengths, index, -1))
    _, cache = decode(model, TOKENS[:, 8:9], cache, np.array([[8], [-1]]))
    at = np.array([[9], [5]])
    logits, _ = decode(model, np.take_along_axis(TOKENS, at, 1), cache, at)
    whole = forward(model, TOKENS)
    close(np.asarray(logits)[:, 0], np.stack([whole[0, 9], whole[1, 5]]), terms=MODEL)


def test_its_tokens_are_not_taken_back(model):
    for draft in zoo.ModelDraft(model), zoo.NGramDraft():
        with pytest.raises(ValueError, match=r"Layer 0 \(a Recurrence\) can't take back.*without a draft"):
            zoo.Engine(model, batch=1, max_tokens=16, draft=draft)


def test_its_tokens_stay_in_order(model, forward):
    """Tokens stay in order also if training splits a row's tokens over devices."""
    mesh, batch = zoo.make_mesh("fsdp=2,context=4"), dict.fromkeys(("segments", "positions"), SEGMENTS)
    tokens = np.random.RandomState(1).randint(0, 64, SEGMENTS.shape)
    check_mesh(mesh, model, FAMILY, batch=2, seq_len=16)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, surgery.shardings(model, FAMILY.partition_rules, mesh))
        run = eqx.filter_jit(lambda model, batch: model.unembed(features(model, batch)[0]))
        logits = run(placed, put_batch(batch | {"tokens": tokens}, mesh, model))
    close(logits, forward(model, tokens, SEGMENTS), terms=MODEL)


def test_its_products_are_counted(monkeypatch):
    """A family may count its own products, unlike those of full attention, which grow with the sequence."""
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    registry.register(FAMILY)
    short, long = (products_per_token(Config(), seq) for seq in (16, 64))
    assert short.attention == long.attention == 3 * HEADS * 2 * DIM * DIM
    assert short.layers == 3 * (4 * HEADS * DIM * 16)


def test_an_encoder_has_no_cache():
    class Encoder(zoo.nn.block.AbstractBlock):
        def __call__(self, x, cache, at):
            return x, None, None

    stack = Stack(lambda n, *, key: Encoder(), ["encoder"], key=jax.random.key(0))
    with pytest.raises(TypeError, match="A Encoder is no decoder's block"):
        stack.init_cache(1, 8, jnp.float32)


class Sharing(AbstractSharingBlock, AbstractDecoderBlock):
    """A layer that adds its own input, and the features that a layer has handed on, times its weight."""

    weight: jax.Array
    hands_on: bool = eqx.field(static=True)

    def run(self, x, cache, at, own_input, shared):
        seen = shared["features"] if "features" in shared else jnp.zeros_like(x)
        y = jnp.tanh(x * jnp.broadcast_to(self.weight, x.shape) + own_input + seen)
        return y, cache, None, {"features": y} if self.hands_on else {}

    def init_cache(self, layers, batch, length, dtype):
        return caches.NoCache(jnp.array(0, jnp.int32))


def sharing_stack(hands_on):
    make = lambda n, *, key: Sharing(jax.random.normal(key, (16,)), hands_on[n])
    return Stack(make, hands_on, key=jax.random.key(0))


X, OWN = jax.random.normal(jax.random.key(1), (2, 3, 16)), jax.random.normal(jax.random.key(2), (11, 2, 3, 16))


def test_layers_hand_something_on():
    """The layer that hands its features on is between two runs that repeat; those of the second read them."""
    stack = sharing_stack([False] * 5 + [True] + [False] * 5)
    assert stack.runs == ((1, 5), (1, 1), (1, 5))
    wanted, _, outputs = Recorder(stack)(X, None, Tokens(), own_inputs=OWN)  # layer by layer
    kept = stack.init_cache(2, 3, jnp.float32)
    for found in (stack(X, own_inputs=OWN)[0], stack(X, kept, own_inputs=OWN)[0]):
        close(found, wanted, terms=100)
    gradient = jax.grad(lambda x, stack: jnp.sum(stack(x, own_inputs=OWN)[0] ** 2))
    close(gradient(X, stack), gradient(X, stack.with_remat(jax.checkpoint)), terms=200)
    without = sharing_stack([False] * 11)(X, own_inputs=OWN)[0]
    assert len(outputs[0]) == 11 and np.abs(without - wanted).max() > 0.1  # so this test can fail


def test_layers_that_repeat_hand_nothing_on(untyped):
    with pytest.raises(ValueError, match="Layers hand on features and repeat: give those that hand it on a kind of"):
        sharing_stack([True] * 11)(X, own_inputs=OWN)


def test_there_is_no_pipeline_for_them(untyped):
    with (
        jax.set_mesh(zoo.make_mesh("stage=2", jax.devices()[:2])),
        pytest.raises(ValueError, match="There is no pipeline for layers that have inputs of their own"),
    ):
        sharing_stack([False] * 10)(X, own_inputs=OWN[:10])
