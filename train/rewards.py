"""Rewards of completions, for reinforcement learning: functions of a completion's text and of its record's fields.

    def reward(completion: str, record: Mapping[str, Any]) -> float: ...

`find` knows those below by name, and takes others from files of the user's.
"""

import functools
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any


Reward = Callable[[str, Mapping[str, Any]], float]
SECONDS, BYTES = 10, 2**29  # that a program may take
# Sets the limits from within the child: of processor time, of memory, of files it may write. The system's limit of
# processes would not hold for root, so the interpreter refuses to start any.
LIMITED = (
    "import resource, sys\n"
    f"for kind, most in (('CPU', {SECONDS}), ('AS', {BYTES}), ('FSIZE', 2**20), ('CORE', 0)):\n"
    "    resource.setrlimit(getattr(resource, 'RLIMIT_' + kind), (most, most))\n"
    "def refuse(event, _):\n"
    "    if event.startswith(('subprocess', 'os.system', 'os.fork', 'os.exec', 'os.posix_spawn')):\n"
    "        raise PermissionError(event)\n"
    "sys.addaudithook(refuse)\n"
    "exec(compile(sys.stdin.read(), 'completion', 'exec'), {'__name__': '__main__'})\n"
)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?"


def find(name: str) -> Reward:
    """The reward of a name: exact, number, python, regex:PATTERN, or file.py:function.

    Raises:
        ValueError: if there is none.
        OSError: if the file cannot be read.
    """
    known: dict[str, Reward] = {"exact": exact, "number": number, "python": python}
    if name in known:
        return known[name]
    kind, _, rest = name.partition(":")
    if kind == "regex":
        try:
            return functools.partial(matches, pattern=re.compile(rest))
        except re.error as error:
            raise ValueError(f"{name!r} is no pattern: {error}.") from error
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{name!r} is no reward: it is {', '.join(known)}, regex:PATTERN or file.py:function.")
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"There is no {path} for the reward {name!r}.")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise ValueError(f"{path} has no function {function!r}.")
    return getattr(module, function)


def exact(completion: str, record: Mapping[str, Any]) -> float:
    """1 for the record's answer, but for white space around it."""
    return float(completion.strip() == str(_answer(record)).strip())


def matches(completion: str, record: Mapping[str, Any], *, pattern: re.Pattern[str]) -> float:
    """1 for what the pattern matches as a whole, but for white space around it."""
    return float(pattern.fullmatch(completion.strip()) is not None)


def number(completion: str, record: Mapping[str, Any]) -> float:
    r"""1 for the right number: that in the last \\boxed{}, after the last "####", or else the last one of the text.

    1/2, 0.5 and .50 are one number, and so are 1,000 and 1000. The record's answer is read in the same way.
    """
    got, want = value(completion), value(str(_answer(record)))
    return float(want is not None and got == want)


def value(text: str) -> Fraction | None:
    r"""The number that a text comes to."""
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    for end in (*re.findall(r"\\boxed\{([^{}]*)\}", text)[-1:], *text.rsplit("####", 1)[1:], text):
        if found := re.findall(NUMBER, re.sub(r"(?<!\d)\.(?=\d)", "0.", end)):
            whole, _, below = found[-1].replace(",", "").partition("/")
            return Fraction(whole) / int(below or 1) if below.strip("0") or not below else None
    return None


def python(completion: str, record: Mapping[str, Any]) -> float:
    """1 if the completion's Python code, followed by the record's `tests`, ends without an error.

    The code is what stands in the first ``` fence, or all of it. It runs in a process of its own, in an empty folder,
    for at most 10 seconds, in 512 MiB, with no environment, and without more processes. That keeps accidents away, not
    attacks: it has the user's rights to read files and to use the network.

    Raises:
        ValueError: if the record has no `tests`.
    """
    if "tests" not in record:
        raise ValueError("The reward python needs a field `tests` in the record: code that fails if the answer does.")
    fenced = re.search(r"```(?:python|py)?\n(.*?)(?:```|\Z)", completion, re.DOTALL)
    program = (fenced[1] if fenced else completion) + "\n" + str(record["tests"]) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", LIMITED], cwd=folder, env={}, start_new_session=True, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            child.communicate(program, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        return float(child.returncode == 0)


def _answer(record: Mapping[str, Any]) -> Any:
    if "answer" not in record:
        raise ValueError("The reward needs a field `answer` in the record.")
    return record["answer"]
