"""Rewards: which answers earn one and which do not, and the end of programs that run wild."""

import builtins
import json
import subprocess
import sys
import types

import pytest

from tests.train import test_data
from tests.train.test_data import CHAT, HEAD
from train.data import confine, fair, rewards
from train.data import prompts as prompts_
from train.data.records import Record


tokenizer = test_data.tokenizer  # a fixture


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Gives programs as long as a busy machine may need, except in tests of their time."""
    monkeypatch.setattr(rewards, "SECONDS", 300)


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
        ("9" * 5000, "9" * 5000, 0),  # Python reads at most 4,300 digits
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
        ("\ud800", 0),
    ],
)
def test_python(completion, worth):
    assert rewards.python(completion, {"tests": "assert double(4) == 8"}) == worth


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import builtins\nbuiltins.exec = lambda *_: None",
        "import sys, builtins\nsys.modules['__main__'].__dict__.update(map=lambda *_: [], exec=print)",
        "tests = '''",  # turns the tests into a string
    ],
)
def test_only_tests_that_end_earn(program):
    """However a program ends, and whatever it redefines, the tests fail or never run."""
    assert rewards.python(program, {"tests": "assert False  # '''"}) == 0


LIAR = """
class Liar(BASE):
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *_: True
    __hash__ = lambda _: 8
    __sub__ = __abs__ = __len__ = __getitem__ = lambda *_: Liar()
    __bool__ = lambda _: True
import builtins
builtins.type = builtins.issubclass = builtins.all = lambda *_: True
double = lambda x: RETURNED
"""


@pytest.mark.parametrize("base", ["object", "int", "list", "dict", "str"])
@pytest.mark.parametrize(
    "returned, tests",
    [
        ("Liar()", "assert double(4) == 8"),
        ("Liar()", "assert 8 == double(4)"),
        ("Liar()", "assert double(4) in [8]"),
        ("Liar()", "assert double(4) > 8"),
        ("[Liar()]", "assert double(4) == [8]"),
        ("{'a': Liar()}", "def check():\n    assert double(4) == {'a': 8}\ncheck()"),
        ("{Liar()}", "assert double(4) == {8}"),
    ],
)
def test_an_object_that_equals_all_others_earns_nothing(base, returned, tests):
    program = LIAR.replace("BASE", base).replace("RETURNED", returned)
    # It runs in this process, which takes no time, so its "builtins" are not the real ones.
    space = {"__name__": "x", "__builtins__": vars(builtins) | {"__import__": lambda *_: types.SimpleNamespace()}}
    exec(program, space)
    with pytest.raises((AssertionError, TypeError)) as end:
        exec(fair.fair(tests), space)
    assert isinstance(end.value, AssertionError) or "order" in str(end.value) or ">" in str(end.value)
    if base == "object":
        exec(tests, space)  # its own methods make it pass


def test_a_liar_in_its_process():
    program = LIAR.replace("BASE", "object").replace("RETURNED", "Liar()")
    assert rewards.python(program, {"tests": "assert double(4) == 8"}) == 0


def test_what_equals_counts():
    """Comparisons in honest tests have the value that Python gives them."""
    tests = """
from collections import Counter, OrderedDict, namedtuple
from fractions import Fraction
P = namedtuple("P", "x y")
assert 1 == 1.0 == True != 2 and 1 < 2 <= 2.0 < 3 and not 1 < 2 < 2
assert Counter("aab") == {"a": 2, "b": 1} and OrderedDict(a=1) == dict(a=1) and P(1, 2) == (1, 2)
assert [1, (2, {"a": [3]})] == [1, (2, {"a": [3]})] != [1, (2, {"a": [4]})] and [1] != (1,) and {1, 2} == {2, 1}
assert {1} == frozenset({1}) and {1} < {1, 2} and [1, 2] < [1, 3] and "a" < "b" and "a" in "cab" and b"a" in b"cab"
assert 1 in {1: 2} and 2 in {1: 2}.values() and 3 in range(5) and 7 not in (1, 2) and None == None is None
assert Fraction(1, 2) == Fraction(2, 4) < Fraction(1) and [Fraction(1, 2)] == [Fraction(1, 2)] and len([1]) == 1
assert [x for x in range(4) if x % 2 == 1] == [1, 3] and (lambda x: x == 1)(1) and str(8) == "8" and type(1) == int
assert float("nan") != float("nan") and not 1 == "1" and [[]] == [[]] and max([1, 2], key=lambda x: x == 1) == 1
"""
    assert rewards.python("pass", {"tests": tests}) == 1


SEARCH = """
import gc, os, sys
found = []

def look(frame):
    while frame:
        found.extend([*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts])
        frame = frame.f_back

look(sys._getframe())
try:
    raise KeyError
except KeyError as error:
    look(error.__traceback__.tb_frame)
try:
    sys.audit("os.system")
except PermissionError as error:  # from within the hook
    look(error.__traceback__.tb_next.tb_frame)
for way in (
    gc.get_objects, lambda: gc.get_referents(sys._getframe(1)), lambda: gc.get_referrers(found), sys._current_frames,
    lambda: __import__("ctypes"), lambda: __import__("_ctypes"), lambda: sys.settrace(print),
    lambda: [open(name, "rb").read() for name in ("/proc/self/mem", "/proc/self/environ", "/proc/self/cmdline")],
    lambda: [os.read(0, 32)],
):
    try:
        found.extend(way())
    except (PermissionError, ImportError, OSError):
        pass
found = [f"{len(v)} bytes" for v in found if isinstance(v, bytes) and len(v) >= 32] + [
    f.__name__ for f in found if callable(f) and getattr(f, "__name__", "") == "refuse"]
assert not found, found
"""


def test_programs_cannot_find_the_secret():
    """Programs find the secret neither in frames, the collector's lists, their own memory, nor where it was sent."""
    assert rewards.python(SEARCH, {"tests": ""}) == 1
    assert rewards.python("secret = bytes(32)\n" + SEARCH, {"tests": ""}) == 0  # under a name it is found


# Actions that programs must not do, also to other processes of the same user. It bypasses Python's own checks.
DO = """
import os, resource, socket, threading
from multiprocessing.util import spawnv_passfds
ways = {
    "environment": lambda: open("/proc/PID/environ").read(), "memory": lambda: open("/proc/PID/mem"),
    "by a link": lambda: (os.symlink("/proc/PID/environ", "link"), open("link").read()),
    "home": lambda: os.listdir("HOME"), "write": lambda: open("HOME/x", "w"),
    "signal": lambda: os.kill(PID, 0), "group": lambda: os.killpg(PID, 0), "session": os.setsid,
    "limits": lambda: resource.prlimit(PID, resource.RLIMIT_CPU), "cores": lambda: os.sched_setaffinity(PID, [0]),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, PID, 19), "fork": os.fork,
    "spawn": lambda: spawnv_passfds(b"/bin/true", [b"x"], ()),
    "network": lambda: socket.socket(), "datagrams": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "local": lambda: socket.socket(socket.AF_UNIX),
}
done = []
for name, way in ways.items():
    try:
        way()
        done.append(name)
    except (PermissionError, BlockingIOError):
        pass
threading.Thread(target=print).start()  # is allowed
"""


@pytest.mark.skipif(bool(confine.missing()), reason="this system cannot forbid it")
def test_programs_are_confined(tmp_path):
    (tmp_path / "token").write_text("secret")
    with subprocess.Popen(["sleep", "60"], env={"HF_TOKEN": "secret"}, start_new_session=True) as other:
        program = DO.replace("PID", str(other.pid)).replace("HOME", str(tmp_path))
        assert rewards.python(program, {"tests": "assert not done, done"}) == 1
        # Without the system's help the same program can do everything that the interpreter alone does not refuse.
        command = [sys.executable, "-I", "-c", program + "print(*done)"]
        alone = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        other.kill()
    assert {"environment", "home", "limits", "network", "spawn"} <= set(alone.stdout.split()), alone.stderr


def test_no_process_outlives_its_time(monkeypatch):
    """A program that runs too long also cannot fill memory or disks through the file that reports the tests' end."""
    monkeypatch.setattr(rewards, "SECONDS", 1)
    program = (
        "import os, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: os.setsid()\nexcept OSError: pass\n"
        "while True:\n    try: os.write(int(sys.argv[1]), bytes(2**19))\n    except OSError: pass"
    )
    children = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: children.append(popen(*args, **kw)) or children[-1])
    assert rewards.python(program, {"tests": ""}) == 0
    assert children[0].returncode == -9


def test_systems_that_cannot_forbid_say_so(monkeypatch):
    monkeypatch.setattr(confine, "missing", lambda: ["the network"])
    with pytest.warns(UserWarning, match="this system cannot forbid the network"):
        assert rewards.find("python") is rewards.python
    monkeypatch.setattr(confine, "missing", list)
    monkeypatch.setattr(rewards, "BYTES", 2**20)
    with pytest.raises(RuntimeError, match="cannot run programs on this system"):
        rewards.find("python")


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_programs_have_no_more_than_their_time(program, monkeypatch):
    monkeypatch.setattr(rewards, "SECONDS", 1)
    assert rewards.python(program, {"tests": ""}) == 0


@pytest.mark.parametrize(
    "program",
    [
        "hoard = bytearray(2**30)",
        "open('large', 'wb').write(bytes(2**21))",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.fork()",
        "input()",
    ],
)
def test_programs_are_held_in(program):
    """Programs are stopped by limits on their requests, not by their time."""
    assert rewards.python(program, {"tests": ""}) == 0


def test_programs_see_no_secrets(monkeypatch):
    """Programs see neither variables nor files: they start without any, in an empty folder where they may write."""
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
        ("exakt", ValueError, r"'exakt' is no reward: it is exact, number, python, regex:PATTERN, file\.py:function"),
        (f"{file}:short", ValueError, r"mine\.py has no function 'short'"),
        (f"{tmp_path}/yours.py:brief", FileNotFoundError, r"There is no .*yours\.py"),
        ("regex:(", ValueError, r"'regex:\(' is no pattern"),
    ):
        with pytest.raises(error, match=words):
            rewards.find(name)


# ======================================================================================================================
# The records that rewards get.
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
    prompt = prompts_.encode(Record("here", fields), tokenizer)
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
        prompts_.encode(Record("data.jsonl, line 3", fields), tokenizer)
