"""Speculative decoding: greedy text is the model's own whatever the draft; drawn text has the model's distribution."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels import Tokens
from tests.zoo import tiny
from tests.zoo.programs import TOKENS, noise
from zoo.generation.sampling import Sampler
from zoo.mesh import make_mesh


PROMPTS = [tiny.TOKENS[n % 2, n : n + size].tolist() for n, size in enumerate([5, 1, 12])]
STOPS = range(8, 40, 8)
SMALL = zoo.qwen3.Config(5, 16, 32, 2, 2, 1, 8, 64, 2)  # with a vocabulary of five


def noisy(model, size):
    """A draft that is often right: the model with a little noise on its weights."""
    random = np.random.RandomState(0)
    other = lambda a: (np.asarray(a) * (1 + size * random.standard_normal(a.shape))).astype(a.dtype)
    return jax.tree.map(lambda a: jax.device_put(other(a), a.sharding), model)


@pytest.fixture(scope="module")
def model_with_further(with_further):
    return zoo.load(with_further, parts=("mtp",))


def assert_same(got, want):
    """The same tokens, and never more calls of the model than that."""
    for (a,), (b,) in zip(got, want, strict=True):
        assert (a.tokens, a.ended, a.finished) == (b.tokens, b.ended, True)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert a.calls <= b.calls == len(b.tokens)


def per_call(got):
    """Tokens that one call of the model gave."""
    return sum(len(c.tokens) for (c,) in got) / sum(c.calls for (c,) in got)


@pytest.mark.parametrize(
    "name, size", [("qwen3-window-max", 0.05), pytest.param("gpt_oss", 0.02, marks=pytest.mark.slow)]
)
def test_greedy_is_the_models(load, name, size):
    """Rows advance by different numbers of tokens, and go back within windows; others take the rows that end."""
    model = load(name)
    options = dict(max_new_tokens=20, stops=STOPS, batch=2)
    got = zoo.complete(model, PROMPTS, draft=zoo.ModelDraft(noisy(model, size), 3), **options)
    assert_same(got, zoo.complete(model, PROMPTS, **options))
    assert 1.1 < per_call(got) < 3


def test_a_draft_that_is_the_model_is_always_right(load):
    model = load("qwen3")
    (got,) = zoo.complete(model, PROMPTS[:1], max_new_tokens=20, draft=zoo.ModelDraft(model, 4))
    assert got[0].calls == 4


@pytest.mark.slow
def test_greedy_with_mtp(model_with_further):
    """The module's own cache, and the model's, are of latents."""
    model = model_with_further
    want = zoo.complete(model, PROMPTS, max_new_tokens=12)
    assert_same(zoo.complete(model, PROMPTS, max_new_tokens=12, draft=zoo.MTPDraft(model, 2)), want)


def test_mtp_remembers(model_with_further):
    """Prefilled, token by token and several at once, some of them taken back: as without a cache."""

    @eqx.filter_jit
    def whole(model):
        x, _, _ = model.hidden(TOKENS[:, :-1])
        return x, model.mtp(x, model.embed_tokens(TOKENS[:, 1:]), None, Tokens())[0]

    x, want = map(np.asarray, whole(model_with_further))
    draft, call = zoo.MTPDraft(model_with_further), eqx.filter_jit(lambda draft, *args: draft(*args))
    cache = draft.init_cache(2, 40, jnp.float32)
    for start, end, wrong in [(0, 4, 0), (4, 5, 0), (5, 9, 2), (7, 11, 0)]:
        following = tiny.TOKENS[:, start + 1 : end + 1]
        following = np.where(np.arange(end - start) < end - start - wrong, following, 0)
        at = np.broadcast_to(np.arange(start, end), following.shape)
        got, cache = call(draft, x[:, start:end], following, cache, at)
        kept = slice(0, end - start - wrong)
        assert np.allclose(np.asarray(got)[:, kept], want[:, start:end][:, kept], atol=1e-4)


@pytest.mark.parametrize(
    "sampler, vocab",
    [
        (Sampler(1.0), 5),
        (Sampler(0.7, 4, 0.95, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=-1.5), 5),
        pytest.param(Sampler(1.0), 4, marks=pytest.mark.slow),
        pytest.param(Sampler(1.0), 7, marks=pytest.mark.slow),
    ],
)
def test_distribution(sampler, vocab):
    """The frequencies of all texts of three tokens, of a vocabulary of five, against their probabilities.

    A draft that knows more tokens, or fewer, makes no difference.
    """
    configs = SMALL, dataclasses.replace(SMALL, vocab_size=vocab)
    model, draft = (
        noise(lambda c=c: zoo.qwen3.Model(c, key=jax.random.key(0)), 0.3, seed) for seed, c in enumerate(configs)
    )
    prompt, rows = [3, 1], 4000
    texts = np.array(list(itertools.product(range(5), repeat=3)))

    @eqx.filter_jit
    def probabilities(model, tokens, settings):
        logits, prompt = model(tokens)[:, 1:4], np.full(125, 2)
        logits = [settings.penalized(logits[:, n], tokens, prompt, prompt + n) for n in range(3)]
        return jax.nn.softmax(settings.filtered(jnp.stack(logits, axis=1)), axis=-1)

    tokens = np.concatenate([np.tile([prompt], (125, 1)), texts], axis=1)
    p = np.asarray(probabilities(model, jnp.asarray(tokens), zoo.generation.sampling.settings([sampler] * 125)))
    p = np.prod(np.take_along_axis(p, texts[..., None], axis=-1)[..., 0], axis=1)
    (got,) = zoo.complete(
        model, [prompt], samples=rows, max_new_tokens=3, sampler=sampler, draft=zoo.ModelDraft(draft, 2), batch=rows
    )
    counts = np.zeros((5, 5, 5))
    np.add.at(counts, tuple(np.array([c.tokens for c in got]).T), 1)
    counts, possible = counts.reshape(-1), p > 0
    assert counts[~possible].sum() == 0 and {c.calls for c in got} == {1, 2, 3}
    chi2 = np.sum((counts - rows * p)[possible] ** 2 / (rows * p[possible]))
    freedom = possible.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_draws_do_not_depend_on_others(load):
    """Nor on how many tokens a step decodes."""
    model = load("qwen3")
    draft, alone = zoo.ModelDraft(noisy(model, 0.1), 2), []
    for prompt in PROMPTS:
        engine = zoo.Engine(model, batch=1, max_tokens=40, stride=1, draft=draft)
        alone += engine.submit(prompt, max_new_tokens=10, sampler=Sampler(1.0), key=jax.random.key(3))
        while not engine.idle:
            assert 1 <= len(engine.step()[alone[-1]]) <= 3
    engine = zoo.Engine(model, batch=2, max_tokens=40, stride=9, draft=draft)
    together = [
        engine.submit(prompt, max_new_tokens=10, sampler=Sampler(1.0), key=jax.random.key(3))[0] for prompt in PROMPTS
    ]
    while not engine.idle:
        engine.step()
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert {len(c.tokens) for c in together} == {10}


@pytest.mark.slow
def test_on_a_mesh(folders, load):
    folder, options = folders["qwen3"], dict(samples=2, max_new_tokens=6)
    model = load("qwen3")
    want = zoo.complete(model, PROMPTS, draft=zoo.ModelDraft(noisy(model, 0.05), 2), **options)
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    with jax.set_mesh(mesh):
        model = zoo.load(folder, mesh=mesh)
        got = zoo.complete(model, PROMPTS, draft=zoo.ModelDraft(noisy(model, 0.05), 2), batch=4, **options)
    assert [[c.tokens for c in group] for group in got] == [[c.tokens for c in group] for group in want]


def test_text():
    """All at once and as it comes, with stop strings within what a round brings."""
    model, tokenizer = zoo.load("tiny"), zoo.tokenizer("tiny")
    prompt, draft = "def __init__(self", zoo.ModelDraft(model, 4)
    (want,) = zoo.generate(model, tokenizer, [prompt], max_new_tokens=12)
    for stop in [], [want[5:8]]:
        (plain,) = zoo.generate(model, tokenizer, [prompt], max_new_tokens=12, stop=stop)
        assert zoo.generate(model, tokenizer, [prompt], max_new_tokens=12, stop=stop, draft=draft) == [plain]
        pieces = list(zoo.stream(model, tokenizer, prompt, max_new_tokens=12, stop=stop, draft=draft))
        assert "".join(pieces) == plain and len(pieces) < 8


def test_refusals(load):
    model = load("qwen3")
    with pytest.raises(ValueError, match=r'DeepSeek V3 or Qwen3-Next, with parts=\("mtp",\)'):
        zoo.MTPDraft(model)
    with pytest.raises(ValueError, match="tokens=0"):
        zoo.ModelDraft(model, 0)
    other = noise(lambda: zoo.qwen3.Model(dataclasses.replace(SMALL, vocab_size=600), key=jax.random.key(0)))
    with pytest.raises(ValueError, match="vocabulary of 600, and the model's is 64"):
        zoo.complete(model, PROMPTS, max_new_tokens=4, draft=zoo.ModelDraft(other))
