"""A script that hosts environments: `python host.py FILE.py:CLASS SECONDS CHARACTERS DESCRIPTOR`.

It imports the file once, and sends over the socket with that descriptor a description of the class: its tools as JSON
schemas. A function may stand in the place of the class (`Episode`). Then each message with another socket starts an
environment in a process of its own, by a fork, which answers requests over that socket. A message with a process number
ends that process, and all that it has started. When the socket closes, all are ended.

So an environment that hangs, forks, floods its output or dies harms no other, and nothing of the user's is imported
where the model is. The script needs the standard library alone.
"""

import asyncio
import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import math
import numbers
import os
import pathlib
import random
import re
import signal
import socket
import struct
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any


Function = Callable[["Episode", Mapping[str, Any]], Coroutine[None, None, float]]  # `rollout(episode, record)`
SIZE, NUMBER = struct.Struct("<I"), struct.Struct("<q")
OWN = ("reset", "reply", "reward", "turn_reward")  # methods that are no tools
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


# ======================================================================================================================
# Messages over a socket: the number of their bytes, and the bytes.
# ======================================================================================================================


def send(connection: socket.socket, data: bytes) -> None:
    """Sends one message."""
    connection.sendall(SIZE.pack(len(data)) + data)


def receive(connection: socket.socket, most: int = 2**31) -> bytes:
    """Receives one message.

    Raises:
        ConnectionError: the other end is closed, or the message has more than `most` bytes.
    """
    size = SIZE.unpack(_bytes(connection, SIZE.size))[0]
    if size > most:
        raise ConnectionError(f"a message has {size:,} bytes")
    return _bytes(connection, size)


def _bytes(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := connection.recv(min(size - len(found), 2**20))):
            raise ConnectionError("the other end is closed")
        found += part
    return found


# ======================================================================================================================
# The description of a class, or of a function.
# ======================================================================================================================


def load(name: str) -> type | Function:
    """Imports the class, or the function, that FILE.py:NAME names.

    Raises:
        ValueError: there is no such class, it has no `reset` or no `reward`, or the function is not `async def`.
    """
    path, _, of = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"environment_{pathlib.Path(path).stem}", path)
    if not spec or not spec.loader or not pathlib.Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, of, None)
    if inspect.isfunction(found) and not inspect.iscoroutinefunction(found):
        raise ValueError(f"the function {of} is not `async def`")
    if inspect.isfunction(found):
        return found
    if not isinstance(found, type):
        raise ValueError(f"{path} has no class {of}, and no function of that name")
    if lacking := [method for method in ("reset", "reward") if not callable(getattr(found, method, None))]:
        raise ValueError(f"the class {of} has no method `{lacking[0]}`")
    return found


def describe(environment: type | Function) -> dict[str, Any]:
    """Describes a class: the JSON schemas of its `tools`, and whether it `replies` to answers and `scores` turns; or a
    function, which `drives`, with the `tools` that are its attribute.
    """
    if not isinstance(environment, type):
        tools = vars(environment).get("tools", ())
        described = [dict(each) if isinstance(each, Mapping) else schema(each.__name__, each) for each in tools]
        return {"tools": described, "replies": False, "scores": False, "drives": True}
    methods = {name: each for kind in reversed(environment.__mro__) for name, each in vars(kind).items()}
    tools = [name for name, each in methods.items() if inspect.isfunction(each) and name[0] != "_" and name not in OWN]
    described = [schema(name, methods[name]) for name in tools]
    has = {"replies": "reply" in methods, "scores": "turn_reward" in methods}
    return {"tools": described, **has, "drives": False}


def schema(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Describes a method or a function as a tool, in the form that chat templates take, by its types and its docstring.

    Raises:
        ValueError: the method lacks a docstring or the type of an argument, or a type has no form in JSON.
    """
    doc, hints = inspect.getdoc(method), typing.get_type_hints(method)
    if not doc:
        raise ValueError(f"the tool {name} has no docstring, which tells the model what it is for")
    about, properties, required = _arguments(doc), {}, []
    for each in (each for each in inspect.signature(method).parameters.values() if each.name != "self"):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY) or each.name not in hints:
            raise ValueError(f"the tool {name} has the argument {each}, which needs a name and a type")
        try:
            properties[each.name] = _schema(hints[each.name])
        except TypeError as error:
            raise ValueError(f"the tool {name} has the argument {each}: {error}") from error
        properties[each.name] |= {"description": about[each.name]} if each.name in about else {}
        required += [each.name] * (each.default is each.empty)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    what = re.split(r"\n\s*\w+:\n", doc)[0].strip()
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


def _arguments(doc: str) -> dict[str, str]:
    """Reads what a docstring says of each argument, below "Args:"."""
    block = re.search(r"^Arg(?:ument)?s:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    lines = re.finditer(r"^(\w+)(?: ?\([^)]*\))?:(.*(?:\n[ \t]+.*)*)", textwrap.dedent(block[1]) if block else "", re.M)
    return {found[1]: " ".join(found[2].split()) for found in lines}


def _schema(hint: Any) -> dict[str, Any]:
    """Returns the JSON schema of a type."""
    origin, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in TYPES:
        return {"type": TYPES[origin]}
    if origin is typing.Literal:
        return {"type": TYPES[type(of[0])], "enum": list(of)}
    if origin in (typing.Union, types.UnionType):
        some = [_schema(each) for each in of if each is not type(None)]
        whole = some[0] if len(some) == 1 else {"anyOf": some}
        return whole | ({"nullable": True} if type(None) in of else {})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"}
    if isinstance(origin, type) and issubclass(origin, Sequence | set) and not issubclass(origin, bytes):
        return {"type": "array"} | ({"items": _schema(of[0])} if of else {})
    raise TypeError(f"{hint} has no form in JSON")


# ======================================================================================================================
# One environment, in its process.
# ======================================================================================================================


class Episode:
    """A conversation that a function drives, `async def rollout(episode, record)`, which returns the reward.

    It is the environment of that function: `reset` and `resume` run the function until it asks for a reply.
    """

    def __init__(self, function: Function):
        self._function = function
        self._chat: list[dict[str, Any]] = []  # up to the last reply
        self._asked: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self._replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def generate(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the model's reply to a chat: a message of the assistant, perhaps with `tool_calls`.

        Raises:
            TypeError: these are no messages.
            asyncio.CancelledError: the conversation has met a limit.
        """
        await self._asked.put([_plain(each) for each in checked_messages(messages, "generate must be given")])
        return await self._replies.get()

    async def reset(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._running = asyncio.ensure_future(self._function(self, record))
        if (asked := await self._next()) is None:
            raise ValueError("the function ended before it called generate")
        self._chat = asked
        return asked

    async def resume(self, reply: dict[str, Any]) -> dict[str, Any] | None:
        """Gives the function a reply. Returns the messages that it asks a reply to, those that are `new` if they go on
        from the reply, else all of another chat; None if it has ended.
        """
        past = [*self._chat, reply]
        await self._replies.put(copy.deepcopy(reply))
        if (asked := await self._next()) is None:
            return None
        goes_on = [*map(_filled, asked[: len(past)])] == [*map(_filled, past)]
        self._chat = asked
        return {"new": asked[len(past) :] if goes_on else asked, "other": not goes_on}

    async def _next(self) -> list[dict[str, Any]] | None:
        """Waits for the function. Returns the messages that it asks a reply to, or None if it has ended."""
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait([asked, self._running], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        await self._running  # raises what the function has raised
        return None

    async def reward(self) -> float:
        """Returns what the function has returned. At a limit it is cancelled, and the reward is 0 if it raises that."""
        self._running.cancel()
        try:
            return await self._running
        except asyncio.CancelledError:
            return 0.0


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as chat templates take it. OpenAI's API has arguments as a text, and None for no content."""
    for call in message.get("tool_calls") or ():
        given = call["function"]["arguments"]
        call["function"]["arguments"] = json.loads(given) if isinstance(given, str) else given
    return message | {"content": message.get("content") or ""}


def _filled(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a message that say something."""
    return {key: value for key, value in message.items() if value}


def serve(connection: socket.socket, make: Callable[[], Any], seconds: float, most: int) -> None:
    """Answers requests until the socket closes: a method of the environment is called, and its result is sent."""
    loop = asyncio.new_event_loop()
    environment: Any = None

    def limited(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            value = method(*arguments, **named)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return loop.run_until_complete(waited(value)) if inspect.isawaitable(value) else value

    async def waited(value: Any) -> Any:
        try:
            return await asyncio.wait_for(value, seconds)
        except TimeoutError as error:
            raise error if str(error) else late()  # noqa: B904 (the model sees the error alone)

    def late(*_: Any) -> TimeoutError:
        return TimeoutError(f"it took more than {seconds:g} seconds")

    def alarm(*_: Any) -> None:
        raise late()

    def answer(kind: str, *arguments: Any) -> Any:
        nonlocal environment
        match kind, *arguments:
            case "reset", record, of_prompt, own:
                seed(of_prompt)
                environment = make()
                value = limited(environment.reset, record)
                seed(own)
                value = [{"role": "user", "content": value}] if isinstance(value, str) else value
                return checked_messages(value, "reset must return a text, or")
            case "tool", name, given:
                value = limited(getattr(environment, name), **given)
                return shortened(value if isinstance(value, str) else json.dumps(value, default=str), most)
            case "resume", reply:
                return limited(environment.resume, reply)
            case "reply", text:
                if (value := limited(environment.reply, text)) is not None and not isinstance(value, str):
                    raise TypeError(f"reply returned a {type(value).__name__}, and must return a text or None")
                return value and shortened(value, most)
            case ("turn_reward",):
                return checked_number(limited(environment.turn_reward))
            case _:
                return checked_number(limited(environment.reward))

    signal.signal(signal.SIGALRM, alarm)
    while True:
        request = json.loads(receive(connection))
        try:
            found = {"value": answer(*request)}
        except BaseException as error:  # of any kind, as the method is the user's: SystemExit, too
            found = {"error": shortened(f"{type(error).__name__}: {error}", most)}
        send(connection, json.dumps(found).encode())


def seed(number: int) -> None:
    """Seeds Python's random numbers, and NumPy's if the environment uses it."""
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


def checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Returns a copy of messages. `where` says in an error whose they are.

    Raises:
        TypeError: they are no messages.
    """
    if not isinstance(value, Sequence) or not value or not all(isinstance(m, Mapping) and "role" in m for m in value):
        raise TypeError(f"{where} a list of messages with a role and a content")
    return json.loads(json.dumps([dict(message) for message in value]))


def checked_number(value: Any) -> float:
    """Returns the number that `reward` has returned.

    Raises:
        TypeError, ValueError: it is no finite number.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"reward returned a {type(value).__name__}, and must return a number")
    if not math.isfinite(value):
        raise ValueError(f"reward is {value}")
    return float(value)


def shortened(text: str, most: int) -> str:
    """Cuts a text after `most` characters, and says so in the text."""
    return text if len(text) <= most else f"{text[:most]}\n... and {len(text) - most:,} more characters"


# ======================================================================================================================
# The host.
# ======================================================================================================================


def host(control: socket.socket, make: Callable[[], Any], seconds: float, most: int) -> None:
    """Starts and ends environments as messages ask, until the socket closes; then ends all that are left."""
    running: set[int] = set()
    try:
        while True:
            data, sent, *_ = socket.recv_fds(control, NUMBER.size, 1)
            data += _bytes(control, NUMBER.size - len(data))
            if not sent:
                end(NUMBER.unpack(data)[0], running)
                continue
            connection = socket.socket(fileno=sent[0])
            if pid := os.fork():
                running.add(pid)
                connection.close()
                continue
            try:
                os.setsid()
                control.close()
                send(connection, NUMBER.pack(os.getpid()))
                serve(connection, make, seconds, most)
            finally:
                os._exit(0)
    except ConnectionError:
        for pid in list(running):
            end(pid, running)


def end(pid: int, running: set[int]) -> None:
    """Ends an environment's process, and all that it has started."""
    if pid not in running:
        return
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    running.discard(pid)


def main() -> None:
    name, seconds, most, descriptor = sys.argv[1:]
    sys.path[0] = os.getcwd()  # as for `python -m`, and not this file's folder
    control = socket.socket(fileno=int(descriptor))
    try:
        found = load(name)
        about = describe(found)
    except BaseException as error:  # raised by the user's code
        send(control, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    send(control, json.dumps(about).encode())
    make = found if isinstance(found, type) else functools.partial(Episode, found)
    host(control, make, float(seconds), int(most))


if __name__ == "__main__":
    main()
