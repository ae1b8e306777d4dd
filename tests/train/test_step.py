"""One training step: its numbers, its memory, and the arrays that it must not change."""

import collections
import functools
from typing import Any

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import kernels
import zoo
from kernels.backends import compile_options
from kernels.cross_entropy.chunks import Chunks
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.optim import adamw, make_schedule, rounded
from train.state.remat import REMAT
from train.state.state import abstract_state, init_state
from train.step.language import cross_entropy
from train.step.step import Recipe, jit_train_step, train_step
from zoo.mesh import make_mesh
from zoo.models import llama, qwen3
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import Linear
from zoo.nn.stack import Stack
from zoo.surgery import cast, shardings
from zoo.weights.checkpoint import skeleton


BATCH, SEQ = 8, 24
SGD = optax.sgd(1.0)  # unlike Adam, it does not hide the size of a gradient
SCHEDULE = make_schedule("cosine", peak=0.01, steps=10, warmup=2, decay=0)
ADAMW = adamw(SCHEDULE)
OBJECTIVE = functools.partial(cross_entropy, chunk=40, z_loss=1e-3)
OPTIONS = dict(schedule=SCHEDULE, compute_dtype=jnp.float32, objective=OBJECTIVE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def model(folder):
    return cast(zoo.load(folder), jnp.float32)


@pytest.fixture(scope="module")
def train(model):
    """Returns a function that compiles steps once for each optimizer and set of unusual options."""

    @functools.cache
    def step(optimizer, **changes):
        return jit_train_step(abstract_state(model, optimizer), Recipe(optimizer=optimizer, **OPTIONS | changes))

    return step


@pytest.fixture(scope="module")
def batch():
    """Returns rows of two documents and some padding, with very different numbers of targets."""
    random = np.random.RandomState(0)
    lengths, rows = [7, 13, 4], np.ones((BATCH, 1))
    segments = np.repeat([1, 2, 0], lengths) * rows
    targets = random.rand(BATCH, SEQ) < np.array([0, 0.01, 0.02, 0.05, 0.5, 0.9, 1, 1])[:, None]
    batch = {
        "tokens": random.randint(0, 64, (BATCH, SEQ)),
        "targets": random.randint(0, 64, (BATCH, SEQ)),
        "loss_mask": targets * (segments > 0),
        "segments": segments,
        "positions": np.concatenate([np.arange(n) for n in lengths]) * rows,
    }
    return {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}


def assert_same(got, want):
    assert jax.tree.all(jax.tree.map(lambda g, w: bool((np.asarray(g) == np.asarray(w)).all()), got, want))


def test_the_global_norm_is_taken_once(model, batch, monkeypatch):
    """Metrics and clipping share one global norm, because it reads all gradients."""
    norms = []
    norm = optax.tree.norm
    monkeypatch.setattr(optax.tree, "norm", lambda tree: norms.append(norm(tree)) or norms[-1])
    optimizer = rounded(adamw(SCHEDULE, clip_norm=1e-3), "bfloat16")
    recipe = Recipe(optimizer=optimizer, **OPTIONS)
    jax.eval_shape(functools.partial(train_step, recipe), init_state(model, optimizer), batch)
    assert len(norms) == 1


def test_the_update_is_that_of_the_mean_loss(model, batch, train):
    def mean_loss(model):
        x, _, _ = model.hidden(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
        logits = model.unembed(x)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        losses = log_z - jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        weights = batch["loss_mask"].astype(jnp.float32)
        average = lambda a: jnp.sum(a * weights) / jnp.sum(weights)
        return average(losses + 1e-3 * log_z**2), average(losses)

    gradients, loss = jax.jit(jax.grad(mean_loss, has_aux=True))(model)
    state, metrics = train(SGD)(init_state(model, SGD), batch)
    close(state.model, jax.tree.map(np.subtract, model, gradients), terms=2 * MODEL)
    close(metrics["loss"], loss, terms=MODEL)
    close(metrics["grad_norm"], optax.tree.norm(gradients), terms=2 * MODEL)
    assert int(state.step) == 1 and bool(metrics["finite"])
    assert int(metrics["targets"]) == batch["loss_mask"].sum() and int(metrics["tokens"]) == BATCH * 20
    close(float(metrics["learning_rate"]), 0.005, terms=4)


@pytest.mark.thorough
def test_in_microbatches_on_a_mesh(model, batch, train):
    mesh = make_mesh("replica=2,fsdp=2,tensor=2")
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, qwen3.FAMILY.partition_rules, mesh))
        state = init_state(placed, SGD)
        places = jax.tree.map(lambda a: a.sharding, state)
        step = jit_train_step(state, Recipe(optimizer=SGD, **OPTIONS, microbatches=2))
        after = step(state, put_batch(batch, mesh))
    close(after, train(SGD)(init_state(model, SGD), batch), terms=2 * MODEL)
    assert jax.tree.map(lambda a: a.sharding, after[0]) == places
    moments = abstract_state(placed, ADAMW).opt_state[1][0]
    for part in (after[0].model, moments.mu, moments.nu):
        assert part.lm_head.weight.sharding.spec == P(("tensor", "replica"), "fsdp")
        assert part.layers.period[0].mlp.down_proj.weight.sharding.spec == P("stage", ("fsdp", "replica"), "tensor")
    assert moments.count.sharding.is_fully_replicated


def test_counting_runs_no_layers(model, batch, train):
    """Parts are divided by the whole batch's count. The passes that count are traced; only the count is compiled."""
    state = abstract_state(model, SGD)
    one, parts = (train(SGD, **o).lower(state, batch).as_text() for o in ({}, {"microbatches": 2}))
    products = one.count("stablehlo.dot_general")
    assert products > 20 and parts.count("stablehlo.dot_general") == 2 * products  # the first part, and the others


def test_microbatches_must_fit(model, batch, train):
    with pytest.raises(ValueError, match="8 sequences can't be split into 3"):
        train(SGD, microbatches=3)(init_state(model, SGD), batch)


def test_dots_runs_no_kernel_twice():
    """The backward pass repeats neither attention's forward kernel nor an expert's product."""

    def calls(jaxpr):
        """Yields the kernels of a program, and of its inner programs, whose results are used; XLA drops others."""
        used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != "pallas_call":
                for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                    yield from calls(inner)
            elif used & {id(v) for v in eqn.outvars}:
                yield eqn.params["name"]

    def layer(x, w):
        q = jnp.stack([x @ w[0]] * 2, axis=1)[None]
        x += kernels.attention(q, q, q, scale=1.0, mask=kernels.Causal(), implementation="triton")[0, :, 0]
        return jnp.tanh(kernels.ragged_dot(jnp.tanh(x), w, jnp.array([10, 54]), implementation="triton")), None

    x, weights = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((3, 2, 64, 64), jnp.bfloat16)
    loss = lambda remat: lambda weights: jnp.sum(jax.lax.scan(remat(layer), x, weights)[0])
    found = {
        name: collections.Counter(calls(jax.make_jaxpr(jax.grad(loss(remat or (lambda f: f))))(weights).jaxpr))
        for name, remat in REMAT.items()
    }
    assert found["none"]["attention_forward"] == found["none"]["ragged_dot_out"] == 1
    assert found["dots"] == found["none"]
    assert found["attention"] == found["none"] + collections.Counter(["ragged_dot_out"])
    assert found["full"] == found["none"] + collections.Counter(["attention_forward", "ragged_dot_out"])


def test_gradients_of_one_part_are_kept_in_the_compute_dtype(model, batch):
    """Gradients wait for the global norm before the optimizer reads them. Float32 ones would take twice the bytes."""
    step = functools.partial(train_step, Recipe(optimizer=SGD, **OPTIONS | dict(compute_dtype=jnp.bfloat16)))
    (update,) = [
        e for e in jax.make_jaxpr(step)(init_state(model, SGD), batch).jaxpr.eqns if e.primitive.name == "cond"
    ]
    sizes = collections.Counter()
    arrays: Any = {id(v): v.aval for v in update.invars}
    for array in arrays.values():
        sizes[array.dtype.name] += array.size
    weights = sum(a.size for a in jax.tree.leaves(model))
    assert sizes["bfloat16"] == weights <= sizes["float32"] < 1.1 * weights


def test_chunks_of_logits(model, batch, monkeypatch):
    """A chunk has at least 2,048 tokens, or three times as many as a wide model has features, so that 8,192 of Llama
    3.2 3B are one chunk. All chunks are equal, so that none is mostly padding.
    """
    sizes = []
    cross_entropy_of = kernels.cross_entropy
    keep = lambda *args, chunk, **options: sizes.append(chunk) or cross_entropy_of(*args, chunk=chunk, **options)
    monkeypatch.setattr(kernels, "cross_entropy", keep)
    jax.eval_shape(cross_entropy, model, batch)
    eqx.filter_eval_shape(cross_entropy, skeleton(llama.FAMILY, llama.LLAMA3_2_3B), batch)
    assert sizes == [2048, 3 * 3072] and 3 * model.config.hidden_size < 2048
    assert Chunks.of(1, 300, 128)[-2:] == (100, 3) and Chunks.of(4, 300, 128)[-2:] == (30, 10)
    assert Chunks.of(1, 100, 128)[-2:] == (100, 1)


def test_options_of_xla_for_training(model, batch, monkeypatch):
    """XLA knows the options in the table, and the step is compiled with those of the device in use."""
    for options in compile_options.OPTIONS["train"].values():
        jax.jit(lambda x: x, compiler_options=options).lower(1.0).compile()
    monkeypatch.setitem(compile_options.OPTIONS["train"], "cpu", {"no_such_option": 1})
    step = jit_train_step(abstract_state(model, SGD), Recipe(optimizer=SGD, **OPTIONS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        step.lower(init_state(model, SGD), batch).compile()


@pytest.mark.thorough
def test_bfloat16(model, batch, train):
    state, metrics = train(SGD, compute_dtype=jnp.bfloat16)(init_state(model, SGD), batch)
    want, want_metrics = train(SGD)(init_state(model, SGD), batch)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(state.model))
    distance = lambda a, b: float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))
    assert 0 < distance(state.model, want.model) < 0.05 * distance(want.model, model)
    assert float(metrics["loss"]) == pytest.approx(float(want_metrics["loss"]), rel=0.01)


def test_a_step_that_is_not_finite_changes_nothing(model, batch, train):
    state = init_state(model, ADAMW)
    state = eqx.tree_at(lambda s: s.model.lm_head.weight, state, state.model.lm_head.weight.at[3, 3].set(1e38))
    before = jax.tree.map(np.array, state)
    after, metrics = train(ADAMW)(state, batch)
    assert not metrics["finite"] and not np.isfinite(metrics["grad_norm"])
    counted = jax.tree.map(lambda a: a + 1 if a.shape == () else a, before)
    counted = eqx.tree_at(lambda s: s.opt_state[1][0].count, counted, before.opt_state[1][0].count)  # AdamW's own count
    assert_same(after, counted)


def test_the_state_is_used_up(model, batch, train):
    state = init_state(model, ADAMW)
    size = sum(a.nbytes for a in jax.tree.leaves(state))
    assert train(ADAMW).lower(state, batch).compile().memory_analysis().alias_size_in_bytes >= size
    train(ADAMW)(state, batch)
    assert all(a.is_deleted() for a in jax.tree.leaves(state))


def test_a_memory_mapped_model(folder, model, batch, train):
    """On a CPU the arrays of a loaded model are the file itself, which training must not overwrite."""
    content = (folder / "model.safetensors").read_bytes()
    mapped = zoo.load(folder)
    state = init_state(mapped, ADAMW)
    places = lambda tree: {a.unsafe_buffer_pointer() for a in jax.tree.leaves(tree)}
    assert not places(state) & places(mapped)
    after, _ = train(ADAMW)(state, batch)
    want, _ = train(ADAMW)(init_state(jax.tree.map(jnp.copy, model), ADAMW), batch)
    assert_same(after, want)
    assert_same(mapped, model)
    assert (folder / "model.safetensors").read_bytes() == content


def test_going_on_is_bit_identical(model, batch, train, tmp_path):
    batches = [jax.tree.map(lambda a, n=n: jnp.roll(a, n, axis=0), batch) for n in range(4)]
    state, losses = init_state(model, ADAMW), []
    for n, part in enumerate(batches):
        if n == 2:
            checkpoints = Checkpoints(tmp_path, identity={})
            checkpoints.save(state, n)
            checkpoints.close()
        state, metrics = train(ADAMW)(state, part)
        losses.append(float(metrics["loss"]))
    other, n = Checkpoints(tmp_path, identity={}).restore(abstract_state(model, ADAMW))
    for part, loss in zip(batches[n:], losses[n:], strict=True):
        other, metrics = train(ADAMW)(other, part)
        assert float(metrics["loss"]) == loss
    assert_same(other, state)


class Block(AbstractBlock):
    up: Linear
    down: Linear

    def __init__(self, *, key):
        up, down = jax.random.split(key)
        self.up, self.down = Linear(16, 128, std=0.3, key=up), Linear(128, 16, std=0.3, key=down)

    def __call__(self, x, cache, at):
        return x + self.down(jnp.sin(jnp.sin(self.up(x)))), cache, None


def test_remat():
    stack = Stack(lambda n, *, key: Block(key=key), ["mlp"] * 6, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 32, 16))

    def compiled(remat):
        loss = lambda stack, x: jnp.sum(jnp.square(stack.with_remat(REMAT[remat])(x)[0]))
        return jax.jit(jax.grad(loss)).lower(stack, x).compile()

    none, dots, full = (compiled(name) for name in ("none", "dots", "full"))
    close((dots(stack, x), full(stack, x)), (none(stack, x),) * 2, terms=2 * MODEL)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (none, dots, full)]
    assert sizes[1] < 0.8 * sizes[0] and sizes[2] < 0.5 * sizes[1], sizes


@pytest.mark.thorough
def test_remat_wraps_each_layer():
    """Remat wraps each layer of the head, the period and the tail. CSE may stay enabled only in a scan of one layer:
    there XLA can neither merge the recomputation with the forward pass, nor compute it for all layers at once.
    """

    def prevented(kinds):
        calls = []
        remat = lambda layer, prevent_cse: calls.append(prevent_cse) or layer
        stack = Stack(lambda n, *, key: Block(key=key), kinds, key=jax.random.key(0)).with_remat(remat)
        jax.eval_shape(lambda x: stack(x)[0], jnp.ones((4, 32, 16)))
        return calls

    assert prevented(["a"] * 6) == [False]
    assert prevented(["dense", *"abababab", "last"]) == [True] * 4
    assert prevented(["dense", *"aaaaaa"]) == [True, False]
    assert prevented("ababab" + "d" + "ccccc") == [True] * 3 + [False]  # three scans
