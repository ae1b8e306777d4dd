"""A training step of a mixture of experts: the routers' part of the loss, and the movement of their biases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train.state.mesh import put_batch
from train.state.optim import adamw, make_schedule
from train.state.state import init_state
from train.step.language import cross_entropy
from train.step.step import Recipe, jit_train_step
from zoo.mesh import make_mesh
from zoo.models import deepseek3, mixtral
from zoo.surgery import shardings


SGD = optax.sgd(1.0)
SCHEDULE = make_schedule("cosine", peak=0.01, steps=10, warmup=2, decay=0)
OPTIONS = dict(schedule=SCHEDULE, compute_dtype=jnp.float32, objective=cross_entropy)
ROUTER = dict(router_balance=0.5, router_sequence=0.3, router_z=0.1)


@pytest.fixture(scope="module")
def batch():
    random = np.random.RandomState(0)
    batch = {
        "tokens": random.randint(0, 64, (8, 12)),
        "targets": random.randint(0, 64, (8, 12)),
        "loss_mask": random.rand(8, 12) < 0.5,
        "segments": np.arange(12) < 10,
        "positions": np.arange(12),
    }
    return {name: jnp.asarray(np.broadcast_to(array, (8, 12)), jnp.int32) for name, array in batch.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return zoo.load(tiny.write(tmp_path_factory.mktemp("checkpoint"), "mixtral"))


@pytest.fixture(scope="module")
def routed(model):
    """Returns the step with the routers' losses."""
    return jit_train_step(init_state(model, SGD), Recipe(optimizer=SGD, **OPTIONS, **ROUTER))


@pytest.mark.thorough
def test_the_loss_of_the_routers(model, batch, routed):
    """The loss equals the formulas, with the means over layers written out."""

    def loss(model):
        x, _, reports = model.hidden(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
        losses = optax.softmax_cross_entropy_with_integer_labels(model.unembed(x), batch["targets"])
        weights = batch["loss_mask"].astype(jnp.float32)
        _, (routing,), _ = reports
        mean = routing.probability / routing.tokens[:, None]
        share = routing.load / jnp.sum(routing.load, axis=1, keepdims=True)
        balance = jnp.mean(routing.load.shape[1] * jnp.sum(mean * share, axis=1))
        switch = model.config.num_experts_per_tok * balance  # transformers' scale, and its configurations'
        z = jnp.mean(routing.squared_log_z / routing.tokens)
        rows = jnp.mean(routing.imbalance_of_rows / routing.tokens)
        return jnp.sum(losses * weights) / jnp.sum(weights) + 0.5 * switch + 0.3 * rows + 0.1 * z, balance

    gradients, balance = jax.jit(jax.grad(loss, has_aux=True))(model)
    state, metrics = routed(init_state(model, SGD), batch)
    close(state.model, jax.tree.map(np.subtract, model, gradients), terms=2 * MODEL)
    close(metrics["balance"], balance, terms=MODEL)
    assert metrics["balance"] > 1


@pytest.mark.thorough
def test_in_microbatches_on_a_mesh(model, batch):
    """Microbatches give the same update, although the balance is that of a whole batch, and the parts differ."""
    sgd = optax.sgd(
        0.1
    )  # gradients in parts are off by 2.4e-5 of the largest on CPUs without AVX-512, weights by a tenth
    targets = np.arange(8)[:, None] % 3 < 2
    batch = batch | {"loss_mask": batch["loss_mask"] * jnp.asarray(targets, jnp.int32)}
    batch["segments"] = batch["segments"].at[::4, 2:].set(0)
    whole = jit_train_step(init_state(model, sgd), Recipe(optimizer=sgd, **OPTIONS, **ROUTER))
    alone = whole(init_state(model, sgd), batch)
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    with jax.set_mesh(mesh):
        state = init_state(jax.device_put(model, shardings(model, mixtral.FAMILY.partition_rules, mesh)), sgd)
        step = jit_train_step(state, Recipe(optimizer=sgd, **OPTIONS, **ROUTER, microbatches=4))
        parts = step(state, put_batch(batch, mesh))
    close(parts, alone, terms=2 * MODEL)


@pytest.mark.thorough
def test_biases_move_towards_an_even_load(tmp_path, batch):
    """Biases move by the rate at each step, whatever the optimizer does."""
    model = zoo.load(tiny.write(tmp_path, "deepseek3"))
    optimizer = adamw(SCHEDULE)
    biases = lambda model: [np.asarray(a) for p, a in jax.tree_util.tree_leaves_with_path(model) if "bias" in str(p)]
    state = init_state(model, optimizer)
    before = biases(state.model)
    rebalance = functools.partial(deepseek3.rebalance, rate=0.01)
    step = jit_train_step(state, Recipe(optimizer=optimizer, **OPTIONS, microbatches=2, rebalance=rebalance))
    first = None
    for _ in range(40):
        state, metrics = step(state, batch)
        first = first or float(metrics["balance"])
    moves = np.concatenate([(a - b).ravel() for a, b in zip(biases(state.model), before, strict=True)]) / 0.01
    assert np.abs(moves).max() > 5
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-3, err_msg="whole moves: AdamW leaves them alone")
    assert float(metrics["balance"]) < first
