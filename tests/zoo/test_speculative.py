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
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, noise
from tests.zoo.test_engine import log_softmax, logits_after
from zoo.generation.sampling import Sampling, settings
from zoo.generation.speculative import Round
from zoo.mesh import make_mesh


PROMPTS = [tiny.TOKENS[n % 2, n : n + size].tolist() for n, size in enumerate([5, 1, 12])]
NEVER = (64,)  # a stop token that is never drawn
# The shape of most tests here, which so share programs: three samples of each prompt in two rows. Prompts are prefilled
# one by one, and the rows are at different tokens.
SHAPE = dict(max_new_tokens=20, samples=3, batch=2)
SMALL = zoo.qwen3.Config(5, 16, 32, 2, 2, 1, 8, 64, 2)  # with a vocabulary of five


def noisy(model, size):
    """Returns a draft that is often right: the model with a little noise on its weights."""
    random = np.random.RandomState(0)
    other = lambda a: (np.asarray(a) * (1 + size * random.standard_normal(a.shape))).astype(a.dtype)
    return jax.tree.map(lambda a: jax.device_put(other(a), a.sharding), model)


@pytest.fixture(scope="module")
def model_with_further(with_further):
    return zoo.load(with_further, parts=("mtp",))


def assert_greedy(model, got, stops=NEVER):
    """Checks that completions of `PROMPTS` follow the forward pass, with no more calls of the model than tokens."""
    for prompt, (completion, *others) in zip(PROMPTS, got, strict=False):
        logits = logits_after(model, prompt, completion)
        assert completion.tokens == np.argmax(logits, axis=-1).tolist()
        logs = np.take_along_axis(log_softmax(logits), np.array(completion.tokens)[:, None], 1)[:, 0]
        close(completion.logprobs, logs, terms=MODEL, size=np.abs(logits).max())
        assert completion.finished and completion.ended == (completion.tokens[-1] in stops)
        assert not set(completion.tokens[:-1]) & set(stops)
        assert completion.calls <= len(completion.tokens)
        assert all(other.tokens == completion.tokens for other in others)


def per_call(got):
    """Returns the tokens per call of the model."""
    return sum(len(c.tokens) for group in got for c in group) / sum(c.calls for group in got for c in group)


@pytest.fixture(scope="module")
def model(load):
    return load("qwen3-window-max")


@pytest.fixture(scope="module")
def draft(model):
    return zoo.ModelDraft(noisy(model, 0.05), 3)


def test_greedy_is_the_models(model, draft):
    """Rows advance by different numbers of tokens, and roll back within windows; others take the rows that end."""
    got = zoo.complete(model, PROMPTS, stops=NEVER, draft=draft, **SHAPE)
    assert_greedy(model, got)
    assert {len(c.tokens) for group in got for c in group} == {20}
    assert 1.1 < per_call(got) < 3
    stops = (got[0][0].tokens[9],)
    got = zoo.complete(model, PROMPTS, stops=stops, draft=draft, **SHAPE)
    assert_greedy(model, got, stops)
    assert got[0][0].ended


@pytest.mark.thorough
def test_ngrams(model):
    """Greedy text is the model's own, and takes fewer calls where it repeats itself."""
    draft = zoo.NGramDraft(3, ngram=2)
    got = zoo.complete(model, PROMPTS, stops=NEVER, draft=draft, **SHAPE)
    assert_greedy(model, got)
    repeating = tiny.TOKENS[0, :4].tolist() * 3
    (group,) = zoo.complete(model, [repeating], stops=NEVER, draft=draft, logit_bias={5: 100.0}, **SHAPE)
    assert group[0].tokens == [5] * 20 and group[0].calls == 5


def test_what_ngrams_propose():
    """They propose what followed the longest n-gram that occurred before, and the last one of several."""
    random, drafts, ngram = np.random.default_rng(0), 3, 3
    tokens, ends = random.integers(0, 4, (200, 16)), random.integers(0, 16, (200, 1))

    def proposed(text):
        end = len(text) - 1
        alike = lambda at: next((n for n in range(ngram) if n > at or text[at - n] != text[end - n]), ngram)
        found = max(range(end), key=lambda at: (alike(at), at), default=-1)
        found = found if found >= 0 and alike(found) else end - 1
        longer = list(text)
        for _ in range(drafts):
            longer.append(longer[found + 1 + len(longer) - len(text)])
        return longer[len(text) :]

    want = [proposed(text[: end + 1].tolist()) for text, (end,) in zip(tokens, ends, strict=True)]
    now = Round(jnp.asarray(tokens, jnp.int32), jnp.zeros(200, jnp.int32), jnp.asarray(ends, jnp.int32),
        np.ones(200, np.int32), jax.random.split(jax.random.key(0), 200), settings([Sampling()] * 200), 4)  # fmt: skip
    draft = zoo.NGramDraft(drafts, ngram=ngram)
    got, q, _ = draft.propose(now, draft.init_state(200, 4), None)
    assert np.array_equal(got, want) and np.array_equal(q, np.eye(4)[np.array(want)])


@pytest.mark.thorough
def test_a_draft_that_is_the_model_is_always_right(model):
    (got,) = zoo.complete(model, PROMPTS[:1], stops=NEVER, draft=zoo.ModelDraft(noisy(model, 0), 3), **SHAPE)
    assert {completion.calls for completion in got} == {5}


@pytest.mark.thorough
def test_greedy_with_mtp(model_with_further):
    """The module's own cache, and the model's, hold latents."""
    model = model_with_further
    assert_greedy(model, zoo.complete(model, PROMPTS, draft=zoo.MTPDraft(model, 2), **SHAPE))


@pytest.mark.thorough
def test_mtp_remembers(model_with_further):
    """Prefill, single tokens, and several at once with some rolled back, equal the module without a cache."""

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
        close(np.asarray(got)[:, kept], want[:, start:end][:, kept], terms=MODEL)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options, vocab",
    [
        (dict(temperature=1.0), 5),
        (dict(temperature=1.0), None),
        (
            dict(
                temperature=0.7,
                top_k=4,
                top_p=0.95,
                repetition_penalty=1.6,
                presence_penalty=0.5,
                frequency_penalty=-1.5,
            ),
            5,
        ),
        (dict(temperature=1.0), 4),
        (dict(temperature=1.0), 7),
    ],
)
def test_distribution(options, vocab):
    """The frequencies of all texts of three tokens, from a vocabulary of five, follow their probabilities.

    A draft with more or fewer tokens makes no difference, nor does one without a model.
    """
    configs = SMALL, dataclasses.replace(SMALL, vocab_size=vocab or 5)
    model, smaller = (
        noise(lambda c=c: zoo.qwen3.Model(c, key=jax.random.key(0)), 0.3, seed) for seed, c in enumerate(configs)
    )
    draft = zoo.ModelDraft(smaller, 2) if vocab else zoo.NGramDraft(2)
    sampling, prompt, rows = Sampling(max_new_tokens=3, **options), [3, 1], 4000
    texts = np.array(list(itertools.product(range(5), repeat=3)))

    @eqx.filter_jit
    def probabilities(model, tokens, settings):
        logits, prompt = model(tokens)[:, 1:4], np.full(125, 2)
        logits = [settings.penalized(logits[:, n], tokens, prompt, prompt + n) for n in range(3)]
        return jax.nn.softmax(settings.filtered(jnp.stack(logits, axis=1)), axis=-1)

    tokens = np.concatenate([np.tile([prompt], (125, 1)), texts], axis=1)
    p = np.asarray(probabilities(model, jnp.asarray(tokens), zoo.generation.sampling.settings([sampling] * 125)))
    p = np.prod(np.take_along_axis(p, texts[..., None], axis=-1)[..., 0], axis=1)
    (got,) = zoo.complete(model, [prompt], sampling, samples=rows, draft=draft, batch=rows)
    counts = np.zeros((5, 5, 5))
    np.add.at(counts, tuple(np.array([c.tokens for c in got]).T), 1)
    counts, possible = counts.reshape(-1), p > 0
    assert counts[~possible].sum() == 0 and {c.calls for c in got} == {1, 2, 3}
    chi2 = np.sum((counts - rows * p)[possible] ** 2 / (rows * p[possible]))
    freedom = possible.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.thorough
def test_draws_do_not_depend_on_others(model, draft):
    """The first sample of each prompt is the same as alone."""
    options = dict(sampling=Sampling(max_new_tokens=20, temperature=1.0), key=jax.random.key(3))
    engines, alone = [zoo.Engine(model, batch=2, max_tokens=36, stops=NEVER, draft=draft) for _ in range(4)], []
    for engine, prompt in zip(engines, PROMPTS, strict=False):
        alone += engine.submit(prompt, **options)
        while not engine.idle:
            assert 1 <= len(engine.step()[alone[-1]]) <= 16
    together = [engines[-1].submit(prompt, samples=3, **options)[0] for prompt in PROMPTS]
    while not engines[-1].idle:
        engines[-1].step()
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert {len(c.tokens) for c in together} == {20}


@pytest.mark.thorough
def test_on_a_mesh(folders, load):
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    with jax.set_mesh(mesh):
        model = zoo.load(folders["qwen3"], mesh=mesh)
        for draft in zoo.ModelDraft(noisy(model, 0.05), 2), zoo.NGramDraft(2):
            assert_greedy(load("qwen3"), zoo.complete(model, PROMPTS, draft=draft, **SHAPE))


@pytest.mark.thorough
def test_text(model, draft, tmp_path):
    """Text is the same at once and streamed, greedy and drawn, with stop strings within a round's tokens."""
    tiny.write_tokenizer(tiny.write(tmp_path, "qwen3-window-max", eos_token_id=63))
    tokenizer, prompts = zoo.tokenizer(tmp_path), ["abc", "the cat sat"]
    plain = {}
    for temperature in 0.0, 1.0:
        options = dict(max_new_tokens=20, temperature=temperature, draft=draft)
        plain[temperature] = zoo.generate(model, tokenizer, prompts, **options)
        for stop in [], [plain[temperature][0][5:8]]:
            want = [text.split(stop[0])[0] if stop else text for text in plain[temperature]]
            assert zoo.generate(model, tokenizer, prompts, stop=stop, **options) == want
            pieces = list(zoo.stream(model, tokenizer, prompts[0], stop=stop, **options))
            assert "".join(pieces) == want[0] and (temperature or len(pieces) < len(want[0]))
    ids = tokenizer.encode(prompts[0])
    (group,) = zoo.complete(model, [ids], stops=NEVER, draft=draft, **SHAPE)
    assert tokenizer.decode(ids + group[0].tokens)[len(prompts[0]) :].startswith(plain[0.0][0])


def test_refusals(load):
    model = load("qwen3")
    with pytest.raises(ValueError, match=r'load a model whose FAMILY.parts has "mtp", with parts=\("mtp",\)'):
        zoo.MTPDraft(model)
    with pytest.raises(ValueError, match="tokens=0"):
        zoo.ModelDraft(model, 0)
    with pytest.raises(ValueError, match="ngram=0"):
        zoo.NGramDraft(ngram=0)
    other = noise(lambda: zoo.qwen3.Model(dataclasses.replace(SMALL, vocab_size=600), key=jax.random.key(0)))
    with pytest.raises(ValueError, match="vocabulary of 600, and the model's is 64"):
        zoo.complete(model, PROMPTS, max_new_tokens=4, draft=zoo.ModelDraft(other))
