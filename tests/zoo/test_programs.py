"""Functions that run as several programs, and the decoding of large models on a CPU, which they are for."""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import thorough
from train.planning import breakdown
from zoo.generation.complete import complete
from zoo.nn import programs, stack
from zoo.nn.programs import in_programs, own_program


WEIGHTS = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)


@own_program
def layer(weight, x, states, n):
    """Changes the features and one of the states; hands the count on as it came."""
    x = jnp.tanh(x @ weight)
    return x, states.at[n].add(x), n


def steps(static, weights, state):
    """Runs layers in a loop whose end is known only as it runs, with equations before, between and after them."""
    del static
    scale = jnp.sum(weights[0] ** 2)

    def body(carry):
        n, x, states = carry
        for k, weight in enumerate(weights):
            x, states, _ = layer(weight, x, states, jnp.int32(k))
        return n + 1, x / scale, states

    n, x, states = jax.lax.while_loop(lambda c: (c[0] < 5) & (jnp.sum(c[1]) > 0), body, (jnp.int32(0), *state))
    x, states, k = layer(weights[0], x, states, n)
    x, states, one = layer(weights[1], x, states, jnp.int32(1))
    return {"x": x + 1, "states": states, "count": (n, k, one), "weights": weights[1], "constant": jnp.ones(2)}


def inputs():
    return list(WEIGHTS), (jnp.ones((1, 3)), jnp.zeros((6, 1, 3)))


def test_a_function_in_programs_is_the_function():
    whole, cut = jax.jit(steps, static_argnums=0), in_programs(steps, free=1)
    for _ in range(2):
        want, found = whole("name", *inputs()), cut("name", *map(jax.device_put, inputs()))
        assert jax.tree.structure(want) == jax.tree.structure(found)
        assert int(found["count"][0]) == int(want["count"][0]) > 0
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            close(ours, theirs, terms=30)


def test_results_are_the_callers_own():
    """A caller may give away what it got, also constants and what a loop only hands through."""

    def function(_, x):
        body = lambda c: (c[0] + 1, layer(x, c[1], c[2], c[0])[0], c[2], c[3])
        n, y, states, kept = jax.lax.while_loop(
            lambda c: c[0] < 3, body, (jnp.int32(0), x[:1], jnp.zeros((6, 1, 3)), x)
        )
        return n, y, states, kept, layer(x, y, states, jnp.int32(2))[2]

    run, x = in_programs(function, free=None), jax.device_put(WEIGHTS[0])
    want = jax.tree.map(np.asarray, jax.jit(function, static_argnums=0)(None, x))
    for _ in range(3):
        found = run(None, x)
        for ours, theirs in zip(found, want, strict=True):
            close(ours, theirs, terms=30)
        for array in (*found[:3], found[4]):
            array.delete()


def test_marked_calls_are_one_program(monkeypatch):
    made = []
    monkeypatch.setattr(programs, "_compiled", lambda *args, make=programs._compiled: made.append(args) or make(*args))
    in_programs(steps, free=1)("name", *map(jax.device_put, inputs()))
    marked = [traced for traced, *_ in made if "tanh" in str(traced)]
    # Six calls in two functions: one program in the loop's body, and one behind it. The others are what is before the
    # loop, before and after the calls in its body, and at the end.
    assert len(marked) <= 2 and len(made) <= 6


def test_memory_is_reused_where_nothing_else_needs_it():
    weights, state = map(jax.device_put, inputs())
    found = in_programs(steps, free=1)("name", weights, state)
    assert state[1].is_deleted() and not any(weight.is_deleted() for weight in weights)
    again = in_programs(steps, free=None)("name", weights, (state := jax.device_put(inputs()[1])))
    assert not any(x.is_deleted() for x in state)
    assert np.array_equal(found["states"], again["states"])


def test_settings_have_programs_of_their_own():
    seen = []

    def function(_, x):
        seen.append(kernels.dispatch.context())
        return x * 2

    double, x = in_programs(function, free=None), jax.device_put(WEIGHTS)
    for _ in range(2):
        double(None, x)
        with kernels.prefer("xla"):
            double(None, x)
        with jax.default_matmul_precision("float32"):
            double(None, x)
        with jax.set_mesh(zoo.make_mesh(devices=jax.devices()[:1])):
            double(None, x)
    assert len(seen) == len(set(seen)) == 4


@pytest.fixture
def apart(monkeypatch):
    """Lets the layers of every model lie apart, as those of large ones do."""
    monkeypatch.setattr(stack, "CACHED", 0)


def bytes_of_a_step(model, **options):
    """Returns the bytes that the kernels of one decode step read and write. Loops over blocks of a cache turn once."""
    counted, make = [], programs._compiled

    def spied(*args):
        program = make(*args)

        def call(*arrays):
            text = program.lower(*arrays).compile().as_text()
            counted.append(sum(kernel.times * kernel.bytes for kernel in breakdown.kernels(text)))
            return program(*arrays)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_compiled", spied)
        engine = zoo.Engine(model, batch=2, stride=1, **options)
        engine.submit([1, 2, 3, 4, 5], zoo.Sampling(max_new_tokens=8))
        engine.step()
        counted.clear()
        engine.step()
    return sum(counted)


KINDS = (
    "deepseek3",
    "gpt_oss",
    "kimi_linear",
    "lfm2-new",
    "nemotron_h-mlp-new",
    "qwen3_next-dense-new",
)


@pytest.mark.parametrize(
    ("name", "dtype", "cache_dtype"),
    [
        ("qwen3-window-head", "bfloat16", None),
        *(thorough("qwen3-window-head", dtype, None) for dtype in ("float32", "float16")),
        *(thorough("qwen3-window-head", dtype, "int8") for dtype in ("float32", "bfloat16", "float16")),
        *(thorough(name, "bfloat16", cache) for name in KINDS for cache in (None, "int8")),
    ],
)
def test_a_step_reads_no_more_of_a_larger_cache(load, apart, name, dtype, cache_dtype):
    """A decode step's bytes do not grow with the memory that its texts do not use."""
    model = load(name, dtype=dtype)
    small, large = (
        bytes_of_a_step(model, max_tokens=128, cache_tokens=tokens, cache_dtype=cache_dtype) for tokens in (128, 65536)
    )
    assert large < 1.01 * small


@pytest.mark.thorough
def test_a_step_reads_weights_once():
    """A decode step's bytes are those of weights and of the cache that is used, and at most half as many more.

    Weights of 16 bits are converted in every step, so `dtype="auto"` widens them once.
    """
    config = zoo.qwen3.Config(512, 512, 1536, 6, 8, 4, 64, 4096, 1)
    model = zoo.init(config, key=jax.random.key(0))
    assert stack.apart(model) is not model
    weights = sum(a.nbytes for a in jax.tree.leaves(model)) - model.embed_tokens.weight.nbytes
    assert bytes_of_a_step(model, max_tokens=4096) < 1.5 * weights


def test_calls_of_other_lengths_compile_nothing(load, apart, monkeypatch):
    model, prompts = load("qwen3-window-head"), [list(map(int, row)) for row in tiny.TOKENS[:3]]
    complete(model, [prompts[0][:9]], max_new_tokens=20, batch=2)
    complete(model, [prompt[:9] for prompt in prompts], max_new_tokens=20, batch=2)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    for length, new in ((5, 20), (9, 16), (12, 13), (12, 20)):  # 25 to 32 tokens
        complete(model, [prompts[0][:length]], max_new_tokens=new, batch=2)
        complete(model, [prompt[:length] for prompt in prompts], max_new_tokens=new, batch=2)
    assert not compiled
