"""Runs the commands of every page of the documentation, page after page, in one folder: `python -m tests.documented`.

The commands are the bash blocks of README.md and docs/. They run in one process, as they are written, but made small: a
single step, a few short rows, and the embedded model under the names of larger ones. So each command finds what earlier
ones left, as for a reader who follows the pages. Commands that need other machines or other packages are listed and
skipped. For a command that starts other commands, only the options of the latter are parsed. The commands of
transcripts run exactly as they are written, and their output is compared with the page's (`tests/transcripts.py`). So
is that of requests to servers: by curl, in Python and in a browser.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import uvicorn

from tests.transcripts import PAGES, ROOT, Transcript, files, transcripts
from tests.zoo import browser


LIMIT = 120  # seconds for a command
# The embedded model stands in for these.
LARGE = ("qwen3-0.6b", "qwen3-0.6b-base", "qwen3-embedding-0.6b", "llama3.1-8b")
SHORT = "--seq-len 128 --sample-every 9 --steps 1 --eval-every 9"
SMALL = {
    "train.sft": f"{SHORT} --batch 4",
    "train.pretrain": f"{SHORT} --batch 4",
    "train.dpo": f"{SHORT} --batch 4",
    "train.reward": f"{SHORT} --batch 4",
    "train.classify": f"{SHORT} --batch 4",
    "train.embed": f"{SHORT} --batch 16",
    "train.tiny.pairs": "",
    "train.mine": "",
    "train.distill": f"{SHORT} --batch 4 --max-new-tokens 4",
    "train.grpo": "--seq-len 128 --steps 1 --prompts 2 --group 2 --rollout-batch 4 --max-new-tokens 4",
    "train.environments": "--count 20",
    "train.environments.tiny": "",
    "train.prepare": "--seq-len 128 --workers 1",
    "train.inspect": "",
    "train.report": "",
    "train.compare": "",
    "zoo chat": "--max-new-tokens 2",
    "zoo serve": "--batch 1 --max-tokens 64 --port 0",
    "zoo verify": "--tokens 4",
    "zoo merge": "",
    "zoo to-gguf": "",
}
ELSEWHERE = {
    "python3 -m venv": "CI runs it where it is the first",
    "pip install": "CI installs what is needed",
    "lm_eval": "tests/zoo/test_serve.py runs it where it is installed",
    "python -m zoo chat smollm2-135m-instruct": "it needs a package; tests/zoo/test_gguf.py compares what it answers",
    "python -m zoo evaluate": "tests/zoo/test_evaluation.py evaluates where lm-eval is installed",
    "pytest": "CI runs all of them",
    "python -m tests.": "these write what lies in the repository",
    "python -m train.sft --eval-tasks my_tasks/": "tests/train/test_tasks.py runs it where lm-eval is installed",
    "python -m train.sft --tracker": "tests/train/test_watch.py runs it, with packages that stand in for the trackers'",
    "python -m train.distill --teacher math=": "tests/train/test_on_policy.py has several teachers",
    "python -m zoo merge gpt-oss-20b": "tests/zoo/test_gpt_oss.py saves one in MXFP4",
    "python -m train.plan": "it needs the compilers' wheels; tests/train/test_plan.py",
}
LONG = ("python -m train.sft", "python -m train.dpo", "python -m train.reward")  # transcripts of these take minutes
SERVE = re.compile(r"^python -m zoo (serve [^&\n]*)", flags=re.MULTILINE)
LAUNCHERS = ("gcloud", "xpk", "srun", "n=0; for host in", "for n in")


def commands(page: pathlib.Path) -> list[str]:
    """Returns the lines of a page's bash blocks; a line that ends with a backslash is joined with the next."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def write_data() -> None:
    """Writes the files that the commands read, at the paths that they name."""
    tiny = ROOT / "train" / "tiny"
    chats, pairs = (
        (tiny / f"{name}.jsonl").read_text().splitlines(True)[:24] for name in ("instructions", "preferences")
    )
    shutil.copy(tiny / "instructions.jsonl", "instructions.jsonl")
    for folder in ("chats", "corpus"):
        pathlib.Path(folder).mkdir()
    for name in ("chats.jsonl", "code.jsonl", "chats/train.jsonl", "prompts.jsonl"):
        pathlib.Path(name).write_text("".join(chats))
    pathlib.Path("corpus/text.txt").write_text((ROOT / "README.md").read_text())
    pathlib.Path("pairs.jsonl").write_text("".join(pairs))
    labels = [{"text": "a clean room", "label": "good"}, {"text": "a dirty room", "label": "bad"}]
    pathlib.Path("labels.jsonl").write_text("".join(json.dumps(each) + "\n" for each in labels * 30))
    asked = {"state": "a clean room", "question": {"type": "score", "criteria": ["bad", "good"]}, "answer": 1}
    pathlib.Path("decisions.jsonl").write_text(f"{json.dumps(asked)}\n" * 30)
    groups = [{"anchor": f"the number {n}", "positive": f"number {n}", "negative": [f"{n + 1}"]} for n in range(60)]
    pathlib.Path("texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in groups))
    pathlib.Path("math.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n' * 4)
    for name, code in files(ROOT / "docs" / "agents.md").items():
        pathlib.Path(name).write_text(code)
    pathlib.Path("rewards.py").write_text(
        "polite = lambda text, record: float('please' in text)\nbrief = lambda text, record: -len(text)\n"
    )


def parse(module: str, words: list[str]) -> None:
    """Parses a script's options, and raises SystemExit if they are invalid."""
    import importlib
    import typing

    import tyro

    tyro.cli(typing.get_type_hints(importlib.import_module(module).main)["o"], args=words)


def run(
    module: str, words: list[str], *, typed: Sequence[str] = ("Hello?",), ask: Callable[[int], None] = lambda port: None
) -> str:
    """Runs `python -m module words` in this process, with eight devices if the command uses a mesh.

    Types `typed` as input lines, and calls `ask` with a server's port. Returns the output.
    """
    import pytest
    import rich

    from tests.train.conftest import devices

    lines = iter(typed)

    def read(prompt: str) -> str:
        line = next(lines, None)
        print(prompt + (line or ""))
        if line is None:
            raise EOFError
        return line

    async def start_and_stop(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        await startup(server, sockets)
        port = server.servers[0].sockets[0].getsockname()[1]
        await asyncio.to_thread(ask, port)
        server.should_exit = True

    startup = uvicorn.Server.startup
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the warning that the module was imported before
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr("builtins.input", read)
        if "--mesh" not in words:
            devices(patch, 1)
        patch.setattr(uvicorn.Server, "startup", start_and_stop)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setattr(rich.get_console(), "file", said)
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                if end.code:
                    raise
    return said.getvalue()


@dataclasses.dataclass(frozen=True)
class Example:
    """A request to a server that a page shows with its output: by curl, in Python, or in a browser's console."""

    language: str
    server: tuple[str, ...]  # the arguments of the server that the page starts last above it
    transcript: Transcript

    def ask(self, port: int) -> str:
        """Asks the server on this port, and returns what is printed."""
        base, command = f"http://127.0.0.1:{port}", self.transcript.command
        if self.language == "console":
            _, url, *options = shlex.split(command)
            headers = dict(each.split(": ", 1) for option, each in itertools.pairwise(options) if option == "-H")
            data = next((each.encode() for option, each in itertools.pairwise(options) if option == "-d"), None)
            request = urllib.request.Request(base + urllib.parse.urlsplit(url).path, data, headers)
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                return answer.read().decode()
        if self.language == "js":
            # A browser that is closed may still write to its folder.
            scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            with scratch as folder, browser.Browser(pathlib.Path(folder)) as page:
                page.open(f"{base}/")
                page.wait('document.readyState == "complete"')
                said = "const said = [], console = {log: text => said.push(text)};"
                return page.run(f'(async () => {{ {said} {command} return said.join("\\n"); }})()')
        os.environ |= {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": "any"}
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(command, {})
        return said.getvalue()

    def missing(self) -> str:
        """Returns the name of what the example needs and this machine lacks."""
        if self.language == "js" and browser.COMMAND is None:
            return "Chromium"
        return "openai" if self.language == "python" and importlib.util.find_spec("openai") is None else ""


def examples(page: pathlib.Path) -> list[Example]:
    """Returns the requests of a page. In blocks of Python and JavaScript, their output stands in comments."""
    text, found = (
        page.read_text(),
        [("console", each) for each in transcripts(page) if each.command.startswith("curl ")],
    )
    for block in re.finditer(r"^```(python|js)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        mark = {"python": "# ", "js": "// "}[block[1]]
        shown = tuple(line.removeprefix(mark) for line in block[2].splitlines() if line.startswith(mark))
        if block[1] == "js" or "import openai" in block[2]:
            found.append((block[1], Transcript(page, text.count("\n", 0, block.start(2)), block[2], shown)))
    starts = [(text.count("\n", 0, start.start()), start[1]) for start in SERVE.finditer(text)]
    server = lambda line: tuple(shlex.split([words for at, words in starts if at < line][-1]))
    found.sort(key=lambda each: each[1].line)
    return [Example(language, server(each.line), each) for language, each in found]


def compare_examples(found: Sequence[Example]) -> str:
    """Asks one server all of these requests, in order, and compares what it answers. Returns what was left out, or "".

    Raises:
        AssertionError: if the page's output differs.
    """
    left_out = [f"line {each.transcript.line} needs {name}" for each in found if (name := each.missing())]
    printed: list[str] = []
    # What counts the requests is as shown only after all of them.
    counting = [each for each in found if left_out and "/metrics" in each.transcript.command]
    left_out += [f"line {each.transcript.line} counts them" for each in counting]
    asked = [each for each in found if not each.missing() and each not in counting]
    with optimized():
        run("zoo", [*found[0].server, "--port", "0"], ask=lambda port: printed.extend(e.ask(port) for e in asked))
    for each, answer in zip(asked, printed, strict=True):
        difference = each.transcript.difference(answer)
        assert not difference, f"\n{difference}"
    return "; ".join(left_out)


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """Compiles with all optimizations: without them, numbers differ from users'."""
    import jax

    hurry = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", hurry)


def compare(transcript: Transcript) -> str:
    """Runs the command of a transcript and compares the output. Returns the reason if the command was skipped, else "".

    Raises:
        AssertionError: if the page's output differs.
    """
    if transcript.command.startswith(LONG):
        return "it takes minutes; CONTRIBUTING.md says how to compare it"
    typed = [line.removeprefix("> ") for line in transcript.shown if line.startswith("> ")]
    with optimized():
        match shlex.split(transcript.command):
            case ["python", "-m", "zoo", *words]:
                printed = run("zoo", words, typed=typed)
            case ["python", "-m", module, *words]:
                printed = run(module, words)
            case _:
                raise SystemExit("tests/documented.py does not know how to run this.")
    difference = transcript.difference(printed)
    assert not difference, f"\n{difference}"
    return ""


def tasks() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yields every page, command, and function that runs the command."""
    # The README starts with this command, in the block that also sets up an environment.
    yield "README.md", "python -m train.sft", lambda: do("python -m train.sft")
    for page in PAGES:
        for command in commands(page):
            yield page.name, command, functools.partial(do, command)
        for server, found in itertools.groupby(examples(page), key=lambda example: example.server):
            some = list(found)
            name = f"{len(some)} requests to zoo {shlex.join(server)}"
            yield f"{page.name}:{some[0].transcript.line}", name, functools.partial(compare_examples, some)
        for transcript in transcripts(page):
            if transcript.command.startswith("curl "):
                continue  # an example
            yield f"{page.name}:{transcript.line}", transcript.command, functools.partial(compare, transcript)


def too_long(*_: Any) -> NoReturn:
    raise TimeoutError(f"It has taken more than {LIMIT} s.")


def do(command: str) -> str:
    """Runs one command. Returns the reason if the command was skipped or only parsed, else "".

    Raises:
        Exception, SystemExit: as the command ends.
    """
    import tyro

    from train.run.launcher import LaunchOptions

    for start, why in ELSEWHERE.items():
        if command.startswith(start):
            return why
    if command.startswith("python -m train.launch "):
        mine, _, theirs = command.partition(" -- ")
        tyro.cli(LaunchOptions, args=shlex.split(mine)[3:])
        _, _, module, *words = shlex.split(theirs)
        parse(module, words)
        return "it starts other processes: only its options were read"
    if command.startswith(LAUNCHERS):
        ((module, words),) = re.findall(r'python -m (train\.\w+) ([^"]*?)(?: &.*|".*)?$', command)
        parse(module, [re.sub(r"\$\w+", "0", word) for word in shlex.split(words)])
        return "it starts other processes: only its options were read"
    words = shlex.split(command.removesuffix("&"), comments=True)
    match words:
        case ["python", "-m", "zoo", kind, *rest] if f"zoo {kind}" in SMALL:
            run("zoo", [kind, *rest, *SMALL[f"zoo {kind}"].split()])
        case ["python", "-m", module, *rest] if module in SMALL:
            tools = {"--environment", "tools.jinja"} & {*rest}  # their descriptions are long
            small = SMALL[module].replace("128", "400") if tools else SMALL[module]
            run(module, [*rest, *small.split()])
        case _:
            raise SystemExit("tests/documented.py does not know how to run this.")
    return ""


def main() -> int:
    from tests import hurry

    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TPU_LOG_DIR": "disabled", "COLUMNS": "200"}
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {hurry.FLAGS}"
    import jax

    import zoo
    from tests import compiled
    from zoo import registry

    jax.config.update("jax_disable_most_optimizations", hurry.HURRY)
    registry.CONFIGS |= dict.fromkeys(LARGE, zoo.config("tiny"))
    registry.EMBEDDED |= dict.fromkeys(LARGE, registry.EMBEDDED["tiny"])
    signal.signal(signal.SIGALRM, too_long)
    work, before, failed = tempfile.mkdtemp(), os.getcwd(), 0
    os.chdir(work)
    try:
        jax.config.update("jax_compilation_cache_dir", str(compiled.folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        write_data()
        for place, command, act in tasks():
            started, end = time.monotonic(), ""
            signal.alarm(LIMIT)
            try:
                end = act()
                mark = "only" if end else "ok"
            except (Exception, SystemExit) as error:
                mark, end, failed = "FAILED", f"{type(error).__name__}: {error}", failed + 1
            print(
                f"{mark:7}{time.monotonic() - started:5.1f} s  {place}: {command}" + f"\n        {end}" * bool(end),
                flush=True,
            )
    finally:
        signal.alarm(0)
        os.chdir(before)
        shutil.rmtree(work)
    print(f"{failed} failed.")
    return failed


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # before the folder that commands run in
    sys.exit(main() > 0)
