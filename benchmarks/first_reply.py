"""Seconds from the start of a command to a real model's first words: `zoo chat` and `zoo serve`, on a CPU.

    python -m benchmarks.first_reply FOLDER

FOLDER is a model in the Hub's layout with a tokenizer and a chat template, such as SmolLM2-135M-Instruct. Each turn is
a new process. "Cold" means that no compiled program is kept on disk, "kept" that an earlier process has left its own.
transformers does the same in a script that loads the folder and generates. Greedy replies to one question.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import tyro

from benchmarks.common import alternate, ratios, report


QUESTION = "What is the capital of France?"
STORY = "Tell me a long story about a cat."
THEIRS = """
import sys, torch, transformers
folder, new, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
chat = [{"role": "user", "content": sys.argv[4]}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**inputs, max_new_tokens=new, do_sample=False)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""


@dataclasses.dataclass
class Clock:
    """Wall and CPU seconds of child processes since it was made."""

    began: float = dataclasses.field(default_factory=time.perf_counter)
    before: float = dataclasses.field(default_factory=lambda: _cpu())

    def wall(self) -> float:
        return time.perf_counter() - self.began

    def cpu(self) -> float:
        """Returns those of processes that have ended."""
        return _cpu() - self.before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(programs: str) -> dict[str, str]:
    """Returns the environment of a command whose compiled programs lie in a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return kept | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": programs, "COLUMNS": "1000", "PYTHONUNBUFFERED": "1"}


def chat(folder: str, options: list[str], programs: str) -> dict[str, float]:
    """Asks `zoo chat` one question. The first word is there as soon as anything follows the prompt."""
    clock = Clock()
    command = [sys.executable, "-m", "zoo", "chat", folder, "--temperature", "0", "--max-new-tokens", "64", *options]
    with subprocess.Popen(
        command, env=_environment(programs), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write(f"{QUESTION}\n".encode())
        process.stdin.close()
        said = b""
        while not said.endswith(b"> "):
            said += _one(process.stdout)
        ready = clock.wall()
        _one(process.stdout)
        first = clock.wall()
        process.stdout.read()
    return {
        "until it asks, s": ready,
        "until the first word, s": first,
        "all, s": clock.wall(),
        "all, CPU s": clock.cpu(),
    }


def _one(pipe: Any) -> bytes:
    if not (byte := pipe.read(1)):
        raise RuntimeError("The command ended without an answer; run it by hand.")
    return byte


def serve(folder: str, options: list[str], programs: str) -> dict[str, float]:
    """Asks `zoo serve` four times, one after the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clock, times = Clock(), {}
    command = [sys.executable, "-m", "zoo", "serve", folder, "--port", str(port), *options]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, env=_environment(programs), **quiet)
    try:
        while not _is_up(port):
            if process.poll() is not None:
                raise RuntimeError("The server ended; run it by hand.")
            time.sleep(0.02)
        times["until it serves, s"] = clock.wall()
        for name, question, new in (
            ("first reply of 8 tokens, s", QUESTION, 8),
            ("second, s", QUESTION, 8),
            ("reply of 64 tokens, s", STORY, 64),
        ):
            began = time.perf_counter()
            _ask(port, folder, question, new)
            times[name] = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()
    return times | {"until the first reply, s": times["until it serves, s"] + times["first reply of 8 tokens, s"]}


def _is_up(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
        return True
    return False


def _ask(port: int, model: str, question: str, new: int) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": new, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def transformers(folder: str, new: int, dtype: str) -> dict[str, float]:
    """Loads a model and generates by transformers."""
    clock = Clock()
    command = [sys.executable, "-c", THEIRS, folder, str(new), dtype, QUESTION]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    name = "until the first word, s" if new == 1 else "all, s"
    return {name: clock.wall(), "all, CPU s": clock.cpu()}


@contextlib.contextmanager
def _programs() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def main(
    folder: Annotated[str, tyro.conf.Positional], rounds: int = 3, dtypes: tuple[str, ...] = ("auto", "bfloat16")
) -> None:
    """Measures `zoo chat`, `zoo serve` and transformers, in turns.

    Args:
        folder: a model in the Hub's layout, with a tokenizer and a chat template.
        rounds: rounds in which all take turns.
        dtypes: values of --dtype, each a contestant.
    """
    folder = str(pathlib.Path(folder).expanduser().resolve())

    def cold(run: Any, options: list[str]) -> dict[str, float]:
        with _programs() as programs:
            return run(folder, options, programs)

    with contextlib.ExitStack() as stack:
        turns: dict[str, Any] = {}
        for dtype in dtypes:
            kept, options = stack.enter_context(_programs()), ["--dtype", dtype]
            for name, run in (("chat", chat), ("serve", serve)):
                run(folder, options, kept)
                turns[f"{name}, {dtype}, cold"] = lambda run=run, options=options: cold(run, options)
                turns[f"{name}, {dtype}, kept"] = lambda run=run, options=options, kept=kept: run(folder, options, kept)
        turns["transformers, 1 token"] = lambda: transformers(folder, 1, "auto")
        turns["transformers, 64 tokens"] = lambda: transformers(folder, 64, "auto")
        taken = alternate(turns, rounds)
    results: dict[str, Mapping[str, list[float]]] = {
        who: {name: [turn[name] for turn in found] for name in found[0]} for who, found in taken.items()
    }
    theirs = results["transformers, 1 token"]["until the first word, s"]
    for who in results:
        for name in ("until the first word, s", "until the first reply, s"):
            if name in results[who]:
                results[who] = {**results[who], "that / transformers' 1 token": ratios(results[who][name], theirs)}
    report("first_reply", "cpu", {"model": pathlib.Path(folder).name, "rounds": rounds}, results)


if __name__ == "__main__":
    tyro.cli(main)
