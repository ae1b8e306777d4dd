"""Environments in processes of their own (`train.methods.host`), and the journal of their answers."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self

from train.base.options import Group, OptionGroup, option
from train.methods import host


GRACE = 5.0  # seconds that a process has beyond its limit of time, before it is ended
FOLDER = pathlib.Path(__file__).parents[1] / "environments"
# The classes in FOLDER/NAME.py.
BUILT_IN = {"calculator": "Calculator", "python": "Python", "guess": "Guess", "search": "Search"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(OptionGroup):
    """Options for trajectories of several turns."""

    help_group: ClassVar[Group] = Group.METHOD

    environment: str | None = None
    """Environment of the model, instead of --reward: a class of yours, file.py:Class, or calculator, python, guess or
    search. Its methods are tools that the model may call, and it gives the reward. Or a function that drives the
    conversation, file.py:function (docs/agents.md)."""
    turns: int = 8
    """Largest number of replies of the model in a trajectory."""
    tool_seconds: float = option(30.0, rare=True)
    """Seconds for a call of the environment. After that the model sees an error."""
    tool_output: int = option(4096, rare=True)
    """Largest number of characters of a tool's result."""
    credit: Literal["trajectory", "turn"] = option("trajectory", rare=True)
    """Rewards that a turn's tokens learn from. trajectory: all of the conversation's. turn: its own and those of later
    turns, compared with the same turn of the group's others (docs/agents.md)."""
    past: Literal["split", "refuse"] = option("split", rare=True)
    """Action where the chat template writes past turns anew, such as without their reasoning. split: the trajectory is
    learnt in several texts, each as the model saw it. refuse: the run ends."""


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to a request: a `value`, or an `error`. `lost`: the environment is no more."""

    value: Any = None
    error: str | None = None
    lost: bool = False


class Host:
    """The process that starts environments. `tools` are the JSON schemas of the class's tools, None if it has none.

    `replies` says whether the class has a method `reply`, `scores` whether it has `turn_reward`, and `drives` whether
    it is a function instead of a class.

    Args:
        name: file.py:Class, file.py:function, or one of `BUILT_IN`.
        seconds: the largest time of a call.
        most: the largest number of characters of a result.

    Raises:
        ValueError: there is no such class, or it is no environment.
        OSError: this system has no processes that fork.
    """

    def __init__(self, name: str, seconds: float, most: int):
        if not hasattr(os, "fork"):
            raise OSError("--environment needs a system whose processes can fork, such as Linux.")
        path = f"{FOLDER / name}.py:{BUILT_IN[name]}" if name in BUILT_IN else name
        self.hash = hashlib.sha256(_content(path) + path.encode()).hexdigest()  # of the file as it is now
        self._seconds, self._most, self._lock = seconds, 8 * most + 2**20, threading.Lock()
        self._control, theirs = socket.socketpair()
        script, number = host.__file__, theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, script, path, str(seconds), str(most), str(number)], pass_fds=[number],
            env=os.environ | {"PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        try:
            about: dict[str, Any] = json.loads(host.receive(self._control))
        except ConnectionError as error:
            about = {"error": str(error)}
        if "error" in about:
            self.close()
            raise ValueError(f"--environment {name}: {about['error']}.")
        self.tools: list[dict[str, Any]] | None = about["tools"] or None
        self.replies: bool = about["replies"]
        self.drives: bool = about["drives"]
        self.scores: bool = about["scores"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, and all environments."""
        self._control.close()
        self._process.wait()

    def start(self) -> "Process":
        """Starts an environment."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self._seconds + GRACE)
        with self._lock, theirs:
            socket.send_fds(self._control, [host.NUMBER.pack(0)], [theirs.fileno()])
        return Process(ours, host.NUMBER.unpack(host.receive(ours))[0], self._most, self._end)

    def _end(self, pid: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(host.NUMBER.pack(pid))


def _json(value: Any) -> str:
    """Returns a value as JSON; arrays as lists, and anything else that JSON lacks as a text."""
    return json.dumps(value, default=lambda each: getattr(each, "tolist", each.__str__)())


def _content(name: str) -> bytes:
    """Returns the content of the file in file.py:NAME; nothing if there is none, which the process reports."""
    path = pathlib.Path(name.rpartition(":")[0])
    return path.read_bytes() if path.is_file() else b""


@dataclasses.dataclass
class Process:
    """The process of one environment."""

    connection: socket.socket
    pid: int
    most: int  # bytes of an answer
    close: Callable[[int], None]

    def ask(self, request: Sequence[Any]) -> Response:
        """Returns the answer to a request. If there is none in time, the process is ended."""
        try:
            host.send(self.connection, _json(request).encode())
            return Response(**json.loads(host.receive(self.connection, self.most)))
        except OSError as error:  # TimeoutError and ConnectionError are such
            self.end()
            why = "it ended or" if isinstance(error, ConnectionError) else "it does not"
            return Response(error=f"The environment is lost: {why} answer.", lost=True)

    def end(self) -> None:
        """Ends the process, and all that it has started. Another process may have its number afterwards."""
        if self.connection.fileno() >= 0:
            self.connection.close()
            self.close(self.pid)


class Journal:
    """The answers of environments in a step, in a file that a killed run leaves for the run that goes on.

    An answer is found by a hash of all that led to it, so a run with other tokens finds none. A file of a step is
    `folder`/STEP.jsonl. None: nothing is kept.
    """

    def __init__(self, folder: pathlib.Path | None, step: int):
        self._lock, self._found, self._file = threading.Lock(), {}, None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{step:06}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, KeyError):  # the last line of a killed run may lack its end
                entry = json.loads(line)
                self._found[entry["key"]] = Response(**entry["response"])
        self._file = path.open("a")
        if self._found:
            self._file.write("\n")

    def get(self, key: str) -> Response | None:
        return self._found.get(key)

    def put(self, key: str, response: Response) -> None:
        """Keeps an answer. It is in the file when this returns."""
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps({"key": key, "response": dataclasses.asdict(response)}) + "\n")
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def forget(folder: pathlib.Path, before: int) -> None:
    """Removes the files of a journal of steps before this one."""
    for path in folder.glob("[0-9]*.jsonl"):
        if int(path.stem) < before:
            path.unlink(missing_ok=True)


class Environment:
    """The environment of one trajectory. Its process is started when an answer is not in the journal."""

    def __init__(self, host: Host, journal: Journal, place: Sequence[int]):
        """
        Args:
            place: numbers that identify the trajectory within the step.
        """
        self._host, self._journal, self._place = host, journal, [*place]
        self._process: Process | None = None
        self._asked: list[Sequence[Any]] = []  # all requests, as a process that starts late has to hear them
        self._lost = False
        self.seconds = 0.0  # of all answers

    def ask(self, *request: Any, after: Any) -> Response:
        """Returns the answer to a request, from the journal if that has it. `after`: all that the request follows from,
        such as tokens.
        """
        about = _json([self._host.hash, self._place, len(self._asked), request[0], after])
        key = hashlib.sha256(about.encode()).hexdigest()[:32]
        response = self._journal.get(key)
        if response is None:
            started = time.monotonic()
            response = self._answer(request)
            self.seconds += time.monotonic() - started
            self._journal.put(key, response)
        self._asked.append(request)
        self._lost = response.lost
        return response

    def _answer(self, request: Sequence[Any]) -> Response:
        if self._lost:
            return Response(error="The environment is lost.", lost=True)
        if self._process is None:
            self._process = self._host.start()
            for before in self._asked:
                if self._process.ask(before).lost:
                    break
        return self._process.ask(request)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.end()
