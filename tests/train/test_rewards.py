"""Rewards: what earns one, what does not, and that programs which run wild are ended."""

import json

import pytest

from tests.train import test_data
from tests.train.test_data import CHAT, HEAD
from train import rewards, rollouts
from train.records import Record


tokenizer = test_data.tokenizer  # a fixture


def test_exact():
    assert rewards.exact(" Paris\n", {"answer": "Paris"}) == 1
    assert rewards.exact("42", {"answer": 42}) == 1
    assert rewards.exact("paris", {"answer": "Paris"}) == rewards.exact("It is Paris", {"answer": "Paris"}) == 0
    with pytest.raises(ValueError, match="needs a field `answer`"):
        rewards.exact("Paris", {"prompt": "?"})


@pytest.mark.parametrize(
    "completion, answer, worth",
    [
        (r"so \boxed{7}, not 8", "7", 1),
        (r"\boxed{6} or rather \boxed{7}.", "7", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75", 1),
        (r"\boxed{\frac{3}{2}}", r"\frac{1}{2}", 0),
        (r"\boxed{x}, that is 7", "7", 1),
        ("2 + 2 = 4\n#### 4", "It is 2 + 2.\n#### 4", 1),
        ("#### 4 apples", "4", 1),
        ("#### 4\nThen 5", "5", 1),
        ("First 3, then 5.", "5", 1),
        ("First 3, then 5.", "3", 0),
        ("1,234,567", "1234567", 1),
        ("$1,000.50", "1000.5", 1),
        ("1/2", "0.5", 1),
        (".50", "1/2", 1),
        ("2/4", "1/2", 1),
        ("0.333", "1/3", 0),
        ("-3", "3", 0),
        ("x = -3.0", "-3", 1),
        ("7", 7, 1),
        ("1/0", "1", 0),
        ("1/0", "1/0", 0),
        ("none", "none", 0),
        ("", "0", 0),
    ],
)
def test_number(completion, answer, worth):
    assert rewards.number(completion, {"answer": answer}) == worth


@pytest.mark.parametrize(
    "completion, worth",
    [
        ("def double(x):\n    return 2 * x", 1),
        ("Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", 1),
        ("```\ndef double(x):\n    return 2 * x\n", 1),
        ("def double(x):\n    return x", 0),
        ("def double(x)", 0),
        ("I can't.", 0),
        ("import sys\nsys.exit(3)", 0),
    ],
)
def test_python(completion, worth):
    assert rewards.python(completion, {"tests": "assert double(4) == 8"}) == worth


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "hoard = bytearray(2**30)",
        "open('large', 'wb').write(bytes(2**21))",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.fork()",
        "input()",
    ],
)
def test_programs_are_held_in(program, monkeypatch):
    monkeypatch.setattr(rewards, "SECONDS", 2)
    assert rewards.python(program, {"tests": ""}) == 0


def test_programs_see_no_secrets(monkeypatch):
    """Neither variables nor files: they begin with nothing, and in an empty folder, where they may write."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = "import os\nassert 'HF_TOKEN' not in os.environ and not os.listdir()\nopen('small', 'w').write('x')"
    assert rewards.python(program, {"tests": "assert open('small').read() == 'x'"}) == 1


def test_python_needs_tests():
    with pytest.raises(ValueError, match="needs a field `tests`"):
        rewards.python("pass", {"answer": 1})


def test_find(tmp_path):
    assert rewards.find("exact") is rewards.exact and rewards.find("number") is rewards.number
    lines = rewards.find(r"regex:(\d+\n?)+")
    assert lines("\n1\n22\n", {}) == 1 and lines("1 and 2", {}) == 0
    file = tmp_path / "mine.py"
    file.write_text("def brief(completion, record):\n    return record['most'] - len(completion)\n")
    assert rewards.find(f"{file}:brief")("abc", {"most": 4}) == 1
    for name, error, words in (
        ("exakt", ValueError, r"'exakt' is no reward: it is exact, number, python, regex:PATTERN or file\.py:function"),
        (f"{file}:short", ValueError, r"mine\.py has no function 'short'"),
        (f"{tmp_path}/yours.py:brief", FileNotFoundError, r"There is no .*yours\.py"),
        ("regex:(", ValueError, r"'regex:\(' is no pattern"),
    ):
        with pytest.raises(error, match=words):
            rewards.find(name)


# ======================================================================================================================
# The records that rewards see.
# ======================================================================================================================

TOOLS = [{"name": "add"}]


@pytest.mark.parametrize(
    "fields, text, answer",
    [
        ({"prompt": "1 + 1 =", "answer": "2"}, "<s>1 + 1 =", "2"),
        ({"prompt": CHAT[:1], "answer": "yo"}, HEAD, "yo"),
        ({"messages": CHAT}, HEAD, "yo"),
        ({"messages": CHAT, "answer": "ho"}, HEAD, "ho"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, HEAD, "yo"),
        ({"messages": [*CHAT, CHAT[0]], "answer": "me"}, HEAD + "yo<|im_end|>\n" + HEAD, "me"),
        ({"messages": CHAT, "tools": TOOLS}, json.dumps(TOOLS) + "\n" + HEAD, "yo"),
        ({"messages": CHAT, "tools": json.dumps(TOOLS)}, json.dumps(TOOLS) + "\n" + HEAD, "yo"),
    ],
)
def test_prompts(tokenizer, fields, text, answer):
    prompt = rollouts.encode(Record("here", fields), tokenizer)
    assert tokenizer.decode(prompt.ids, special=True) == text
    assert prompt.record["answer"] == answer
    assert fields.items() <= prompt.record.items()


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"text": "abc"}, "neither a prompt nor messages"),
        ({"prompt": 3}, "neither a prompt nor messages"),
        (["prompt"], "neither a prompt nor messages"),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": [{"role": "user"}]}, "refuses the messages"),
        ({"messages": CHAT, "tools": "{"}, "Expecting property name"),
    ],
)
def test_bad_records_are_named(tokenizer, fields, problem):
    with pytest.raises(ValueError, match=r"^data\.jsonl, line 3: .*" + problem):
        rollouts.encode(Record("data.jsonl, line 3", fields), tokenizer)
