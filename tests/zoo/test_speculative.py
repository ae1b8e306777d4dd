"""Speculative decoding: greedy text is the model's own whatever the draft; drawn text has the model's distribution."""

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
from zoo.sampling import Sampler
from zoo.speculative import MTPDraft


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
    for a, (b,) in zip(got, want, strict=True):
        assert (a.tokens, a.ended, a.finished) == (b.tokens, b.ended, True)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("name, noise", [("gemma3", 0.1), ("gpt_oss", 0.02)])
def test_greedy_is_the_models(tmp_path, name, noise):
    """Rows advance by different numbers of tokens, and go back within windows; stop tokens and limits hold."""
    model = zoo.load(tiny.write(tmp_path, name))
    want = zoo.complete(model, PROMPTS, max_new_tokens=20, stops=STOPS)
    got, rate = zoo.speculate(model, PROMPTS, draft=noisy(model, noise), drafted=3, max_new_tokens=20, stops=STOPS)
    assert_same(got, want)
    assert 0.05 < rate < 0.95


def test_greedy_with_mtp(with_further):
    """The module's own cache, and the model's, are of latents."""
    want = zoo.complete(with_further, PROMPTS, max_new_tokens=12)
    got, rate = zoo.speculate(with_further, PROMPTS, drafted=2, max_new_tokens=12)
    assert_same(got, want)
    assert 0 <= rate < 1


def test_mtp_remembers(with_further):
    """Prefilled, token by token and several at once, some of them taken back: as `further` on the whole sequence."""
    tokens = jnp.asarray(tiny.TOKENS)
    x, _ = eqx.filter_jit(with_further.hidden)(tokens)
    want, _ = eqx.filter_jit(with_further.further)(x[:, :-1], tokens[:, 1:])
    draft, call = MTPDraft(with_further), eqx.filter_jit(lambda draft, *args: draft(*args))
    cache = draft.init_cache(2, 40, jnp.float32)
    for start, end, wrong in [(0, 9, 0), (9, 10, 0), (10, 14, 2), (12, 16, 0)]:
        following = tokens[:, start + 1 : end + 1]
        following = jnp.where(jnp.arange(end - start) < end - start - wrong, following, 0)
        at = jnp.broadcast_to(jnp.arange(start, end), following.shape)
        got, cache = call(draft, x[:, start:end], following, cache, at)
        kept = slice(0, end - start - wrong)
        assert np.allclose(got[:, kept], want[:, start:end][:, kept], atol=1e-4)


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, top_k=4, top_p=0.95)])
def test_distribution(sampler):
    """The frequencies of all texts of three tokens, of a vocabulary of five, against their probabilities."""
    model, draft = (zoo.qwen3.Model(SMALL, key=jax.random.key(n)) for n in range(2))
    model, draft = (eqx.tree_at(lambda m: m.lm_head.weight, m, 8 * m.lm_head.weight) for m in (model, draft))
    prompt, rows = [3, 1], 4000
    texts = jnp.array(list(itertools.product(range(5), repeat=3)))
    logits = eqx.filter_jit(model)(jnp.concatenate([jnp.tile(jnp.array([prompt]), (125, 1)), texts], axis=1))
    p = jax.nn.softmax(zoo.sampling.settings([sampler] * 125).filtered(logits[:, 1:4]), axis=-1)
    p = np.asarray(jnp.prod(jnp.take_along_axis(p, texts[..., None], axis=-1)[..., 0], axis=1))
    got, rate = zoo.speculate(model, [prompt] * rows, draft=draft, drafted=2, max_new_tokens=3, sampler=sampler)
    counts = np.zeros((5, 5, 5))
    np.add.at(counts, tuple(np.array([c.tokens for c in got]).T), 1)
    counts, possible = counts.reshape(-1), p > 0
    assert counts[~possible].sum() == 0 and 0.05 < rate < 0.95
    chi2 = np.sum((counts - rows * p)[possible] ** 2 / (rows * p[possible]))
    freedom = possible.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_refusals(tmp_path):
    model = zoo.load(tiny.write(tmp_path, "qwen3-window-tail"))
    for options, message in [
        (dict(), "nothing to draft with"),
        (dict(draft=zoo.qwen3.Model(SMALL, key=jax.random.key(0))), "vocabulary of 5, and the model's is 64"),
        (dict(draft=model, drafted=0), "drafted=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            zoo.speculate(model, PROMPTS, max_new_tokens=4, **options)
