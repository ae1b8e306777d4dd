"""The command `zoo` forwards to the modules."""

import dataclasses
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib
from typing import ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zoo
from train import __main__ as command
from train import completion
from train.base.command import CommandOptions
from train.base.command import command as command_line


ROOT = pathlib.Path(__file__).parents[2]


def test_every_script_is_a_command():
    scripts = {path.stem for path in (ROOT / "train").glob("*.py") if "__main__" in path.read_text()} - {"__main__"}
    theirs = re.findall(r'^ +"([a-z-]+)": \w+,$', (ROOT / "zoo/__main__.py").read_text(), re.M)
    assert {module for module, _ in command.COMMANDS.values()} == {"zoo", *(f"train.{name}" for name in scripts)}
    assert {name for name, (module, _) in command.COMMANDS.items() if module == "zoo"} == set(theirs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"zoo": "train.__main__:main"}


@pytest.mark.parametrize("words, module, left", [
    (["sft", "--steps", "3"], "train.sft", ["--steps", "3"]),
    (["chat", "tiny"], "zoo", ["chat", "tiny"]),
])  # fmt: skip
def test_forwards(monkeypatch, words, module, left):
    calls = []
    monkeypatch.setattr(sys, "argv", ["zoo", *words])
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: calls.append((name, sys.argv[1:])))
    command.main()
    assert calls == [(module, left)]


def test_help_and_unknown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zoo"])
    command.main()
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in command.COMMANDS)
    monkeypatch.setattr(sys, "argv", ["zoo", "tune"])
    with pytest.raises(SystemExit, match=r"There is no command 'tune': give one of chat, serve"):
        command.main()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # that other tests have imported these modules
def test_completion(monkeypatch, tmp_path, capsys):
    """Bash completes commands, and the options of each; where no option begins, it completes files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # as in `tests.train.conftest.command`
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(completion, "COMMANDS", {name: command.COMMANDS[name] for name in ("report", "mine")})
    completion.main("bash")
    (tmp_path / "zoo").write_text(capsys.readouterr().out)

    def completed(*words):
        lines = [f"source {tmp_path / 'zoo'}", f"COMP_WORDS=({' '.join(words)} '')", f"COMP_CWORD={len(words) - 1}"]
        lines += ["_zoo", 'echo "${COMPREPLY[@]}"']
        return subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
        ).stdout.split()

    assert completed("zoo", "re") == ["report"]
    assert completed("zoo", "mine", "--ma") == ["--margin"] and completed("zoo", "report", "--ma") == []
    assert completed("zoo", "mine", "tex") == []
    monkeypatch.setattr(completion, "COMMANDS", {})
    completion.main("zsh")
    assert capsys.readouterr().out.startswith("autoload")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    name: ClassVar[str] = "test"
    out: pathlib.Path
    """Folder."""


def rank_of_another(_):
    place = NamedSharding(jax.make_mesh((1,), ("a",)), PartitionSpec(None, "a"))
    jax.device_put(np.ones(3), place)


def within_jit(_):
    jax.jit(lambda x: x @ np.ones((5, 5)))(np.ones((2, 3)))


def ours(_):
    zoo.make_mesh("nonsense=1")


@pytest.mark.parametrize("main", [rank_of_another, within_jit, ours])
def test_errors_out_of_jax_are_no_sentence_of_ours(main, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["test", "--out", str(tmp_path)])
    filtering = jax.config.jax_traceback_filtering
    try:
        with pytest.raises(SystemExit) as end:
            command_line(main, Options)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    file = tmp_path / "error-0.txt"
    if main is ours:
        assert str(end.value).startswith("ValueError: ") and "nonsense" in str(end.value) and not file.exists()
    else:
        assert f"tests/train/test_command.py, {main.__name__}" in str(end.value) and str(file) in str(end.value)
        assert "--mesh fsdp=1" in str(end.value) and f"in {main.__name__}\n" in file.read_text()
        assert not capsys.readouterr().err
