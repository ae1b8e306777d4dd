"""Run chat templates in a process of their own: they come with the model, and jinja limits neither time nor memory.

`render` sends a template to that process, which is started at first use, and again if it had to be stopped. The process
runs this file as a script, so the file imports nothing of zoo. A template runs in jinja's sandbox, without access to
files and to Python's objects, with `SECONDS` of time and, on Linux, `MEMORY` bytes.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any


if __name__ == "__main__":
    sys.path += sys.argv[1:]  # where the imports below are found; the process ignores environment variables

import jinja2
import markupsafe
from jinja2 import ext, nodes, sandbox


SECONDS, MEMORY, LONGEST = 10, 2**30, 2**26  # limits: time for a text, memory of the process, bytes of the text
USERS = "\ufdd2"  # a mark in texts; see `zoo.text.tokenizer`
SIZE = struct.Struct("<cQ")  # the head of an answer: its kind, and the number of bytes that follow
TEXT, REFUSED, BROKEN = b"t", b"r", b"b"


class Refused(ValueError):
    """The template refuses these messages."""


class Broken(ValueError):
    """The template has a syntax error."""


def render(template: str, variables: Mapping[str, Any], now: datetime) -> str:
    """Render a template, with `now` as its date and time.

    Raises:
        Broken: the template has a syntax error; the message says which.
        Refused: the template raises an error, or exceeds its time or memory; the message says why.
    """
    return _renderer(pickle.dumps((template, dict(variables), now.isoformat())))


class Renderer:
    """The process that renders, one text at a time: threads wait for each other."""

    def __init__(self):
        self._lock, self._process = threading.Lock(), None

    def __call__(self, request: bytes) -> str:
        with self._lock:
            if self._process and self._process.poll() is not None:
                self._stop()
            process = self._process = self._process or self._start()
            stopped = threading.Event()
            timer = threading.Timer(SECONDS, lambda: (stopped.set(), process.kill()))
            try:
                timer.start()
                process.stdin.write(struct.pack("<Q", len(request)) + request)
                process.stdin.flush()
                kind, size = SIZE.unpack(_read(process.stdout, SIZE.size))
                answer = _read(process.stdout, min(size, LONGEST)).decode("utf-8", "surrogatepass")
            except (EOFError, BrokenPipeError):
                self._stop()
                why = f"takes more than {SECONDS} seconds" if stopped.is_set() else "ended the process that it runs in"
                raise Refused(f"it {why}") from None
            except BaseException:  # such as Ctrl-C: the pending answer must not be read as the next request's
                self._stop()
                raise
            finally:
                timer.cancel()
            if stopped.is_set():  # the time ran out just as it answered
                self._stop()
        if kind == TEXT:
            return answer
        raise (Refused if kind == REFUSED else Broken)(answer)

    def _start(self) -> Any:
        places = [str(pathlib.Path(package.__path__[0]).parent) for package in (jinja2, markupsafe)]
        names = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT")
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, *places],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env={name: os.environ[name] for name in names if name in os.environ},
        )  # fmt: skip
        if process.stdout is None or process.stdout.read(1) != TEXT:
            raise RuntimeError(f"The process for chat templates does not start: {sys.executable} -I {__file__}")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process:
            process.kill()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()

    def close(self) -> None:
        with self._lock:
            self._stop()


def _read(stream: IO[bytes], size: int) -> bytes:
    """Read `size` bytes. Raises EOFError if there are fewer."""
    read = stream.read(size)
    if len(read) < size:
        raise EOFError
    return read


# ======================================================================================================================
# The process.
# ======================================================================================================================


class _Generation(ext.Extension):
    """{% generation %}...{% endgeneration %}: its body, between the variables generation_open and generation_close."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(f"generation_{side}", "load")]) for side in ("open", "close"))
        # A scope of its own, so that a {% set %} inside has no effect outside.
        return nodes.Scope([start, *body, end], lineno=line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replace jinja's filter `tojson` by one with transformers' arguments, which does not escape HTML."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(r"(?<!\\)\\ufdd2", USERS, text) if ensure_ascii else text


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


def _answer(request: bytes) -> tuple[bytes, bytes]:
    try:
        template, variables, now = pickle.loads(request)
        strftime = datetime.fromisoformat(now).strftime
        text = _compiled(template).render(strftime_now=strftime, **variables).encode("utf-8", "surrogatepass")
        if len(text) <= LONGEST:
            return TEXT, text
        return REFUSED, f"its text has more than {LONGEST} bytes".encode()
    except jinja2.TemplateSyntaxError as error:
        return BROKEN, f"at line {error.lineno}: {error}".encode("utf-8", "surrogatepass")
    except MemoryError:
        return REFUSED, f"it needs more than {MEMORY} bytes of memory".encode()
    except Exception as error:  # a template is a program: anything can go wrong in it
        return REFUSED, str(error).encode("utf-8", "surrogatepass")


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits, macOS none for memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers.write(TEXT)  # ready
    answers.flush()
    with contextlib.suppress(EOFError):  # the other process has closed the pipe
        while True:
            (size,) = struct.unpack("<Q", _read(requests, 8))
            kind, answer = _answer(_read(requests, size))
            answers.write(SIZE.pack(kind, len(answer)) + answer)
            answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
else:
    _renderer = Renderer()
    _inherited: list[Renderer] = []  # from the parent of a fork: only the parent may use it

    def _renew() -> None:
        global _renderer
        _inherited.append(_renderer)
        _renderer = Renderer()

    atexit.register(lambda: _renderer.close())
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew)
