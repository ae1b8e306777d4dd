"""Evaluation by tasks of lm-eval: log-likelihoods equal the forward pass's, and results equal those of transformers."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from zoo import evaluation


TASKS = pathlib.Path(__file__).parent / "tasks"


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
    return zoo.tokenizer("tiny")


@pytest.mark.thorough
def test_log_likelihoods(model, tokenizer):
    """Log-likelihoods equal the plain forward pass's, for pairs of any lengths in rows of two; greedy is by argmax."""
    texts = [("abc", " def"), ("", "hello"), ("return quick ", "brown"), ("a", "b" * 20), ("fox", "\n")]
    pairs = [evaluation.pair(tokenizer, *text, first=63) for text in texts]
    assert [tokenizer.decode(a + b) for a, b in pairs[2:4]] == ["".join(text) for text in texts[2:4]]
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens), axis=-1))
    before = pairs[0][0]
    greedy = np.asarray(forward(jnp.zeros((1, 32), jnp.int32).at[0, : len(before)].set(jnp.array(before))))
    pairs.append((before, [int(greedy[0, len(before) - 1].argmax())]))
    told = []
    found = evaluation.score(model, pairs, 2, lambda done, of: told.append((done, of)))
    assert told == [(2, 6), (4, 6), (6, 6)]
    for (before, after), (logp, is_greedy) in zip(pairs, found, strict=True):
        row = np.zeros((1, 32), np.int32)
        row[0, : len(before + after)] = before + after
        logps = np.asarray(forward(row))[0, len(before) - 1 : len(before + after) - 1]
        close(logp, logps[np.arange(len(after)), after].sum(), terms=MODEL, size=np.abs(logps).max())
        assert is_greedy == (logps.argmax(axis=-1) == after).all()
    assert found[-1][1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-window-head", "qwen3_next"])
def test_a_shared_beginning_is_read_once(load, name):
    """Choices after one question have the numbers that each has alone, whatever the layers keep of the question."""
    model, ids = load(name), tiny.TOKENS[0].tolist()
    pairs = [(ids[:9], ids[9:11]), (ids[:9], ids[3:8]), (ids[:4], ids[4:5]), (ids[:9], [7]), (ids[:4], ids[9:12])]
    found = evaluation.score(model, pairs, 4, lambda *_: None)
    alone = [evaluation.score(model, [each], 4, lambda *_: None)[0] for each in pairs]
    close([logp for logp, _ in found], [logp for logp, _ in alone], terms=MODEL)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in alone]


@pytest.mark.live
def test_the_results_are_those_of_transformers(model, tokenizer, monkeypatch, tmp_path):
    """lm-eval finds the same with transformers' model: metrics, errors, log-likelihoods and generated texts."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    tasks = evaluation.Tasks(str(TASKS))
    (ours,) = evaluation.run(model, tokenizer, [tasks], limit=None, batch=4, max_new_tokens=8)
    lm = huggingface.HFLM(pretrained="zoo/tiny", device="cpu", dtype="float32", batch_size=4)
    theirs = evaluator.simple_evaluate(model=lm, tasks=tasks._tasks, task_manager=tasks._manager, bootstrap_iters=1000)
    assert evaluation.metrics(ours) == evaluation.metrics(theirs)
    for task in "zoo_choice", "zoo_ending":
        for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            if task == "zoo_ending":
                assert a["resps"] == b["resps"]
                continue
            for [(logp, greedy)], [(want, is_greedy)] in zip(a["resps"], b["resps"], strict=True):
                close(logp, want, terms=MODEL)
                assert greedy == is_greedy


@pytest.mark.live
def test_evaluate(model, tokenizer, monkeypatch, tmp_path):
    """Tasks are named by a folder or a file, in one call or several; `limit` cuts them."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = zoo.evaluate(model, tokenizer, str(TASKS))
    assert {name: value for name, value in found.items() if "_stderr" not in name} == {
        "zoo_choice/acc": 1.0, "zoo_ending/exact_match": 0.25
    }  # fmt: skip
    assert found["zoo_ending/exact_match_stderr"] == 0.25
    both = [str(TASKS / "ending.yaml"), str(TASKS / "choice.yaml")]
    assert zoo.evaluate(model, tokenizer, both) == found
    assert zoo.evaluate(model, tokenizer, both[:1], limit=2)["zoo_ending/exact_match"] == 0.5
    with pytest.raises(ValueError, match="no_such_task is neither a file or folder nor a task of lm-eval"):
        zoo.evaluate(model, tokenizer, "no_such_task")


@pytest.mark.live
def test_rolling(model, tokenizer):
    """A text longer than the model's positions is scored in windows, each token once."""
    pytest.importorskip("lm_eval")
    text = "def f(x):\n    return x\n" * 80
    lm = evaluation._adapter(model, tokenizer, 4, 8, lambda *_: None)
    request = type("Request", (), {"args": (text,)})
    (found, again) = lm.loglikelihood_rolling([request, request])
    assert found == again
    limit = model.config.max_position_embeddings
    ids = [tokenizer.eos[0] if tokenizer.bos is None else tokenizer.bos, *tokenizer.encode(text, special=False)]
    assert len(ids) > limit + 1
    logps = jax.nn.log_softmax(model(jnp.array([ids[:limit]]))[0], axis=-1)
    first = sum(float(logps[i, ids[i + 1]]) for i in range(limit - 1))
    (rest,) = lm.loglikelihood_rolling([type("Request", (), {"args": (text[: len(text) // 2],)})])
    assert found < first < 0 and found < rest < 0
