"""Continuous batching: each token against the plain forward pass and transformers; the queue, keys, refusals."""

import contextlib
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels.backends import compile_options
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, forward, noise, thorough
from zoo.generation import decoding
from zoo.generation.complete import complete
from zoo.generation.engine import Engine
from zoo.generation.sampling import Sampling, settings
from zoo.generation.shapes import bucket
from zoo.mesh import make_mesh
from zoo.nn import scan, stack
from zoo.surgery import shardings


PROMPTS = [tiny.TOKENS[n % 2, n : n + size].tolist() for n, size in enumerate([5, 1, 12, 2, 9, 3])]
STOPS = range(0, 64, 8)
NEVER = range(64, 72)  # never drawn, but as many as STOPS, since programs depend on their number
SHAPE = dict(batch=2, max_tokens=30)  # for most engines, and `complete` with 14 new tokens: they share programs
SMALL = zoo.qwen3.Config(64, 16, 32, 1, 2, 1, 8, 64, 1)  # for tests that need little computing
KEY = jax.random.key(0)

draw = eqx.filter_jit(lambda sampling, logits, keys: settings([sampling] * len(logits)).draw(logits, keys))


@pytest.fixture(scope="module")
def model(load):
    return load("qwen3")


def logits_after(model, prompt, completion):
    """Returns the logits that each token of a completion was drawn from, by one forward pass."""
    ids = np.zeros(tiny.TOKENS.shape, np.int32)
    ids[0, : len(prompt) + len(completion.tokens)] = prompt + completion.tokens
    return np.asarray(forward(model, jnp.asarray(ids)))[0, len(prompt) - 1 :][: len(completion.tokens)]


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def penalized(sampling, logits, prompt, tokens):
    """Applies biases and penalties by their formulas, one position and one token at a time."""
    logits, repetition = np.array(logits, np.float64), sampling.repetition_penalty or 1
    for n, row in enumerate(logits):
        for token, bias in sampling.logit_bias.items():
            row[token] += bias
        for token in {*prompt, *tokens[:n]}:
            row[token] *= repetition ** (1 if row[token] < 0 else -1)
        for token in tokens[:n]:
            row[token] -= sampling.frequency_penalty
        for token in set(tokens[:n]):
            row[token] -= sampling.presence_penalty
    return jnp.asarray(logits, jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "deepseek3"])
def test_layers_apart(load, monkeypatch, name):
    """A model whose layers lie apart, as those of large ones do on a CPU, draws the same tokens."""
    model, options = load(name), dict(max_new_tokens=14, stops=STOPS, batch=2)
    stacked = complete(model, PROMPTS, **options)
    assert stack.apart(model) is model
    monkeypatch.setattr(stack, "CACHED", 0)
    (one, *_), (layers, *_) = (
        jax.tree.leaves(m.layers.period, is_leaf=scan.is_apart) for m in (model, stack.apart(model))
    )
    assert len(layers.layers) == len(one) > 1 and np.array_equal(layers.layers[1], one[1])
    mesh = make_mesh(devices=jax.devices()[5:6])
    placed = jax.device_put(model, shardings(model, zoo.registry.family_of(model.config).partition_rules, mesh))
    (each, *_) = jax.tree.leaves(stack.apart(placed).layers.period, is_leaf=scan.is_apart)
    assert each.layers[1].sharding.mesh == mesh and np.array_equal(each.layers[1], one[1])
    for (a,), (b,) in zip(stacked, complete(model, PROMPTS, **options), strict=True):
        assert a.tokens == b.tokens
        close(a.logprobs, b.logprobs, terms=MODEL)


@pytest.mark.thorough
def test_layers_apart_on_a_mesh():
    """Layers of more than 32 MiB lie apart, in the memory of the stack, wherever a mesh of one device puts the model.
    There it draws the same bits as without a mesh; on eight devices its layers stay stacked, and tokens are the same.
    """
    config = zoo.qwen3.Config(64, 1024, 2048, 3, 2, 1, 8, 64, 1)
    weights = noise(lambda: zoo.qwen3.Model(config, key=KEY), 0.03)
    options = dict(max_new_tokens=6, stops=NEVER, batch=2)
    for dtype in (jnp.float32, jnp.bfloat16):
        plain = jax.tree.map(lambda a, dtype=dtype: jnp.asarray(a, dtype), weights)
        drawn = complete(plain, PROMPTS[:2], **options)
        for places in (jax.devices()[:1], jax.devices()[5:6], jax.devices()):
            mesh = make_mesh(devices=places)
            model = jax.device_put(plain, shardings(plain, zoo.qwen3.FAMILY.partition_rules, mesh))
            layers = jax.tree.leaves(stack.apart(model).layers.period, is_leaf=scan.is_apart)
            if len(places) == 1:
                for whole, each in zip(jax.tree.leaves(model.layers.period), layers, strict=True):
                    (*_, last), start = each.layers, whole.unsafe_buffer_pointer()
                    assert last.sharding.mesh == mesh and np.array_equal(last, whole[-1])
                    aligned = last.nbytes % 64 == 0  # as XLA wants it
                    assert not aligned or last.unsafe_buffer_pointer() == start + 2 * last.nbytes
            assert any(map(scan.is_apart, layers)) == (len(places) == 1)
            with jax.set_mesh(mesh):
                again = complete(model, PROMPTS[:2], **options)
            for (a,), (b,) in zip(drawn, again, strict=True):
                assert a.tokens == b.tokens
                assert len(places) > 1 or a.logprobs == b.logprobs


@pytest.mark.thorough
def test_long_prompts_and_many():
    """A prompt of 520 tokens is read in two chunks and lies in several pages, a short one in one; of nine short ones
    eight are read at a time. Each draws what the forward pass has as its largest logits.
    """
    model = noise(lambda: zoo.qwen3.Model(dataclasses.replace(SMALL, max_position_embeddings=1024), key=KEY), 0.4)
    random = np.random.RandomState(0)
    prompts = [random.randint(0, 64, size).tolist() for size in (520, *range(2, 11))]
    drawn = complete(model, prompts, max_new_tokens=5, stops=NEVER, batch=10)
    ids = np.zeros((10, 525), np.int32)
    for row, prompt, (each,) in zip(ids, prompts, drawn, strict=True):
        row[: len(prompt) + 5] = prompt + each.tokens
    logits = np.asarray(forward(model, jnp.asarray(ids)))
    for row, prompt, (each,) in zip(logits, prompts, drawn, strict=True):
        assert np.array_equal(each.tokens, np.argmax(row[len(prompt) - 1 :][:5], axis=-1))


@pytest.mark.parametrize("name", ["qwen3-window-head", *map(thorough, ("deepseek3", "llama4", "gpt_oss"))])
def test_greedy_is_the_forward_pass(load, name):
    """Greedy decoding is exact beyond windows, and in rows that others used before; stop tokens end some early."""
    model = load(name)
    groups = complete(model, PROMPTS, samples=3, max_new_tokens=14, stops=STOPS, batch=2)
    for prompt, (completion, *others) in zip(PROMPTS, groups, strict=True):
        logits = logits_after(model, prompt, completion)
        assert np.array_equal(completion.tokens, np.argmax(logits, axis=-1))
        logs = np.take_along_axis(log_softmax(logits), np.array(completion.tokens)[:, None], 1)[:, 0]
        close(completion.logprobs, logs, terms=MODEL, size=np.abs(logits).max())
        assert completion.finished and completion.ended == (completion.tokens[-1] in STOPS)
        assert completion.ended or len(completion.tokens) == 14
        assert not set(completion.tokens[:-1]) & set(STOPS)
        assert all(other.tokens == completion.tokens for other in others)
    assert len({len(completion.tokens) for completion, *_ in groups}) > 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.5),
        Sampling(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02, logit_bias={3: 2.5, 40: -100.0, 7: 1.0}),
        Sampling(temperature=1.5, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-1.0),
    ],
)
def test_each_sample_has_its_key(model, sampling):
    """A sample is drawn by its `Sampling` from the forward pass's logits by its own key, whatever else runs;
    log-probabilities are unmodified.
    """
    groups = complete(model, PROMPTS[:3], samples=3, max_new_tokens=14, stops=NEVER, sampling=sampling, seed=4, batch=2)
    for m, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=False)):
        for n, completion in enumerate(group):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(4), m), n)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(14))
            logits = logits_after(model, prompt, completion)
            lowered = penalized(sampling, logits, prompt, completion.tokens)
            assert np.array_equal(completion.tokens, draw(sampling, lowered, keys))
            logs = log_softmax(logits / sampling.temperature)
            expected = np.take_along_axis(logs, np.array(completion.tokens)[:, None], 1)[:, 0]
            close(completion.logprobs, expected, terms=MODEL, size=np.abs(logits).max())
        assert len({tuple(completion.tokens) for completion in group}) == 3
    engine = Engine(model, **SHAPE, stops=NEVER)
    key = jax.random.fold_in(jax.random.key(4), 2)
    (alone,) = engine.submit(PROMPTS[2], dataclasses.replace(sampling, max_new_tokens=14), key=key)
    while not engine.idle:
        engine.step()
    assert alone.tokens == groups[2][0].tokens


@pytest.mark.thorough
def test_a_prompt_is_read_once(model, monkeypatch):
    """A prompt is read once for more samples than rows, and prompts of one bucket are read together."""
    read, calls = zoo.generation.engine.read, []
    note = lambda inputs, state: calls.append(inputs[1].tokens.shape) or read(inputs, state)
    monkeypatch.setattr(zoo.generation.engine, "read", note)
    complete(model, PROMPTS[:1], samples=5, max_new_tokens=14, stops=NEVER, batch=2)
    assert calls == [(1, 16)]
    calls.clear()
    prompts = [*PROMPTS[:2], tiny.TOKENS[0, :17].tolist(), *PROMPTS[2:4]]
    engine = Engine(noise(lambda: zoo.qwen3.Model(SMALL, key=jax.random.key(0))), batch=10, max_tokens=40)
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_new_tokens=1), samples=2)
    engine.step()
    assert calls == [(4, 16), (1, 32)] and engine.idle


def test_requests_of_all_kinds_share_a_program(model, monkeypatch):
    """Each request gets the same tokens as it does alone."""
    shape = SHAPE | dict(stride=4, stops=NEVER)
    filters = {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}
    kinds = [{}, {"temperature": 1.0}, *({"temperature": 0.5 + n} | each for n, each in enumerate(filters))]
    kinds = [Sampling(max_new_tokens=5 + n, **kind) for n, kind in enumerate(kinds)]
    submit = lambda engine, n: engine.submit(PROMPTS[0], kinds[n], key=jax.random.key(n))[0]
    alone = []
    for n in range(len(kinds)):
        engine = Engine(model, **shape)
        alone.append(submit(engine, n))
        while not engine.idle:
            engine.step()
    traced, logprob = [], zoo.generation.decoding.logprob
    monkeypatch.setattr(zoo.generation.decoding, "logprob", lambda *args: traced.append(1) or logprob(*args))
    engine = Engine(model, **shape)
    together, pieces = [submit(engine, 0)], {}
    while not engine.idle:
        for completion, tokens in engine.step().items():
            assert 1 <= len(tokens) <= 4
            pieces[completion] = pieces.get(completion, []) + tokens
        if len(together) < len(kinds):
            together.append(submit(engine, len(together)))
    assert [c.tokens for c in together] == [c.tokens for c in alone] == [pieces[c] for c in together]
    assert [len(c.tokens) for c in together] == [5, 6, 7, 8, 9]
    assert not traced


@pytest.mark.thorough
@pytest.mark.parametrize("drafted, raw", [(False, False), (False, True), (True, True)])
def test_likeliest_tokens(model, drafted, raw):
    """They are those of the forward pass, and the drawn token's log-probability is among them where it is likely."""
    draft = zoo.ModelDraft(model, 2) if drafted else None
    engine = Engine(model, **SHAPE, stops=NEVER, draft=draft, raw_logprobs=raw)
    (none, *_), (some,), (many,) = (
        engine.submit(prompt, Sampling(max_new_tokens=9, temperature=t), top=top)
        for prompt, t, top in zip(PROMPTS[:3], (0.0, 0.0, 1.5), (0, 1, 5), strict=True)
    )
    while not engine.idle:
        engine.step()
    assert none.likeliest == [] and len(some.likeliest) == len(many.likeliest) == 9
    assert [*map(list, some.likeliest)] == [[token] for token in some.tokens]
    for prompt, completion, temperature in ((PROMPTS[1], some, 1), (PROMPTS[2], many, 1 if raw else 1.5)):
        logs = log_softmax(logits_after(model, prompt, completion) / temperature)
        for row, found, token, logprob in zip(
            logs, completion.likeliest, completion.tokens, completion.logprobs, strict=True
        ):
            assert list(found) == np.argsort(-row)[: len(found)].tolist()
            close([*found.values(), logprob], row[[*found, token]], terms=MODEL, size=np.abs(logs).max())
            close(found.get(token, logprob), logprob, terms=100, size=1)


@pytest.mark.parametrize("overlap", [False, True])
def test_cancel(model, overlap):
    """A running or a waiting request can be cancelled, and another one takes its row, after a step that is on its way.
    What that step draws for it is cut.
    """
    engine = Engine(model, **SHAPE, stride=4, stops=NEVER, overlap=overlap)
    (first, beside), (second,), (third,) = (
        engine.submit(prompt, Sampling(max_new_tokens=6), samples=samples)
        for prompt, samples in zip(PROMPTS[:3], (2, 1, 1), strict=True)
    )
    assert list(engine.step()) == [first, beside]
    engine.cancel(first)
    engine.cancel(second)
    assert set(engine.step()) == ({beside} if overlap else {beside, third})
    while not engine.idle:
        engine.step()
    assert (len(first.tokens), len(beside.tokens), second.tokens) == (4, 6, [])
    (alone,) = engine.submit(PROMPTS[2], Sampling(max_new_tokens=6))
    while not engine.idle:
        engine.step()
    assert third.tokens == alone.tokens and len(alone.tokens) == 6


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, spec, scope",
    [
        ("qwen3-window-max", "fsdp=2,tensor=2", jax.set_mesh),
        ("qwen3_moe", "expert=2", contextlib.nullcontext),
        ("qwen3_next", "fsdp=2,tensor=2", jax.set_mesh),
    ],
)
def test_on_a_mesh(folders, load, name, spec, scope):
    mesh = make_mesh(spec, jax.devices()[: 4 if "," in spec else 2])
    with scope(mesh):
        got = complete(zoo.load(folders[name], mesh=mesh), PROMPTS[:2], samples=2, max_new_tokens=5, batch=2)
    for prompt, group in zip(PROMPTS, got, strict=False):
        for completion in group:
            assert np.array_equal(completion.tokens, np.argmax(logits_after(load(name), prompt, completion), axis=-1))


def test_refusals(model):
    for prompts, options, message in [
        ([[1], []], dict(max_new_tokens=4), "Prompt 1 has no tokens"),
        ([[1] * 60], dict(max_new_tokens=8), "Prompt 0 has 60 tokens.*max_new_tokens=8.*64 positions"),
        ([[64]], dict(max_new_tokens=8), "Prompt 0 has token 64, but .* 64"),
        ([[1]], dict(max_new_tokens=0), "max_new_tokens=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            complete(model, prompts, **options)
    with pytest.raises(ValueError, match=r"5 tokens.*max_new_tokens=8.*max_tokens=12"):
        Engine(model, batch=1, max_tokens=12).submit(PROMPTS[0], Sampling(max_new_tokens=8))
    assert complete(model, [], max_new_tokens=4) == []


@pytest.mark.thorough
def test_prompts_of_all_lengths_share_few_programs(monkeypatch):
    """The number of programs is that in docs/serve.md, for rows of 4,096 tokens."""
    shapes = set()
    model = noise(lambda: zoo.qwen3.Model(dataclasses.replace(SMALL, max_position_embeddings=5000), key=KEY))
    engine = Engine(model, batch=10, max_tokens=4096)
    note = lambda inputs, state: shapes.add(inputs[1].tokens.shape) or (state, {})
    monkeypatch.setattr(zoo.generation.engine, "read", note)
    lengths = {length for n in range(13) for length in (2**n - 1, 2**n, 2**n + 1) if 0 < length < 4096}
    for length in lengths:
        for count in range(1, 11):
            completions = [engine.submit([1] * length, Sampling(max_new_tokens=1))[0] for _ in range(count)]
            engine._fill()
            for completion in completions:
                engine.cancel(completion)
            engine._sweep()
    assert len(shapes) == 6 * 4 - 3


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]
    assert [bucket(n, 1) for n in (1, 2, 3, 5)] == [1, 2, 4, 8]


def test_options_of_xla_for_decoding(monkeypatch):
    """XLA knows the options in the table, and `advance` is compiled with those of the device in use."""
    for options in compile_options.OPTIONS["decode"].values():
        jax.jit(lambda x: x, compiler_options=options).lower(1.0).compile()
    monkeypatch.setitem(compile_options.OPTIONS["decode"], "cpu", {"no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        decoding.compiled(lambda inputs, state: state)(0, jnp.zeros(3))


@pytest.mark.thorough
def test_a_cache_is_made_anew(load):
    """Phi's texts of more than 16 tokens have other rotary frequencies at all positions. Samples of prompts that grow
    beyond that, are longer, or end before, have the tokens of one pass over the whole text so far.
    """
    model = load("phi3-long")
    prompts = [tiny.TOKENS[0, :size].tolist() for size in (5, 16, 17, 1)]
    hidden = lambda model, ids, at: model.hidden(ids, positions=at, segments=(at >= 0).astype(jnp.int32))[0]
    whole = eqx.filter_jit(lambda *given: given[0].unembed(hidden(*given)))
    index, beyond = np.arange(40), 0
    for prompt, (completion,) in zip(prompts, complete(model, prompts, max_new_tokens=14, batch=3), strict=True):
        text = prompt + completion.tokens
        assert len(completion.tokens) == 14
        for n in range(len(prompt), len(text)):
            ids, at = np.zeros((1, 40), np.int32), np.where(index < n, index, -1)[None]
            ids[0, :n] = text[:n]
            logits = np.asarray(whole(model, jnp.asarray(ids), jnp.asarray(at)))[0, n - 1]
            assert text[n] == logits.argmax()
            close(
                log_softmax(logits[None])[0, text[n]],
                completion.logprobs[n - len(prompt)],
                terms=MODEL,
                size=np.abs(logits).max(),
            )
            beyond += n > 16
    assert beyond > 20
    with pytest.raises(ValueError, match="more than 16 tokens is read anew, which a draft can't be"):
        Engine(model, batch=1, max_tokens=20, draft=zoo.ModelDraft(model))
