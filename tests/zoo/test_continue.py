"""Texts that go on: each continuation against the same text as a fresh prompt, and the pages in which texts lie."""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MECHANISMS, MODEL, noise, thorough
from tests.zoo.test_constraints import Sets
from tests.zoo.test_engine import NEVER, PROMPTS
from tests.zoo.test_speculative import noisy
from zoo.generation.engine import Engine
from zoo.generation.pages import NONE, Layout, Pool
from zoo.generation.sampling import Sampling
from zoo.mesh import make_mesh
from zoo.nn.moe import choices_of_each_token
from zoo.nn.routing import Router, experts_of


FEW = Sampling(max_new_tokens=6)
TURN = tiny.TOKENS[1, 20:25].tolist()  # what comes after a completion
SHAPE: Any = dict(batch=3, max_tokens=40, stride=4, page=4)


def drawn(engine, *completions):
    """Runs an engine until it is idle. Returns the completions' tokens and log-probabilities."""
    while not engine.idle:
        engine.step()
    return [(c.tokens, c.logprobs) for c in completions]


def assert_same(got, expected, terms=MODEL):
    """Chunks differ, and so the order of sums."""
    assert got[0] == expected[0]
    close(got[1], expected[1], terms=terms)


def assert_goes_on(engine, prompts, turn=TURN, images=None, turn_images=None, terms=MODEL):
    """Draws after prompts, goes on after a turn, in two samples, and again after a shorter turn, from kept texts and
    from forgotten ones. Each has the tokens and log-probabilities of the same text as a prompt.
    """
    images = images or [None] * len(prompts)
    firsts = [engine.submit(prompt, FEW, images=i, keep=True)[0] for prompt, i in zip(prompts, images, strict=True)]
    drawn(engine, *firsts)
    for first in firsts:
        more = dict(images=turn_images, keep=True)
        second, fork = engine.submit(turn, FEW, after=first, samples=2, **more)
        drawn(engine, second)
        (third,) = engine.submit(turn[:1], FEW, after=second)
        (at_once,) = engine.submit([], FEW, after=first)  # forks what has gone on already
        drawn(engine, third)
        for completion in (second, fork, third, at_once):
            (alone,) = engine.submit(completion.prompt, FEW, images=completion.images)
            assert_same(*drawn(engine, completion, alone), terms)
        for kept in (first, second, fork):
            engine.free(kept)
        (anew,) = engine.submit(turn, FEW, after=first, images=turn_images)
        assert_same(*drawn(engine, anew, second), terms)
        assert second.prompt == first.prompt + first.tokens + list(turn)
    assert_all_free(engine)


def assert_all_free(engine):
    assert len(engine._prefixes) == 0
    assert engine._pool.free.tolist() == list(engine._pool.counts)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*MECHANISMS[:6], "nemotron_h-mlp-new", "qwen3_next"])
def test_every_family_goes_on(load, name):
    """Texts that go on equal fresh prompts, whatever their layers keep."""
    assert_goes_on(Engine(load(name), **SHAPE, stops=range(0, 64, 16)), PROMPTS[1:3])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-window-head", "deepseek3"])
def test_a_cache_of_8_bits_goes_on(load, name):
    """The order of sums can decide about a step of the 8 bits, which is 2**16 roundings of float32. Two are allowed."""
    assert_goes_on(Engine(load(name), **SHAPE, stops=NEVER, cache_dtype="int8"), PROMPTS[2:3], terms=2**17)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-window-head", "qwen3_next"])
def test_a_draft_goes_on(load, name):
    """Where a row ends among tokens that were accepted, the text goes on after the last one that counts."""
    model = load(name)
    for draft in zoo.ModelDraft(noisy(model, 0.02), 3), zoo.NGramDraft(3):
        assert_goes_on(Engine(model, **SHAPE, stops=range(0, 64, 4), draft=draft), PROMPTS)


@pytest.mark.thorough
def test_draws_with_a_draft_go_on(load):
    """Tokens of a continuation don't depend on who had the row before: not even the draft's proposals do."""
    model = load("qwen3-window-head")
    draft, sampling = zoo.ModelDraft(noisy(model, 0.1), 3), dataclasses.replace(FEW, temperature=1.0)
    got = []
    for before in (0, 2):
        engine = Engine(model, **SHAPE, stops=NEVER, draft=draft)
        (first,) = engine.submit(PROMPTS[0], sampling, key=jax.random.key(1), keep=True)
        drawn(engine)
        others = [engine.submit(PROMPTS[2], sampling, samples=4, key=jax.random.key(5)) for _ in range(before)]
        (second,) = engine.submit(TURN, sampling, key=jax.random.key(2), after=first)
        got += drawn(engine, second)
        assert all(other.finished for group in others for other in group)
    assert_same(*got)


@pytest.mark.thorough
def test_mtp_goes_on(with_further):
    model = zoo.load(with_further, parts=("mtp",))
    assert_goes_on(Engine(model, **SHAPE, stops=NEVER, draft=zoo.MTPDraft(model, 2)), PROMPTS[:1])


@pytest.mark.thorough
def test_a_text_goes_on_beyond_the_limit_of_a_cache(load):
    """Phi's texts of more than 16 tokens are read anew, and go on from there."""
    engine = Engine(load("phi3-long"), **SHAPE | dict(max_tokens=44), stops=NEVER, chunk=4)
    assert_goes_on(engine, [tiny.TOKENS[0, :size].tolist() for size in (1, 5, 10, 11, 17)])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*MECHANISMS[:4], "qwen3_next"])
def test_chunks_of_prompts_are_shared(load, name):
    """Chunks that are found are bit for bit those that are read: later tokens have the same log-probabilities. So have
    prompts with one chunk in common, and one of which a part was forgotten.
    """
    options = dict(stops=NEVER, chunk=8)
    plain, sharing = Engine(load(name), **SHAPE, **options), Engine(load(name), **SHAPE, **options, prefixes=True)
    text = tiny.TOKENS[0, :30].tolist()
    prompts = [text[:27], text[:27], text[:12] + TURN, text[:16], text[:5]]
    found = []
    for prompt in prompts:
        (expected,), (got,) = (engine.submit(prompt, FEW) for engine in (plain, sharing))
        before = sharing.tokens_found
        assert drawn(plain, expected) == drawn(sharing, got)
        found.append(sharing.tokens_found - before)
    assert found == [0, 24, 8, 8, 0] and sharing.tokens_read == sum(map(len, prompts)) - sum(found)
    sharing._prefixes.evict()
    (again,), (expected,) = (engine.submit(prompts[0], FEW) for engine in (sharing, plain))
    assert drawn(sharing, again) == drawn(plain, expected)
    while sharing._prefixes.evict():
        pass
    assert_all_free(sharing)


@pytest.mark.thorough
def test_prompts_that_come_together_read_a_chunk_once(load):
    """Prompts that begin alike wait for the one that reads the chunk."""
    options = dict(stops=NEVER, chunk=8)
    plain, sharing = (Engine(load("qwen3"), **SHAPE, **options, prefixes=shared) for shared in (False, True))
    text = tiny.TOKENS[0, :16].tolist()
    prompts = [text + TURN[:n] for n in (1, 2, 3)] + [text[:8] + TURN, TURN]
    got, expected = ([engine.submit(prompt, FEW)[0] for prompt in prompts] for engine in (sharing, plain))
    for ours, theirs in zip(drawn(sharing, *got), drawn(plain, *expected), strict=True):
        assert_same(ours, theirs)
    assert sharing.tokens_read == 16 + 1 + 2 + 3 + 5 + 5 and sharing.tokens_found == 16 + 16 + 8


@pytest.mark.parametrize("name", ["qwen3-window-head", thorough("qwen3_next")])
def test_prompts_are_read_beside_rows_that_draw(load, name, monkeypatch):
    """A row draws in every step, while long prompts are read in chunks; each gets the tokens that it gets alone."""
    options = SHAPE | dict(stops=NEVER, chunk=8)
    engine, alone, counts = Engine(load(name), **options, beside=8), Engine(load(name), **options), []
    (first,) = engine.submit(PROMPTS[0], Sampling(max_new_tokens=30))
    engine.step()
    sampling = Sampling(max_new_tokens=6, temperature=1.0)
    others = [*engine.submit(tiny.TOKENS[0, :30].tolist(), sampling, samples=2), *engine.submit(PROMPTS[2], sampling)]
    while not first.finished:
        before = engine.tokens_read
        assert first in engine.step()
        counts.append(engine.tokens_read - before)
    assert counts[:6] == [8, 8, 8, 6, 8, 4] and not any(counts[6:])
    drawn(engine)
    for completion, n in zip((first, *others), (0, 0, 1, 0), strict=True):
        sampling = Sampling(max_new_tokens=len(completion.tokens), temperature=0.0 if completion is first else 1.0)
        expected = alone.submit(completion.prompt, sampling, samples=n + 1)[n]
        assert_same(*drawn(alone, completion, expected))
    assert_all_free(engine)


@eqx.filter_jit
def records_of(model, tokens):
    """Returns the experts and the features of one pass over whole texts."""
    with choices_of_each_token():
        x, _, reports = model.hidden(tokens)
    return experts_of(model.layers, reports), x


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, kind",
    [
        ("qwen3_moe", "plain"),
        ("qwen3_moe", "constraint"),
        ("deepseek3", "plain"),
        ("qwen3_next", "plain"),
        ("lfm2_moe", "draft"),
    ],
)
def test_records_are_those_of_one_pass(load, name, kind):
    """Experts and features of chunks of prompts, of samples, shared chunks, drawn tokens and continuations."""
    model = load(name)
    draft = zoo.ModelDraft(noisy(model, 0.02), 3) if kind == "draft" else None
    options = dict(stops=NEVER, chunk=8, prefixes=True, record=("experts", "hidden"), draft=draft)
    engine, sampling = Engine(model, **SHAPE, **options), dataclasses.replace(FEW, temperature=1.0)
    constrained = [Sets(64, [set(range(32)), set(range(64))]) for _ in range(2)] if kind == "constraint" else ()
    text = tiny.TOKENS[0, :12].tolist()
    done = engine.submit(text, sampling, samples=2, keep=True, constrained=constrained)
    drawn(engine)
    done += engine.submit(text[:9] + TURN, FEW) + engine.submit(TURN, FEW, after=done[0], samples=2)
    drawn(engine)
    assert engine.tokens_found > 30
    for completion in done:
        whole = completion.prompt + completion.tokens
        padded = np.zeros((1, SHAPE["max_tokens"]), np.int32)
        padded[0, : len(whole)] = whole
        experts, x = (np.asarray(a)[0, : len(whole)] for a in records_of(model, padded))
        assert np.array_equal(completion.records["experts"], experts) and len({*experts.flat}) > 2
        close(completion.records["hidden"], x, terms=MODEL)


@pytest.mark.parametrize("name", [thorough("qwen3_next"), thorough("llama4")])
def test_experts_are_in_the_order_of_layers(load, name):
    """Where one layer's router chooses others, all experts of earlier layers stay."""
    model = load(name)
    routers = lambda model: [x for x in jax.tree.leaves(model, is_leaf=is_router) if is_router(x)]
    is_router = lambda node: isinstance(node, Router)
    before, _ = records_of(model, tiny.TOKENS[:1])
    sparse = [layers for layers, block in model.layers.blocks() if routers(block)]
    order = sorted(layer for layers in sparse for layer in layers)
    assert before.shape[2] == len(order) > 1
    for n, layers in enumerate(sparse):
        weight = routers(model)[n].weight
        for i, layer in enumerate(layers):
            flipped = weight.at[i].multiply(-1) if weight.ndim == 3 else -weight
            after, _ = records_of(eqx.tree_at(lambda m, n=n: routers(m)[n].weight, model, flipped), tiny.TOKENS[:1])
            same = [bool((before[:, :, m] == after[:, :, m]).all()) for m in range(len(order))]
            assert same.index(False) == order.index(layer)


def test_a_dense_model_has_no_experts(load):
    with pytest.raises(ValueError, match="The model has no experts"):
        Engine(load("qwen3-window-head"), **SHAPE, record=["experts"])


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["tensor=2", "fsdp=2"])
def test_a_mesh_goes_on(folders, spec):
    """Rows that a mesh splits have memory of their own, and others have pages."""
    mesh = make_mesh(spec, jax.devices()[:2])
    with jax.set_mesh(mesh):
        shape = SHAPE | dict(batch=4, stops=NEVER)
        engine = Engine(zoo.load(folders["qwen3-window-head"], mesh=mesh), **shape)
        assert len(engine._pool.counts) == (2 if spec == "tensor=2" else 0)
        assert_goes_on(engine, PROMPTS[:1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-window-head", "qwen3_next"])
def test_a_small_pool(load, name):
    """In memory for less than two rows, eight rows' requests have the tokens that they have alone; a text is read anew
    after others needed its memory. In the end all pages are free.
    """
    sampling = Sampling(max_new_tokens=14, temperature=1.0)
    prompts = [tiny.TOKENS[n % 2, n : n + 3 + 2 * n].tolist() for n in range(8)]
    shape = SHAPE | dict(batch=8, stops=NEVER)
    large, small = Engine(load(name), **shape), Engine(load(name), **shape, cache_tokens=64)
    submit = lambda engine: [
        engine.submit(prompt, sampling, samples=2, key=jax.random.key(n), keep=n == 0)
        for n, prompt in enumerate(prompts)
    ]
    expected, got = ([*itertools.chain(*submit(engine))] for engine in (large, small))
    for one, other in zip(drawn(large, *expected), drawn(small, *got), strict=True):
        assert_same(other, one)
    (again,) = small.submit(TURN, FEW, after=got[0])
    (alone,) = large.submit(again.prompt, FEW)
    assert_same(*drawn(small, again), *drawn(large, alone))
    for engine, completions in ((large, expected), (small, got)):
        for completion in completions[:2]:
            engine.free(completion)
        assert_all_free(engine)
    with pytest.raises(ValueError, match=r"cache_tokens=30 is less than one row may need: max_tokens=40"):
        Engine(load(name), **SHAPE, cache_tokens=30)


@pytest.mark.thorough
@pytest.mark.parametrize("name, kind", [("qwen3-window-head", "plain"), ("qwen3_next", "draft")])
def test_steps_overlap(load, name, kind):
    """Draws and log-probabilities have the same bits where the device gets a step before the last one is read: of
    samples, kept texts, and constraints, which come and go. A kept text that is cut goes on, too.
    """
    model, got = load(name), []
    draft = zoo.ModelDraft(noisy(model, 0.1), 3) if kind == "draft" else None
    for overlap in (False, True):
        engine, flights = Engine(model, **SHAPE, stops=range(0, 64, 16), draft=draft, overlap=overlap), []
        make = lambda n: Sampling(max_new_tokens=14 - n, temperature=float(n % 2))
        firsts = [engine.submit(p, make(n), samples=2, keep=True)[1] for n, p in enumerate(PROMPTS[:2] + PROMPTS[3:4])]
        others = engine.submit(PROMPTS[4], Sampling(max_new_tokens=20, temperature=1.0), samples=4, keep=True)
        while not (cut := [c for c in others if c.tokens and not c.finished]):
            assert engine.step()
            flights.append(len(engine._flights))
        for each in others:
            engine.cancel(each)
        (constrained,) = engine.submit(PROMPTS[5], FEW, constrained=[Sets(64, [set(range(1, 16)), set(range(17, 32))])])
        drawn(engine)
        after = [engine.submit(TURN[:3], FEW, after=first, keep=True)[0] for first in firsts]
        drawn(engine)
        after += [engine.submit(TURN[:3], FEW, after=each)[0] for each in after]
        got.append(drawn(engine, *firsts, *after, constrained))
        assert max(flights) == overlap
        for each in cut:
            (second,) = engine.submit(TURN, FEW, after=each)
            (alone,) = engine.submit(second.prompt, FEW)
            assert_same(*drawn(engine, second, alone))
    assert got[0] == got[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "count, kind",
    [
        (200, "plain"),
        (60, "draft"),
        (60, "constraint"),
    ],
)
def test_any_mix_of_requests(count, kind):
    """Requests of all kinds come, go on, fork, and are cancelled and freed at random, in a pool for two rows. Each gets
    the tokens that it gets alone, and in the end all pages are free.
    """
    model = noise(lambda: zoo.qwen3.Model(zoo.qwen3.Config(64, 16, 32, 1, 2, 1, 8, 64, 1), key=jax.random.key(0)))
    draft = {"draft": zoo.ModelDraft(noisy(model, 0.1), 3), "ngram": zoo.NGramDraft(2)}.get(kind)
    shape = dict(max_tokens=48, stops=range(0, 64, 16), stride=4, page=4, chunk=8, draft=draft)
    constraints = lambda count: [Sets(64, [set(range(n, 64, 3)) for n in range(3)]) for _ in range(count)]
    engine, alone = (
        Engine(model, batch=6, cache_tokens=96, prefixes=True, beside=8, **shape),
        Engine(model, batch=1, **shape),
    )
    random, ours, cancelled = np.random.RandomState(0), [], set()
    begin = random.randint(64, size=20).tolist()  # which many prompts share

    def submit():
        n, done = len(ours), [c for c, *_ in ours if c.finished and len(c.prompt) + len(c.tokens) <= 30]  # of 48
        after = done[random.randint(len(done))] if done and random.rand() < 0.5 else None
        prompt = random.randint(64, size=random.randint(after is None, 6)).tolist()
        if after is None:
            prompt = begin[: random.choice([0, 12, 20])] + prompt
        warm = draft is None and random.rand() < 0.5  # a draft's tokens are drawn otherwise where a text goes on
        sampling, samples = (
            Sampling(max_new_tokens=random.randint(1, 12), temperature=float(warm)),
            random.randint(1, 4),
        )
        given = dict(samples=samples, after=after, keep=random.rand() < 0.5, owner=n % 3)
        given["constrained"] = constraints(samples) if kind == "constraint" and n % 3 == 0 else ()
        for sample, c in enumerate(engine.submit(prompt, sampling, key=jax.random.key(n), **given)):
            ours.append((c, sampling, n, sample, given["constrained"]))

    while len(ours) < count or not engine.idle:
        for _ in range(random.randint(4) if len(ours) < count else 0):
            submit()
        if ours and random.rand() < 0.3:
            c = ours[random.randint(len(ours))][0]
            if not c.finished:
                cancelled.add(c)
            engine.cancel(c)
        if ours and random.rand() < 0.3:
            engine.free(ours[random.randint(len(ours))][0])
        engine.step()
    for c, *_ in ours:
        engine.free(c)
    while engine._prefixes.evict():
        pass
    assert_all_free(engine)
    assert engine.tokens_found > count and 0 < len(cancelled) < len(ours) / 2
    for c, sampling, n, sample, constrained in ours:
        given = dict(samples=sample + 1, constrained=constraints(sample + 1) if constrained else ())
        expected = alone.submit(c.prompt, sampling, key=jax.random.key(n), **given)[sample]
        drawn(alone)
        assert c.tokens == expected.tokens[: len(c.tokens)] and (
            c in cancelled or len(c.tokens) == len(expected.tokens)
        )


@pytest.mark.thorough
@pytest.mark.parametrize("compared", [False, True])
def test_rows_of_mixed_lengths_need_the_memory_that_they_use(compared):
    """512 rows are drawn at once in the memory of 64 that are as long as they may be, each as it is alone."""
    model = noise(lambda: zoo.qwen3.Model(zoo.qwen3.Config(64, 16, 32, 1, 2, 1, 8, 256, 1), key=jax.random.key(0)))
    engine = Engine(model, batch=512, max_tokens=256, stops=NEVER, cache_tokens=64 * 256, page=8)
    alone = Engine(model, batch=1, max_tokens=256, stops=NEVER, page=8)
    submit = lambda engine, n: engine.submit([n % 64] * (1 + n % 16), Sampling(max_new_tokens=1 + n % 12))[0]
    completions = [submit(engine, n) for n in range(512)]
    assert len(engine.step()) == 512
    got = drawn(engine, *completions)
    assert_all_free(engine)
    for n in range(512 if compared else 0):
        assert_same(got[n], *drawn(alone, submit(alone, n)))


def test_only_finished_completions_go_on(load):
    engine = Engine(load("qwen3-window-head"), **SHAPE, stops=NEVER)
    (first,) = engine.submit(PROMPTS[0], FEW)
    with pytest.raises(ValueError, match="goes on when it is finished"):
        engine.submit(TURN, FEW, after=first)
    engine.cancel(first)
    engine.step()
    with pytest.raises(ValueError, match=r"The prompt has 36 tokens.*max_new_tokens=6.*max_tokens=40"):
        engine.submit([1] * 31, FEW, after=first)


def test_pages():
    """A pool gives pages that nobody else holds, copies those that are shared, and takes back what windows leave."""
    pool = Pool(Layout(1, 2, 4, 6, 3), [None, 4])
    one = pool.empty()
    assert pool.reserve(one, 0, 5) == [{}, {}] and [len(pages) for pages in one] == [3, 3]
    other = pool.share(one, 5)
    assert pool.free.tolist() == [3, 3]
    assert pool.reserve(other, 5, 6) == [{other[0][2]: one[0][2]}, {other[1][2]: one[1][2]}]
    assert other[0][:2] == one[0][:2] and other[0][2] != one[0][2]
    assert pool.reserve(other, 6, 12) is None and pool.free.tolist() == [2, 2]
    pool.leave(other, 6)  # tokens from 6 on see 3 and later ones, which are in entry 1 and later ones
    assert other[1][0] == NONE and other[1][1] != NONE and pool.free.tolist() == [2, 2]
    pool.release(one)
    assert pool.free.tolist() == [3, 4]
    assert [array.tolist()[1] for array in pool.arrays([None, other])] == [[*other[0], 6], [6, *other[1][1:], 6]]
    pool.release(other)
    assert pool.free.tolist() == pool.counts == [6, 6]
