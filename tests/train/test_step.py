"""One training step: its numbers, its memory, and what it leaves alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zoo
from tests.zoo import tiny
from train.checkpoint import Checkpoints
from train.mesh import make_mesh, put_batch
from train.optim import adamw, make_schedule
from train.state import abstract_state, init_state
from train.step import REMAT, cast, jit_train_step, loss_sums
from zoo import qwen3
from zoo.surgery import shardings


CONFIG = qwen3.Config(64, 32, 48, 3, 4, 2, 16, 64, 3)
BATCH, SEQ = 8, 24
SGD = optax.sgd(1.0)  # unlike Adam, it does not hide the size of a gradient
SCHEDULE = make_schedule("cosine", peak=0.01, steps=10, warmup=2, decay=0)
ADAMW = adamw(SCHEDULE)
options = functools.partial(dict, schedule=SCHEDULE, compute_dtype=jnp.float32, chunk=40, z_loss=1e-3)


@functools.cache
def new_model():
    return eqx.filter_jit(qwen3.Model)(CONFIG, key=jax.random.key(0))


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def batch():
    """Two documents and some padding in every row, and very different numbers of targets."""
    random = np.random.RandomState(0)
    segments = np.repeat([[1, 2, 0]], [7, 13, 4], axis=1) * np.ones((BATCH, 1), int)
    targets = random.rand(BATCH, SEQ) < np.array([0, 0.01, 0.02, 0.05, 0.5, 0.9, 1, 1])[:, None]
    batch = {
        "tokens": random.randint(0, 64, (BATCH, SEQ)),
        "targets": random.randint(0, 64, (BATCH, SEQ)),
        "loss_mask": targets * (segments > 0),
        "segments": segments,
        "positions": np.concatenate([np.arange(7), np.arange(13), np.arange(4)]) * np.ones((BATCH, 1), int),
    }
    return {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}


@functools.cache
def step(optimizer, **changes):
    """A compiled step, and the state it begins with."""
    state = abstract_state(new_model(), optimizer)
    return jit_train_step(state, optimizer=optimizer, **options(**changes))


def run(model, batch, optimizer, **changes):
    return step(optimizer, **changes)(init_state(model, optimizer), batch)


def assert_close(got, want, tolerance=1e-5):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, want)


def assert_same(got, want):
    assert jax.tree.all(jax.tree.map(lambda g, w: bool((np.asarray(g) == np.asarray(w)).all()), got, want))


def test_the_update_is_that_of_the_mean_loss(model, batch):
    def mean_loss(model):
        x, _ = model.hidden(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
        logits = model.unembed(x)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        losses = log_z - jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        weights = batch["loss_mask"].astype(jnp.float32)
        average = lambda a: jnp.sum(a * weights) / jnp.sum(weights)
        return average(losses + 1e-3 * log_z**2), average(losses)

    gradients, loss = jax.jit(jax.grad(mean_loss, has_aux=True))(model)
    state, metrics = run(model, batch, SGD)
    assert_close(state.model, jax.tree.map(jnp.subtract, model, gradients))
    assert_close(metrics["loss"], loss)
    assert_close(metrics["grad_norm"], optax.tree.norm(gradients))
    assert int(state.step) == 1 and bool(metrics["finite"])
    assert int(metrics["targets"]) == batch["loss_mask"].sum() and int(metrics["tokens"]) == BATCH * 20
    assert float(metrics["learning_rate"]) == pytest.approx(0.005)


@pytest.mark.parametrize("changes", [dict(microbatches=4), dict(remat=REMAT["full"]), dict(remat=REMAT["dots"])])
def test_what_saves_memory_changes_nothing(model, batch, changes):
    assert_close(run(model, batch, SGD, **changes), run(model, batch, SGD))


def test_remat_saves_memory(batch):
    config = qwen3.Config(64, 32, 256, 6, 4, 2, 16, 256, 6)
    model = eqx.filter_eval_shape(lambda: qwen3.Model(config, key=jax.random.key(0)))
    batch = {
        name: jax.ShapeDtypeStruct((8, 128), jnp.int32)
        for name in ("tokens", "targets", "loss_mask", "segments", "positions")
    }

    def temp(remat):
        loss = lambda model, batch: loss_sums(model, batch, remat=REMAT[remat], chunk=64)[0]
        return jax.jit(jax.grad(loss)).lower(model, batch).compile().memory_analysis().temp_size_in_bytes

    sizes = [temp(name) for name in ("full", "dots", "none")]
    assert sizes[0] < 0.7 * sizes[1] and sizes[1] < 0.9 * sizes[2]


def test_bfloat16(model, batch):
    state, metrics = run(model, batch, SGD, compute_dtype=jnp.bfloat16)
    want, want_metrics = run(model, batch, SGD)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(state.model))
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, state.model, want.model))
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, want.model, model))
    assert 0 < difference < 0.03 * moved
    assert metrics["loss"] == pytest.approx(want_metrics["loss"], rel=0.01)


def test_a_step_that_is_not_finite_changes_nothing(model, batch):
    state, _ = run(model, batch, ADAMW)
    state = eqx.tree_at(lambda s: s.model.lm_head.weight, state, state.model.lm_head.weight.at[3, 3].set(1e38))
    before = jax.tree.map(np.array, state)
    after, metrics = step(ADAMW)(state, batch)
    assert not metrics["finite"] and not np.isfinite(metrics["grad_norm"])
    assert_same(after, before)


def test_the_state_is_used_up(model, batch):
    state = init_state(model, ADAMW)
    size = sum(a.nbytes for a in jax.tree.leaves(state))
    assert step(ADAMW).lower(state, batch).compile().memory_analysis().alias_size_in_bytes >= size
    step(ADAMW)(state, batch)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))
    assert not any(a.is_deleted() for a in jax.tree.leaves(model))


def test_a_memory_mapped_model(tmp_path, batch):
    """On a CPU the arrays of a loaded model are the file itself, which training must not write to."""
    folder = tiny.write(tmp_path, "qwen3")
    content = (folder / "model.safetensors").read_bytes()
    model = zoo.load(folder)
    state = init_state(model, SGD)
    places = lambda tree: {a.unsafe_buffer_pointer() for a in jax.tree.leaves(tree)}
    assert not places(state) & places(model)
    train = jit_train_step(state, optimizer=SGD, **options())
    after, _ = train(state, batch)
    want, _ = train(init_state(jax.tree.map(lambda a: jnp.asarray(np.array(a)), model), SGD), batch)
    assert_same(after, want)
    assert (folder / "model.safetensors").read_bytes() == content


def test_on_a_mesh(model, batch):
    mesh = make_mesh("fsdp=4,tensor=2")
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, qwen3.PARTITION_RULES, mesh))
        state = init_state(placed, ADAMW)
        places = jax.tree.map(lambda a: a.sharding, state)
        train = jit_train_step(state, optimizer=ADAMW, **options(microbatches=2))
        after, metrics = train(state, put_batch(batch, mesh))
        again, _ = train(after, put_batch(batch, mesh))
    want, want_metrics = run(model, batch, ADAMW)
    assert_close(metrics, want_metrics)
    assert places == jax.tree.map(lambda a: a.sharding, again)
    moments = again.opt_state[1][0].mu
    assert moments.lm_head.weight.sharding.spec == P("tensor", "fsdp")
    assert moments.layers.period[0].mlp.down_proj.weight.sharding.spec == P(None, "fsdp", "tensor")
    assert again.step.sharding.is_fully_replicated
    assert jax.tree.structure(again) == jax.tree.structure(want)


def test_going_on_is_bit_identical(model, batch, tmp_path):
    batches = [jax.tree.map(lambda a, n=n: jnp.roll(a, n, axis=0), batch) for n in range(4)]
    train = step(ADAMW, compute_dtype=jnp.bfloat16)
    state, losses = init_state(model, ADAMW), []
    for n, part in enumerate(batches):
        if n == 2:
            checkpoints = Checkpoints(tmp_path, identity={})
            checkpoints.save(state, n)
            checkpoints.close()
        state, metrics = train(state, part)
        losses.append(float(metrics["loss"]))
    other, n = Checkpoints(tmp_path, identity={}).restore(abstract_state(model, ADAMW))
    for part, loss in zip(batches[n:], losses[n:], strict=True):
        other, metrics = train(other, part)
        assert float(metrics["loss"]) == loss
    assert_same(other, state)


def test_microbatches_must_fit(model, batch):
    with pytest.raises(ValueError, match="8 sequences can't be split into 3"):
        run(model, batch, SGD, microbatches=3)


def test_loss_sums_of_a_cast_model(model, batch):
    _, sums = jax.jit(lambda model, batch: loss_sums(cast(model, jnp.bfloat16), batch))(model, batch)
    _, metrics = run(model, batch, SGD)
    assert sums["loss"] / metrics["targets"].astype(jnp.float32) == pytest.approx(metrics["loss"], rel=0.01)
