"""QK-clip: attention logits after a step that records and clips them, the weights of other heads, and refusals."""

import functools
import math
import pathlib
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from kernels import Tokens
from kernels.attention import logits
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, thorough
from train.state.mesh import put_batch
from train.state.optim import make_schedule
from train.state.state import init_state, split_frozen
from train.step.clip import check_qk_clip, largest_of, recorded
from train.step.language import cross_entropy
from train.step.step import Recipe, jit_train_step
from zoo import lora, models
from zoo.mesh import make_mesh
from zoo.nn import clip
from zoo.nn.clip import AbstractScalableAttention, scaled
from zoo.registry import family_of
from zoo.surgery import modules, shardings, with_layer


THRESHOLD = 50.0  # the tiny models' logits are smaller
STILL = optax.sgd(0.0)
SCHEDULE = make_schedule("cosine", peak=0.01, steps=10, warmup=2, decay=0)
OPTIONS = dict(optimizer=STILL, schedule=SCHEDULE, compute_dtype=jnp.float32, objective=cross_entropy)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return lambda name: zoo.load(tiny.write(tmp_path_factory.mktemp("checkpoint"), name))


@pytest.fixture(scope="module")
def batch():
    """Returns eight rows whose padding, which no report counts, follows ten tokens, and four rows of padding alone."""
    random = np.random.RandomState(0)
    filled = np.arange(12) < np.where(np.arange(12) < 8, 10, 0)[:, None]
    drawn = lambda: np.pad(random.randint(0, 64, (8, 12)), ((0, 4), (0, 0)))
    batch = {"tokens": drawn(), "targets": drawn(), "loss_mask": filled, "segments": filled, "positions": np.arange(12)}
    return {name: jnp.asarray(np.broadcast_to(array, (12, 12)), jnp.int32) for name, array in batch.items()}


def attention_of(module):
    ((_, attention),) = modules(module, AbstractScalableAttention)
    return attention


@pytest.mark.parametrize(
    "name", ["llama", "phi3", "deepseek3", *map(thorough, ("llama-tied-biases", "gpt3", "deepseek3-new"))]
)
def test_a_factor_of_each_head(load, name):
    """Logits are multiplied by their head's factor, those of other heads stay, and so do values."""
    model = load(name)
    attention = attention_of(model.layers[0])
    x = jnp.asarray(np.random.RandomState(1).randn(2, 9, model.config.hidden_size), jnp.float32)
    factor = jnp.array([1.0, 0.25, 1.0, 0.6])

    @eqx.filter_jit
    def largest(attention):
        with logits.recorded() as found:
            attention(x, None, Tokens())
        return found[0]

    before, after = map(np.asarray, (largest(attention), largest(scaled(attention, factor))))
    close(after, before * np.asarray(factor), terms=100)
    assert (after[:, :, ::2] == before[:, :, ::2]).all()
    values = eqx.filter_jit(lambda attention: attention(x[:, :1], None, Tokens())[0])  # of one key, whatever its logit
    np.testing.assert_array_equal(values(scaled(attention, factor)), values(attention))


def enlarged(model, n, factor):
    """Returns the model with logits of layer n that are larger, or smaller, by each head's factor."""
    layer = model.layers[n]
    return with_layer(model, n, eqx.tree_at(attention_of, layer, scaled(attention_of(layer), jnp.asarray(factor))))


@pytest.fixture(scope="module")
def stepped(load, batch):
    """Returns a function that gives a model with two heads of large logits, and its state and metrics after a step.

    Queries and keys do not move but for the clipping, as the learning rate is 0.
    """

    @functools.cache
    def after(name):
        model = enlarged(load(name), 2, [1.0, 5.0, 1.0, 6.0])  # larger logits would condition the gradients badly
        state = init_state(model, STILL)
        return model, *jit_train_step(state, Recipe(**OPTIONS, qk_clip=THRESHOLD))(state, batch)

    return after


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama-rope3", "deepseek3"])
def test_a_step(stepped, batch, name):
    """A head whose largest logit exceeded the threshold has it as its largest, and no other weights change."""
    model, state, metrics = stepped(name)

    @jax.jit
    def largest(model):
        at = dict(positions=batch["positions"], segments=batch["segments"])
        return largest_of(recorded(model).hidden(batch["tokens"], **at)[2])[-1][-1]

    before, after = map(np.asarray, (largest(model), largest(state.model)))
    over = np.array([False, True, False, True])
    assert (before > THRESHOLD).tolist() == over.tolist()
    close(metrics["attention_logit"], before.max(), terms=MODEL)
    close(after[over], THRESHOLD, terms=MODEL)
    np.testing.assert_array_equal(after[~over], before[~over])

    def check(old, new, expected):
        close(new, expected, terms=MODEL)
        np.testing.assert_array_equal(new[expected == old], old[expected == old])

    expected = enlarged(model, 2, jnp.where(over, THRESHOLD / before, 1.0))
    jax.tree.map(check, *(jax.tree.map(np.asarray, tree) for tree in (model, state.model, expected)))


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["fsdp=2,tensor=2,context=2", "stage=3,tensor=2"])
def test_in_microbatches_on_a_mesh(stepped, batch, text):
    """The maximum of microbatches, of devices that split rows, heads and tokens, of stages, and under remat, is that of
    one.
    """
    model, *alone = stepped("llama-rope3")
    mesh = make_mesh(text, jax.devices()[: math.prod(map(int, re.findall(r"\d", text)))])
    with jax.set_mesh(mesh):
        state = init_state(jax.device_put(model, shardings(model, family_of(model).partition_rules, mesh)), STILL)
        step = jit_train_step(state, Recipe(**OPTIONS, qk_clip=THRESHOLD, microbatches=2, remat=jax.checkpoint))
        parts = step(state, put_batch(batch, mesh))
    close(parts, tuple(alone), terms=2 * MODEL)


def test_refusals(load):
    llama, qwen3 = load("llama"), load("qwen3")
    check_qk_clip(100.0, llama)
    check_qk_clip(0.0, qwen3)
    with pytest.raises(ValueError, match="--qk-clip 100: the attention of qwen3 can't be clipped: it norms queries"):
        check_qk_clip(100.0, qwen3)
    with pytest.raises(ValueError, match="--qk-clip -1: give a logit above 0"):
        check_qk_clip(-1.0, llama)
    for where in ("*.k_proj.*", "*.self_attn.*"):
        with pytest.raises(ValueError, match=r"--qk-clip 100 scales layers.period.0.self_attn.[qk]_proj, which is not"):
            check_qk_clip(100.0, *split_frozen(llama, [where]))
    check_qk_clip(100.0, *split_frozen(llama, ["*.v_proj.*", "*norm*"]))
    with pytest.raises(ValueError, match=r"self_attn\.k_proj, which is not trained"):
        check_qk_clip(100.0, *lora.split(lora.add(llama, rank=2, alpha=4.0, key=jax.random.key(0))))


def test_the_page_lists_the_families():
    page = (pathlib.Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    (listed,) = re.findall(r"^Families that it is for: (.*)\.$", page, flags=re.MULTILINE)
    can = lambda kind: isinstance(kind, type) and issubclass(kind, AbstractScalableAttention)
    bases = {clip.AbstractScalableAttention, clip.AbstractGroupedAttention}
    found = {
        family.name
        for family in models.FAMILIES.values()
        if any(can(kind) and kind not in bases for kind in vars(sys.modules[family.Config.__module__]).values())
    }
    assert set(re.findall(r"`(\w+)`", listed)) == found
