"""Speculative decoding: greedy text is the model's own whatever the draft; drawn text has the model's distribution."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.zoo import tiny
from tests.zoo.test_deepseek import further_tensors
from zoo.mesh import make_mesh
from zoo.sampling import Sampler


pytestmark = pytest.mark.slow

PROMPTS = [tiny.TOKENS[n % 2, n : n + size].tolist() for n, size in enumerate([5, 1, 12])]
STOPS = range(8, 40, 8)
SMALL = zoo.qwen3.Config(5, 16, 32, 2, 2, 1, 8, 64, 2)  # with a vocabulary of five


def noisy(model, size):
    """A draft that is often right: the model with a little noise on its weights."""
    floats, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(floats)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [leaf * (1 + size * jax.random.normal(k, leaf.shape)) for k, leaf in zip(keys, leaves, strict=True)]
    return eqx.combine(jax.tree.unflatten(structure, leaves), rest)


@pytest.fixture(scope="module")
def with_further(tmp_path_factory):
    folder = tiny.write(tmp_path_factory.mktemp("further"), "deepseek3")
    safetensors.numpy.save_file(further_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return zoo.load(folder, mtp=True)


def assert_same(got, want):
    """The same tokens, and never more calls of the model than that."""
    for (a,), (b,) in zip(got, want, strict=True):
        assert (a.tokens, a.ended, a.finished) == (b.tokens, b.ended, True)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert a.calls <= b.calls == len(b.tokens)


def per_call(got):
    """Tokens that one call of the model gave."""
    return sum(len(c.tokens) for (c,) in got) / sum(c.calls for (c,) in got)


@pytest.mark.parametrize("name, noise", [("qwen3-window-tail", 0.05), ("gpt_oss", 0.02)])
def test_greedy_is_the_models(tmp_path, name, noise):
    """Rows advance by different numbers of tokens, and go back within windows; others take the rows that end."""
    model = zoo.load(tiny.write(tmp_path, name))
    options = dict(max_new_tokens=20, stops=STOPS, slots=2)
    got = zoo.complete(model, PROMPTS, draft=zoo.ModelDraft(noisy(model, noise), 3), **options)
    assert_same(got, zoo.complete(model, PROMPTS, **options))
    assert 1.1 < per_call(got) < 3


def test_a_draft_that_is_the_model_is_always_right(tmp_path):
    model = zoo.load(tiny.write(tmp_path, "qwen3-window-tail"))
    (got,) = zoo.complete(model, PROMPTS[:1], max_new_tokens=20, draft=zoo.ModelDraft(model, 4))
    assert got[0].calls == 4


def test_greedy_with_mtp(with_further):
    """The module's own cache, and the model's, are of latents."""
    want = zoo.complete(with_further, PROMPTS, max_new_tokens=12)
    got = zoo.complete(with_further, PROMPTS, max_new_tokens=12, draft=zoo.MTPDraft(with_further, 2))
    assert_same(got, want)


def test_mtp_remembers(with_further):
    """Prefilled, token by token and several at once, some of them taken back: as `further` on the whole sequence."""
    tokens = jnp.asarray(tiny.TOKENS)
    x, _ = eqx.filter_jit(with_further.hidden)(tokens)
    want, _ = eqx.filter_jit(with_further.further)(x[:, :-1], tokens[:, 1:])
    draft, call = zoo.MTPDraft(with_further), eqx.filter_jit(lambda draft, *args: draft(*args))
    cache = draft.init_cache(2, 40, jnp.float32)
    for start, end, wrong in [(0, 9, 0), (9, 10, 0), (10, 14, 2), (12, 16, 0)]:
        following = tokens[:, start + 1 : end + 1]
        following = jnp.where(jnp.arange(end - start) < end - start - wrong, following, 0)
        at = jnp.broadcast_to(jnp.arange(start, end), following.shape)
        got, cache = call(draft, x[:, start:end], following, cache, at)
        kept = slice(0, end - start - wrong)
        assert np.allclose(got[:, kept], want[:, start:end][:, kept], atol=1e-4)


@pytest.mark.parametrize(
    "sampler, vocab", [(Sampler(1.0), 5), (Sampler(0.7, top_k=4, top_p=0.95), 5), (Sampler(1.0), 4), (Sampler(1.0), 7)]
)
def test_distribution(sampler, vocab):
    """The frequencies of all texts of three tokens, of a vocabulary of five, against their probabilities.

    A draft that knows more tokens, or fewer, makes no difference.
    """
    configs = SMALL, dataclasses.replace(SMALL, vocab_size=vocab)
    model, draft = (zoo.qwen3.Model(config, key=jax.random.key(n)) for n, config in enumerate(configs))
    model, draft = (eqx.tree_at(lambda m: m.lm_head.weight, m, 8 * m.lm_head.weight) for m in (model, draft))
    prompt, rows = [3, 1], 4000
    texts = jnp.array(list(itertools.product(range(5), repeat=3)))
    logits = eqx.filter_jit(model)(jnp.concatenate([jnp.tile(jnp.array([prompt]), (125, 1)), texts], axis=1))
    p = jax.nn.softmax(zoo.sampling.settings([sampler] * 125).filtered(logits[:, 1:4]), axis=-1)
    p = np.asarray(jnp.prod(jnp.take_along_axis(p, texts[..., None], axis=-1)[..., 0], axis=1))
    (got,) = zoo.complete(
        model, [prompt], samples=rows, max_new_tokens=3, sampler=sampler, draft=zoo.ModelDraft(draft, 2), slots=rows
    )
    counts = np.zeros((5, 5, 5))
    np.add.at(counts, tuple(np.array([c.tokens for c in got]).T), 1)
    counts, possible = counts.reshape(-1), p > 0
    assert counts[~possible].sum() == 0 and {c.calls for c in got} == {1, 2, 3}
    chi2 = np.sum((counts - rows * p)[possible] ** 2 / (rows * p[possible]))
    freedom = possible.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_draws_do_not_depend_on_others(tmp_path):
    """Nor on how many tokens a step decodes."""
    model = zoo.load(tiny.write(tmp_path, "qwen3-window-tail"))
    draft, alone = zoo.ModelDraft(noisy(model, 0.1), 2), []
    for prompt in PROMPTS:
        engine = zoo.Engine(model, slots=1, max_tokens=40, stride=1, draft=draft)
        alone += engine.submit(prompt, max_new_tokens=10, sampler=Sampler(1.0), key=jax.random.key(3))
        while not engine.idle:
            assert 1 <= len(engine.step()[alone[-1]]) <= 3
    engine = zoo.Engine(model, slots=2, max_tokens=40, stride=9, draft=draft)
    together = [
        engine.submit(prompt, max_new_tokens=10, sampler=Sampler(1.0), key=jax.random.key(3))[0] for prompt in PROMPTS
    ]
    while not engine.idle:
        engine.step()
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert {len(c.tokens) for c in together} == {10}


def test_on_a_mesh(tmp_path):
    folder, options = tiny.write(tmp_path, "qwen3-window-tail"), dict(samples=2, max_new_tokens=6)
    model = zoo.load(folder)
    want = zoo.complete(model, PROMPTS, draft=zoo.ModelDraft(noisy(model, 0.05), 2), **options)
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    with jax.set_mesh(mesh):
        model = zoo.load(folder, mesh=mesh)
        got = zoo.complete(model, PROMPTS, draft=zoo.ModelDraft(noisy(model, 0.05), 2), slots=4, **options)
    assert [[c.tokens for c in group] for group in got] == [[c.tokens for c in group] for group in want]


def test_text(tmp_path):
    """All at once and as it comes, with stop strings within what a round brings."""
    model, tokenizer = zoo.load("tiny"), zoo.tokenizer("tiny")
    prompt, draft = "def __init__(self", zoo.ModelDraft(model, 4)
    (want,) = zoo.generate(model, tokenizer, [prompt], max_new_tokens=12)
    for stop in [], [want[5:8]]:
        (plain,) = zoo.generate(model, tokenizer, [prompt], max_new_tokens=12, stop=stop)
        assert zoo.generate(model, tokenizer, [prompt], max_new_tokens=12, stop=stop, draft=draft) == [plain]
        pieces = list(zoo.stream(model, tokenizer, prompt, max_new_tokens=12, stop=stop, draft=draft))
        assert "".join(pieces) == plain and len(pieces) < 8


def test_refusals(tmp_path):
    model = zoo.load(tiny.write(tmp_path, "qwen3-window-tail"))
    with pytest.raises(ValueError, match="no module to draft with"):
        zoo.MTPDraft(model)
    with pytest.raises(ValueError, match="tokens=0"):
        zoo.ModelDraft(model, 0)
    other = zoo.qwen3.Model(dataclasses.replace(SMALL, vocab_size=600), key=jax.random.key(0))
    with pytest.raises(ValueError, match="vocabulary of 600, and the model's is 64"):
        zoo.complete(model, PROMPTS, max_new_tokens=4, draft=zoo.ModelDraft(other))
