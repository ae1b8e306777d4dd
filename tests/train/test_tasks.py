"""Evaluation during runs: questions in files and tasks of lm-eval, and the choice of the best step by a metric."""

import json
import pathlib
import sys

import jax
import pytest

import zoo
from tests.train.conftest import run
from train.data.records import Record
from train.evaluate import task as task_
from train.evaluate import tasks
from train.evaluate.validation import best, lower
from zoo.generation.complete import complete
from zoo.mesh import make_mesh


pytestmark = pytest.mark.usefixtures("quick")
WORDS = ("abc ", "hello ", "xyz quick ", "fox ")
TASKS = pathlib.Path(__file__).parents[1] / "zoo" / "tasks"


@pytest.fixture(scope="module")
def tokenizer(base):
    return zoo.tokenizer(base / "model")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.thorough
def test_a_run_answers_questions(base, model, tokenizer, tmp_path, capsys):
    """Each step's model answers; right answers to two questions are those of the first model."""
    prompts = [tokenizer.encode(word) for word in WORDS]
    texts = [
        tokenizer.answer(completion.tokens)
        for (completion,) in complete(model, prompts, max_new_tokens=8, stops=tokenizer.eos)
    ]
    answers = [texts[0], ["no", texts[1]], "no", "7"]
    records = [{"prompt": word, "answer": answer} for word, answer in zip(WORDS, answers, strict=True)]
    write(tmp_path / "words.jsonl", records)
    options = dict(
        steps=2, eval_every=1, lr=1.0, eval_tasks=(str(tmp_path / "words.jsonl"),), eval_tokens=8, best="eval_words"
    )
    metrics = run(base, tmp_path / "out", **options)
    values = [line["eval_words"] for line in metrics]
    assert values[0] == 0.5 and len(values) == 3 and max(values[1:]) < 0.5, "it learns something else, at this rate"
    wrong = [json.loads(line) for line in (tmp_path / "out" / "wrong.jsonl").read_text().splitlines()]
    assert [line for line in wrong if line["step"] == 0] == [
        {"step": 0, "task": "eval_words", "prompt": word, "text": text, "answer": answer}
        for word, text, answer in zip(WORDS[2:], texts[2:], answers[2:], strict=True)
    ]
    said = " ".join(capsys.readouterr().out.split())
    assert "step 0: eval_words 0.500" in said and "The model of step 0 is exported, where eval_words was best" in said
    assert "eval_words: 0.500 at first, 0.500 at best, 0.500 of the model that is exported" in said
    exported = zoo.load(tmp_path / "out" / "model", dtype="float32")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), exported, model))
    with pytest.raises(ValueError, match=r"--best was eval_words and is validation_loss"):
        run(base, tmp_path / "out", **options | dict(best="validation_loss", hold_out=0.1))
    with pytest.raises(ValueError, match=r"--best eval_math is no metric of the evaluations, which have eval_words\."):
        run(base, tmp_path / "other", **options | dict(best="eval_math"))
    with pytest.raises(ValueError, match=r"--best eval_words needs evaluations: give --hold-out or --eval-tasks"):
        run(base, tmp_path / "other", best="eval_words")


def test_what_counts_as_right(tokenizer):
    right = lambda text, **fields: tasks.question(Record("here", {"prompt": "abc ", **fields}), tokenizer).right(text)
    assert right(" Paris\n", answer="Paris") and not right("Paris.", answer="Paris")
    assert right("b", answer=["a", "b"]) and not right("c", answer=["a", "b"])
    assert right("so it is 1,000.", answer="1000"), "an answer that is a number is compared as one"
    assert right("... \\boxed{72}", answer="48 + 24 = 72\n#### 72") and not right("#### 71", answer="#### 72")
    assert not right("it is 7", answer=7, match="exact") and right("it is 7", answer=7)
    assert right("about 7 men", answer="7 men", match="number") and not right("about 7 men", answer="7 men")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"prompt": "abc "}, r"q\.jsonl, line 1: a question needs an `answer`"),
        ({"prompt": "abc ", "answer": []}, r"q\.jsonl, line 1: a question needs an `answer`"),
        ({"text": "abc "}, r"q\.jsonl, line 1: the record has neither a prompt nor messages"),
        ({"prompt": "abc ", "answer": "x", "match": "fuzzy"}, "the `match` 'fuzzy' is neither exact nor number"),
        ({"prompt": "abc ", "answer": "x", "match": "number"}, "an answer has no number"),
        ({"prompt": "abc " * 60, "answer": "x"}, r"line 1: the prompt has 240 tokens, which with --eval-tokens 256"),
    ],
)
def test_bad_questions(base, model, tokenizer, tmp_path, fields, said):
    o = task_.TaskOptions(eval_tasks=(str(write(tmp_path / "q.jsonl", [fields])),))
    with pytest.raises(ValueError, match=said):
        tasks.Tasks(o, tokenizer, model.config, make_mesh("fsdp=1", jax.devices()[:1]), "float32")


def test_bad_tasks(model, tokenizer, tmp_path, monkeypatch):
    question = write(tmp_path / "q.jsonl", [{"prompt": "abc ", "answer": "x"}])
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "q.jsonl", [{"prompt": "abc ", "answer": "x"}])
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    o = lambda *names: task_.TaskOptions(eval_tasks=names, eval_tokens=4)
    make = lambda *names: tasks.Tasks(o(*names), tokenizer, model.config, mesh, "float32")
    with pytest.raises(ValueError, match="Two of --eval-tasks are named eval_q"):
        make(str(question), str(tmp_path / "more" / "q.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"--eval-tasks: .*gone\.jsonl is neither a file nor a folder"):
        make(str(tmp_path / "gone.jsonl"))
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(
        ImportError,
        match=r"hellaswag is a task of lm-eval, .*pip install 'equinox-zoo\[lm-eval\]'\. A file",
    ):
        make("hellaswag")


def test_fewer_rows_where_memory_is_short(capsys):
    def call(rows):
        if rows > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
        return f"with {rows}"

    assert tasks.retry_smaller(call, 32) == ("with 8", 8)
    assert "does not suffice for 16 answers at a time: trying 8" in capsys.readouterr().out
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        tasks.retry_smaller(lambda rows: call(99), 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        tasks.retry_smaller(lambda rows: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("INTERNAL: a fault")), 2)


def test_directions():
    assert lower("validation_loss") and lower("eval_wikitext/word_perplexity") and lower("validation_kl")
    assert not any(
        map(lower, ("validation_accuracy", "eval_loss", "eval_a/acc", "validation_pass@8", "validation_margin"))
    )
    looks = [[0, 0.1], [5, float("nan")], [10, 0.3], [15, 0.3], [20, 0.0]]
    assert best("eval_math", looks) == [10, 0.3] and best("validation_loss", looks) == [20, 0.0]


@pytest.mark.live
def test_lm_eval(monkeypatch, tmp_path):
    """The metrics of a folder's tasks are those of `zoo.evaluate`, and wrong answers are kept."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    tokenizer, model = zoo.tokenizer("tiny"), zoo.load("tiny", dtype="float32")
    task, told = tasks.Harness(str(TASKS), task_.TaskOptions(), tokenizer), []
    found = task.evaluate(model, 4, lambda done, of: told.append((done, of)))
    assert found == {"eval_zoo_choice/acc": 1.0, "eval_zoo_ending/exact_match": 0.25}
    assert told[-1] == (4, 4) and [wrong.answer for wrong in task.wrong()] == [" number", " stack", " iterator"]
    with pytest.raises(ValueError, match="--eval-tasks: no_such_task is neither a file or folder nor a task"):
        tasks.Harness("no_such_task", task_.TaskOptions(), tokenizer)
