"""The chunked loss against the plain one: values, gradients, memory, work, and the split over devices."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import cross_entropy
from tests.close import close
from zoo.lora import LoRALinear
from zoo.nn.layers import AbstractLinear, Embedding, Linear
from zoo.quantized import QuantizedLinear


BATCH, SEQ, VOCAB, EMBED = 4, 13, 97, 16
Z_LOSS = 0.01


class Model(eqx.Module):
    """The two ends of a language model, and a parameter that neither uses."""

    embed: Embedding
    head: AbstractLinear | None
    other: jax.Array
    softcap: float | None = eqx.field(static=True)

    def hidden(self, tokens):
        return jnp.tanh(self.embed(tokens))

    def unembed(self, x):
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


KINDS = "linear", "tied", "softcap", "int8", "lora"


@functools.cache
def models() -> dict[str, Model]:
    return eqx.filter_jit(lambda: {kind: make(kind) for kind in KINDS})()


def make(kind: str) -> Model:
    embed, head, lora = jax.random.split(jax.random.key(0), 3)
    linear = Linear(EMBED, VOCAB, bias=True, std=1.0, key=head)
    heads = {
        "tied": None,
        "int8": QuantizedLinear.of(linear, "int8"),
        "lora": LoRALinear.new(linear, lora, rank=2, alpha=4.0),
    }
    other = jnp.ones(3)
    return Model(
        Embedding(VOCAB, EMBED, std=1.0, key=embed), heads.get(kind, linear), other, 5.0 if kind == "softcap" else None
    )


@pytest.fixture(scope="module")
def batch():
    random = np.random.RandomState(0)
    tokens, targets = random.randint(0, VOCAB, (2, BATCH, SEQ))
    return jnp.asarray(tokens), jnp.asarray(targets), jnp.asarray(random.rand(BATCH, SEQ) < 0.6, jnp.int32)


def plain(model, tokens, targets, mask):
    logits = model.unembed(model.hidden(tokens)).astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    losses = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    sums = [losses + Z_LOSS * log_z**2, losses, (logits.argmax(axis=-1) == targets).astype(jnp.float32)]
    minimised, loss, correct = (jnp.sum(s * mask.astype(jnp.float32)) for s in sums)
    return minimised, {"loss": loss, "correct": correct}


def chunked(model, tokens, targets, mask, *, chunk=20):
    return cross_entropy(model.unembed, model.hidden(tokens), targets, mask, chunk=chunk, z_loss=Z_LOSS)


@functools.cache
def value_and_grad(loss):
    """Returns one jitted function for each loss, so that tests share compiled programs."""
    return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_loss(kind, batch):
    model = models()[kind]
    (want, want_sums), want_gradients = value_and_grad(plain)(model, *batch)
    (got, got_sums), gradients = value_and_grad(chunked)(model, *batch)
    close((got, got_sums, gradients), (want, want_sums, want_gradients), terms=200)
    assert not np.any(gradients.other)
    if kind == "linear":
        close(eqx.filter_jit(chunked)(model, *batch), (want, want_sums), terms=200)


@pytest.mark.thorough
def test_any_chunk(batch):
    model = models()["linear"]
    want = value_and_grad(plain)(model, *batch)
    for chunk in (1, BATCH * SEQ, 10_000):
        close(value_and_grad(functools.partial(chunked, chunk=chunk))(model, *batch), want, terms=200)


def test_correct_counts_the_targets_with_the_largest_logit(batch):
    tokens, _, mask = batch
    model = models()["linear"]
    best = eqx.filter_jit(lambda model: model.unembed(model.hidden(tokens)).argmax(axis=-1))(model)
    (_, sums), _ = value_and_grad(chunked)(model, tokens, best, mask)
    assert int(sums["correct"]) == mask.sum()


def test_masked_tokens_count_for_nothing(batch):
    tokens, targets, mask = batch
    model = models()["linear"]

    def loss(head_and_x, targets, mask):
        return cross_entropy(*head_and_x, targets, mask, chunk=20, z_loss=Z_LOSS)

    x, hidden = eqx.filter_jit(lambda model: model.hidden(tokens))(model), np.asarray(mask) == 0
    (want, _), (want_dw, want_dx) = value_and_grad(loss)((model.head, x), targets, mask)
    bad_x = jnp.asarray(np.where(hidden[..., None], np.nan, x))
    bad_targets = jnp.asarray(np.where(hidden, -100, targets))
    (got, _), (dw, dx) = value_and_grad(loss)((model.head, bad_x), bad_targets, mask)
    close((got, dw, dx), (want, want_dw, want_dx), terms=200)
    assert not np.asarray(dx)[hidden].any()
    none, _ = value_and_grad(loss)((model.head, bad_x), targets, jnp.zeros_like(mask))
    assert none[0] == 0 and none[1] == {"loss": 0, "correct": 0}


def test_no_product_is_computed_twice_or_for_nothing(batch):
    _, targets, mask = batch
    head, x = models()["linear"].head.weight, jnp.ones((BATCH, SEQ, EMBED))

    def loss(x, head):
        return cross_entropy(lambda x: x @ head.T, x, targets, mask, chunk=20)[0]

    products = lambda f: jax.jit(f).lower(x, head).as_text().count("stablehlo.dot_general")
    assert products(loss) == 1
    assert products(jax.grad(loss)) == 2, "a frozen head gets no gradient"
    assert products(jax.grad(loss, argnums=1)) <= 3
    assert products(jax.grad(loss, argnums=(0, 1))) == 3


def test_logits_are_never_whole():
    batch, seq, vocab, embed = 4, 256, 4096, 16
    shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
    labels = shape(batch, seq, dtype=jnp.int32)

    def loss(x, head, targets, mask):
        return cross_entropy(lambda x: x @ head.T, x, targets, mask, chunk=64)[0]

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    memory = grad.lower(shape(batch, seq, embed), shape(vocab, embed), labels, labels).compile().memory_analysis()
    assert memory.temp_size_in_bytes < batch * seq * vocab * 4 / 4


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    seq = 600
    x = jnp.ones((1, seq, 1), jnp.bfloat16)
    targets, mask = jnp.zeros((1, seq), jnp.int32), jnp.ones((1, seq), jnp.int32)

    def loss(head):
        return cross_entropy(lambda x: x @ head.T, x, targets, mask, chunk=1)[0]

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((2, 1), jnp.bfloat16))
    close(gradient, [[-seq / 2], [seq / 2]], terms=3)


def test_gradients_are_scaled_without_rounding_the_scale():
    """A mean over 7 targets divides the sum's gradients by 7 and rounds once. It does not multiply by a bfloat16."""
    x = jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16).reshape(1, 64, 1)
    head = jnp.array([[1], [-0.5], [0.25]], jnp.bfloat16)
    targets, mask = jnp.arange(64)[None] % 3, jnp.ones((1, 64), jnp.int32)

    def loss(x, head, count):
        return cross_entropy(lambda x: x @ head.T, x, targets, mask, chunk=32)[0] / count

    gradient = jax.jit(jax.grad(loss))
    want = np.float32(gradient(x, head, 1.0)) * np.float32(1 / 7)
    np.testing.assert_array_equal(gradient(x, head, 7.0), want.astype(jnp.bfloat16))


@functools.partial(jax.value_and_grad, argnums=(0, 1))
def of_a_head(x, head, targets, mask):
    return cross_entropy(lambda x: jnp.einsum("bse,ve->bsv", x, head), x, targets, mask, chunk=6, z_loss=Z_LOSS)[0]


@pytest.fixture(scope="module")
def on_one_device():
    """Returns the arguments (x, a head, targets and mask), and the loss and gradients on one device."""
    random = np.random.RandomState(0)
    x, head = random.randn(16, 12, EMBED).astype(np.float32), random.randn(96, EMBED).astype(np.float32)
    given = x, head, random.randint(0, 96, (16, 12)), random.randint(0, 2, (16, 12))
    return given, jax.jit(of_a_head)(*given)


@pytest.mark.parametrize("shape", [(8, 1, 1), pytest.param((4, 1, 2), marks=pytest.mark.thorough), (2, 2, 2)])
def test_split_over_devices(shape, on_one_device):
    mesh = jax.make_mesh(shape, ("fsdp", "context", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    (x, head, targets, mask), want = on_one_device
    tokens = ("fsdp", "context")
    args = [place(x, *tokens), place(head, "tensor", "fsdp"), place(targets, *tokens), place(mask, *tokens)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(of_a_head, out_shardings=(None, (args[0].sharding, args[1].sharding))).lower(*args).compile()
        close(compiled(*args), want, terms=200)
    computations = re.split(r"\n\n", compiled.as_text())
    bodies = set(re.findall(r"body=%([\w.]+)", compiled.as_text()))
    inside = "\n".join(
        c for c in computations if re.match(r"\s*%([\w.]+)", c) and re.match(r"\s*%([\w.]+)", c)[1] in bodies
    )
    assert inside
    if shape == (8, 1, 1):  # the head crosses the network once each way, not for every chunk
        assert not re.search(r"(all-reduce|all-gather|reduce-scatter|all-to-all)\(", inside)
