"""Rewards of completions, for reinforcement learning: functions of a completion's text and of its record's fields.

    def reward(completion: str, record: Mapping[str, Any]) -> float: ...

`find` returns the rewards below by name, and loads others from the user's files.
"""

import functools
import json
import pathlib
import re
import secrets
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Any

from train.data import confine, fair, functions


Reward = Callable[[str, Mapping[str, Any]], float]


class BadRecord(ValueError):
    """An error for a record without a field that a reward needs. After any other error the completion gets 0."""


SECONDS, BYTES = 10, 2**29  # largest time and memory of a program
# Runs the code and then its tests. If both run to their ends, it writes the secret from its standard input to
# descriptor argv[1]. The code shares the process, so the secret has no name: it stays on the interpreter's stack,
# beside the iterators that run both parts. GUARD blocks Python's ways to read that stack, and cannot be reached itself.
PROGRAM = """
import builtins, json, os
def parts():
    source, completion, tests = json.load(open(0))
    space = {"__name__": "fair", "__builtins__": dict(vars(builtins))}  # which the code cannot change
    exec(source, space)
    return compile(completion, "completion", "exec"), space["fair"](tests)
os.write(int(sys.argv[1]), (os.read(0, 32), *map(exec, parts(), [{"__name__": "__main__"}] * 2))[0])
"""
# Audit events to refuse, by the beginnings of their names. GUARD also refuses modules that read any address. If the
# system forbids the same, this only makes the error clearer; on other systems it is the only protection.
DENIED = (
    "subprocess", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.kill", "signal.pthread_kill",
    "resource.prlimit", "socket.connect", "socket.bind", "socket.send", "socket.getaddrinfo", "socket.gethostby",
    "gc.", "sys.settrace", "sys._current_frames", "ctypes.",
)  # fmt: skip
NATIVE = ("ctypes", "_ctypes", "_cffi_backend")
GUARD = f"""
import sys
def refuse(event, args, *, denied={DENIED}, native={NATIVE}, error=PermissionError, absent=ImportError):
    if event.startswith(denied):
        raise error(event)
    if event == "import" and args[0].rpartition(".")[2] in native:
        raise absent(args[0] + " is not allowed here")
sys.addaudithook(refuse)
del refuse
"""
DIGITS = 4000  # largest number of characters in a number; Python reads no integer of more than 4,300 digits
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?"


def find(name: str) -> Reward:
    """Returns the reward with a name: exact, number, python, regex:PATTERN, or file.py:function.

    Raises:
        ValueError: there is no such reward.
        OSError: the file cannot be read.
        RuntimeError: this system cannot run programs for the reward `python`.
    """
    known: dict[str, Reward] = {"exact": exact, "number": number, "python": python}
    if name == "python":
        if lacking := confine.missing():
            warnings.warn(
                f"--reward python: this system cannot forbid {', '.join(lacking)}. See docs/grpo.md.", stacklevel=2
            )
        if not python("", {"tests": ""}):
            raise RuntimeError("The reward python cannot run programs on this system: an empty one fails.")
    if name in known:
        return known[name]
    kind, _, rest = name.partition(":")
    if kind == "regex":
        try:
            return functools.partial(matches, pattern=re.compile(rest))
        except re.error as error:
            raise ValueError(f"{name!r} is no pattern: {error}.") from error
    if not name.rpartition(":")[0].endswith(".py"):
        raise ValueError(
            f"{name!r} is no reward: it is {', '.join(known)}, regex:PATTERN, file.py:function or model:FOLDER."
        )
    return functions.load(name)


def exact(completion: str, record: Mapping[str, Any]) -> float:
    """Returns 1 if the completion is the record's answer, ignoring white space around both, and else 0."""
    return float(completion.strip() == str(_answer(record)).strip())


def matches(completion: str, record: Mapping[str, Any], *, pattern: re.Pattern[str]) -> float:
    """Returns 1 if the pattern matches the whole completion, ignoring white space around it, and else 0."""
    return float(pattern.fullmatch(completion.strip()) is not None)


def number(completion: str, record: Mapping[str, Any]) -> float:
    r"""Returns 1 if the completion's number is the record's answer, and else 0. Both numbers are read by `value`.

    1/2, 0.5 and .50 are one number, and so are 1,000 and 1000.
    """
    got, want = value(completion), value(str(_answer(record)))
    return float(want is not None and got == want)


def value(text: str) -> Fraction | None:
    r"""Returns the number that a text gives as its answer.

    It is the last number in the last \\boxed{}, or else after the last "####", or else in the text. Returns None if
    there is no number, one of more than 4,000 characters, or one with the denominator 0.
    """
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    for end in (*re.findall(r"\\boxed\{([^{}]*)\}", text)[-1:], *text.rsplit("####", 1)[1:], text):
        if found := re.findall(NUMBER, re.sub(r"(?<!\d)\.(?=\d)", "0.", end)):
            if len(found[-1]) > DIGITS:
                return None
            whole, _, below = found[-1].replace(",", "").partition("/")
            return Fraction(whole) / int(below or 1) if below.strip("0") or not below else None
    return None


# The answer that a reward reads of a completion, by which completions vote; None: there is none.
ANSWERS: dict[str, Callable[[str], Hashable]] = {"number": value, "exact": str.strip}


def python(completion: str, record: Mapping[str, Any]) -> float:
    """Returns 1 if the completion's Python code, and then the record's `tests`, run to their ends in one process.

    The code is the content of the first ``` fence, or the whole completion. An exit before the end earns 0, whatever
    its status; so tests must not exit either, as `unittest.main()` does. The process has 10 seconds, 512 MiB, an empty
    folder and no environment. The interpreter refuses new processes, signals and connections. Linux forbids these and
    access to the user's files: see `train.data.confine`. Comparisons in the tests are those of `train.data.fair`, so an
    object that equals all others earns nothing. Code can still find other ways to pass tests without a solution, since
    both share the process.

    Raises:
        BadRecord: the record has no `tests`.
    """
    if "tests" not in record:
        raise BadRecord("The reward python needs a field `tests` in the record: code that fails if the answer does.")
    fenced = re.search(r"```(?:python|py)?\n(.*?)(?:```|\Z)", completion, re.DOTALL)
    source = pathlib.Path(fair.__file__).read_text(encoding="utf-8")
    parts = source, fenced[1] if fenced else completion, str(record["tests"])
    secret = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as verdict:
        told = verdict.fileno()
        limits = confine.__file__, folder, str(SECONDS), str(BYTES)
        child = subprocess.Popen(
            [sys.executable, "-I", *limits, "-c", GUARD + PROGRAM, str(told)], cwd=folder, env={}, pass_fds=[told],
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            child.communicate(secret + json.dumps(parts).encode(), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return 0.0
        finally:
            child.kill()
            child.communicate()
        verdict.seek(0)
        return float(verdict.read() == secret)


def _answer(record: Mapping[str, Any]) -> Any:
    if "answer" not in record:
        raise BadRecord("The reward needs a field `answer` in the record.")
    return record["answer"]
