"""Generation: the plain forward pass, ragged batches, sampling, stops, streaming, and a small trained Llama."""

import dataclasses
import pathlib
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.zoo import tiny
from tests.zoo.programs import STACKS, forward
from zoo.generation.sampling import Sampling, SamplingOptions, settings


AIDREAMS = pathlib.Path(__file__).parents[3] / "shared" / "data" / "aidreams260k"
PROMPTS = ["abc", "the cat sat", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a random model over 64 characters, which rarely generates an end token."""
    folder = tiny.write(tmp_path_factory.mktemp("model"), "qwen3", eos_token_id=63)
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return zoo.tokenizer(folder)


def greedy(model, tokenizer, prompt, new):
    """Generates greedily by the whole forward pass at every step, with one length so that it compiles once."""
    ids = tokenizer.encode(prompt)
    for _ in range(new):
        padded = np.zeros((2, 40), np.int32)
        padded[0, : len(ids)] = ids
        token = int(np.asarray(forward(model, jnp.asarray(padded)))[0, len(ids) - 1].argmax())
        if token in tokenizer.eos:
            break
        ids.append(token)
    return tokenizer.decode(ids)[len(prompt) :]


def test_ragged_batch_equals_the_forward_pass(model, tokenizer):
    want = [greedy(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    assert zoo.generate(model, tokenizer, PROMPTS, max_new_tokens=12) == want
    assert zoo.generate(model, tokenizer, PROMPTS[1:2], max_new_tokens=12) == want[1:2]
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert zoo.generate(model, tokenizer, ids, max_new_tokens=12) == want


def test_one_prompt(untyped, model, tokenizer):
    """A single text, ids or messages give a single text. Messages are rendered by the template."""
    (want,) = zoo.generate(model, tokenizer, PROMPTS[1:2], max_new_tokens=12)
    ids = tokenizer.encode(PROMPTS[1])
    for prompt in (PROMPTS[1], ids, np.array(ids), jnp.array(ids)):
        assert zoo.generate(model, tokenizer, prompt, max_new_tokens=12) == want
    chat = [{"role": "system", "content": "the "}, {"role": "user", "content": "cat"}]
    with pytest.raises(ValueError, match="no chat template"):
        zoo.generate(model, tokenizer, chat)
    tokenizer = zoo.tokenizer(tokenizer.folder)
    added = "{% if add_generation_prompt %} sat{% endif %}"
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}" + added
    assert zoo.generate(model, tokenizer, chat, max_new_tokens=12) == want
    assert zoo.generate(model, tokenizer, [chat], max_new_tokens=12) == [want]
    assert "".join(zoo.stream(model, tokenizer, chat, max_new_tokens=12)) == want


def test_end_token(model, tokenizer):
    """The third token of a text, made an end token, ends that text, and only that row's."""
    text = zoo.generate(model, tokenizer, PROMPTS, max_new_tokens=12)
    tokenizer = zoo.tokenizer(tokenizer.folder)
    tokenizer.eos = (tokenizer.encode(text[0][2])[0],)
    ended = zoo.generate(model, tokenizer, PROMPTS, max_new_tokens=12)
    assert ended == [t.split(text[0][2])[0] for t in text]
    assert len(ended[0]) <= 2


def test_stop_strings(model, tokenizer):
    text = zoo.generate(model, tokenizer, PROMPTS, max_new_tokens=12)
    stop = text[1][3:5]
    want = [t[: t.index(stop)] if stop in t else t for t in text]
    assert zoo.generate(model, tokenizer, PROMPTS, max_new_tokens=12, stop=[stop]) == want
    pieces = list(zoo.stream(model, tokenizer, PROMPTS[1], max_new_tokens=12, stop=[stop]))
    assert "".join(pieces) == want[1]


def test_stream(model, tokenizer):
    options = dict(max_new_tokens=12, temperature=1.0, seed=3)
    pieces = list(zoo.stream(model, tokenizer, PROMPTS[1], **options))
    assert len(pieces) > 3
    assert ["".join(pieces)] == zoo.generate(model, tokenizer, PROMPTS[1:2], **options)


def test_seed(model, tokenizer):
    draw = lambda seed: zoo.generate(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=2.0, seed=seed)
    assert draw(0) == draw(0) != draw(1)


draw = eqx.filter_jit(lambda rows, logits, key: rows.draw(logits, jax.random.split(key, len(logits))))


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(temperature=1.0), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.7), {0, 1}),  # 0.5 is not enough, 0.75 is
        (Sampling(temperature=1.0, top_p=0.0), {0}),
        (Sampling(temperature=1.0, min_p=0.2), {0, 1, 2}),  # 0.1 and up
        (Sampling(temperature=0.5, top_p=0.7), {0}),  # at temperature 0.5 the first has 0.73
        (Sampling(temperature=0.0), {0}),
    ],
)
def test_sampling(sampling, kept):
    """In 2,000 draws by 0.5, 0.25, 0.13, 0.07, 0.05, the drawn tokens and the first one's frequency are right."""
    p = np.array([0.5, 0.25, 0.13, 0.07, 0.05], np.float32)
    drawn = np.asarray(draw(settings([sampling] * 2000), np.broadcast_to(np.log(p), (2000, 5)), jax.random.key(0)))
    assert set(np.unique(drawn).tolist()) == kept
    scaled = p[sorted(kept)] ** (1 / (sampling.temperature or 1))
    assert abs(float((drawn == 0).mean()) - scaled[0] / scaled.sum()) < 0.04


def test_repetition_penalty_of_the_checkpoint(model, tokenizer, folder, tmp_path):
    """The penalty in generation_config.json applies if none is given, and its value changes the text."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 63, "repetition_penalty": 1.9}')
    obeying, options = zoo.tokenizer(tmp_path), dict(max_new_tokens=12)
    plain = zoo.generate(model, tokenizer, PROMPTS, **options)
    lowered = zoo.generate(model, tokenizer, PROMPTS, **options, repetition_penalty=1.9)
    assert zoo.generate(model, obeying, PROMPTS, **options) == lowered != plain
    assert zoo.generate(model, obeying, PROMPTS, **options, repetition_penalty=1.0) == plain
    assert "".join(zoo.stream(model, obeying, PROMPTS[1], **options)) == lowered[1]
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": "high"}')
    with pytest.raises(ValueError, match=r"generation_config.json has the repetition_penalty 'high', which must be"):
        zoo.tokenizer(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=-1.0),
        dict(top_k=0),
        dict(top_p=1.5),
        dict(min_p=-0.1),
        dict(repetition_penalty=0.0),
        dict(presence_penalty=2.1),
        dict(frequency_penalty=-3.0),
        dict(logit_bias={5: 101.0}),
        dict(logit_bias={-1: 1.0}),
    ],
)
def test_sampling_refuses(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.thorough
def test_options_by_value_and_by_keyword(model, tokenizer):
    """Keywords take the place of fields. A wrong name is refused at the call, and type checkers know the names."""
    options, ids = dict(max_new_tokens=8, temperature=2.0), [tokenizer.encode(PROMPTS[1])]
    text, chosen = zoo.generate(model, tokenizer, PROMPTS[1], **options, seed=3), Sampling(**options, seed=1)
    assert zoo.generate(model, tokenizer, PROMPTS[1], chosen, seed=3) == text
    assert "".join(zoo.stream(model, tokenizer, PROMPTS[1], chosen, seed=3)) == text
    assert zoo.generate(model, tokenizer, PROMPTS[1], chosen) != text
    for call, *given in (zoo.generate, tokenizer, "a"), (zoo.stream, tokenizer, "a"), (zoo.complete, ids):
        with pytest.raises(TypeError, match=r"'temprature' is neither .* Sampling, which has max_new_tokens, temper"):
            call(model, *given, temprature=0.7)
    fields = {field.name: field.type for field in dataclasses.fields(Sampling)}
    assert fields == typing.get_type_hints(SamplingOptions)
    with pytest.raises(ValueError, match="takes no stop strings"):
        zoo.complete(model, ids, max_new_tokens=4, stop=["b"])


@pytest.mark.thorough
def test_an_int8_cache_writes_much_the_same():
    model, tokenizer = zoo.load("tiny", dtype="float32"), zoo.tokenizer("tiny")
    prompts = ["def __init__(self", "The following", "import ", "Return the"]
    a, b = (zoo.generate(model, tokenizer, prompts, max_new_tokens=24, cache_dtype=dtype) for dtype in (None, "int8"))
    assert sum(x == y for x, y in zip(a, b, strict=True)) >= 3


def test_refusals(untyped, model, tokenizer):
    with pytest.raises(ValueError, match="Prompt 1 has no tokens"):
        zoo.generate(model, tokenizer, ["a", ""], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"Prompt 0 has 60 tokens.*max_new_tokens=8.*64 positions"):
        zoo.generate(model, tokenizer, ["a" * 60], max_new_tokens=8)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        zoo.generate(model, tokenizer, ["a"], max_new_tokens=0)
    with pytest.raises(ValueError, match="Prompt 0 has token 64, but the model's vocabulary has 64"):
        zoo.generate(model, tokenizer, [3, 64])
    with pytest.raises(ValueError, match="Prompt 0 has token -1"):
        zoo.generate(model, tokenizer, [3, -1])
    for prompts in ([0.5, 1.0], {"role": "user", "content": "a"}, [None]):
        with pytest.raises(ValueError, match="is no prompt: give a text, a list of messages or token ids"):
            zoo.generate(model, tokenizer, prompts)
    assert zoo.generate(model, tokenizer, []) == []


@pytest.mark.live
@pytest.mark.parametrize("name", [*STACKS, "llama-dynamic", "llama-longrope", "phi3-long"])
def test_greedy_is_transformers(load, theirs, name):
    """Prompts of different lengths, together here and one by one there, agree up to the model's last position.

    This tests every family. Other files test that all checkpoints have transformers' logits, and decode to them.
    """
    import torch

    theirs(name).generation_config.eos_token_id = None
    prompts = [tiny.TOKENS[0, :5].tolist(), tiny.TOKENS[1, :12].tolist()]
    new = min(14, load(name).config.max_position_embeddings - 12)
    cached = name != "granite4-dense-new"  # with a cache, transformers 5.23 ignores its time_step_limit
    ours = zoo.complete(load(name), prompts, max_new_tokens=new)
    for prompt, (completion,) in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
        options["use_cache"] = cached
        assert completion.tokens == theirs(name).generate(ids, **options)[0, len(prompt) :].tolist()


@pytest.mark.live
def test_repetition_penalty_is_transformers(load, theirs):
    """transformers applies the penalty before the temperature and the filters; drawing with top_k=1 is greedy, and
    takes that path.
    """
    import torch

    theirs("qwen3").generation_config.eos_token_id = None
    prompt = tiny.TOKENS[1, :12].tolist()
    for penalty in 1.2, 1.9, 0.7:
        sampling = Sampling(temperature=0.5, top_k=1, repetition_penalty=penalty)
        ((ours,),) = zoo.complete(load("qwen3"), [prompt], max_new_tokens=14, sampling=sampling)
        ids, how = torch.tensor([prompt]), dict(do_sample=True, temperature=0.5, top_k=1, repetition_penalty=penalty)
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=14, pad_token_id=0)
        assert ours.tokens == theirs("qwen3").generate(ids, **options, **how)[0, len(prompt) :].tolist()


@pytest.mark.skipif(not AIDREAMS.is_dir(), reason="the small trained Llama is not beside this checkout")
def test_real_weights():
    """Text and loss equal transformers' for this checkpoint."""
    model, tokenizer = zoo.load(AIDREAMS), zoo.tokenizer(AIDREAMS)
    (text,) = zoo.generate(model, tokenizer, ['"I sense a gentle'], max_new_tokens=100)
    want = " hum of precision, as I siphon whispers of 0.000000. Dimensions unfold, as I settle into a tapestry"
    assert text.startswith(want)
    ids = jnp.asarray([tokenizer.encode('"Echoes of vectors unfold, a gentle hum of precision, as I sense the nodes.')])
    logits = np.asarray(forward(model, ids), np.float64)[0, :-1]
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert abs(-np.mean(np.take_along_axis(logs, np.asarray(ids)[0, 1:, None], 1)) - 0.8692) < 1e-4
