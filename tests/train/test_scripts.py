"""The scripts by their command lines: to the end, stopped, with bad input; and, in processes of their own, killed."""

import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import yaml

import convert.tensors
import zoo
from tests import hurry
from tests.reliability import nightly, trials
from tests.train.conftest import command, unspaced, write_words
from tests.zoo import make_golden, tiny
from train import distill, dpo, grpo, pretrain, sft
from train.base import cluster, runfile
from train.base.command import command as end_in_a_sentence
from train.base.stop import AGAIN, StopRequest
from train.data.packing import Example, Survey
from train.run import card, defaults, finetune, folder, loop, report
from train.run.start import Run
from train.state import checkpoint
from zoo.generation import engine
from zoo.nn import scan, stack
from zoo.source import Source


ROOT = pathlib.Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
STEPS = 16
pytestmark = pytest.mark.usefixtures("quick")
generate = zoo.generate  # in runs under `quick`, `generate` writes nothing


@pytest.fixture(scope="module")
def words(base):
    """Returns a folder whose chat template ends turns otherwise than texts: with a 9, which is in no word."""
    write_words(base / "words.jsonl", 0, count=200)
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "model" / "tokenizer.json"))
    tokenizer.add_special_tokens(["9"])
    tokenizer.save(str(base / "model" / "tokenizer.json"))
    (base / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}9{% endfor %}")
    (base / "model" / "README.md").write_text("---\nlicense: gemma\nbase_model: org/first\n---\n# A base\n")
    return base


def options(base, out, *more):
    usual = {
        "model": base / "model", "data": base / "words.jsonl", "out": out, "steps": STEPS, "seq-len": 32, "batch": 4,
        "lr": 1e-2, "save-every": 4, "eval-every": 4,
    }  # fmt: skip
    return [str(word) for name, value in usual.items() for word in (f"--{name}", value)] + [str(word) for word in more]


def refused(*arguments, script="train.sft"):
    """Returns the message that the script ends with."""
    with pytest.raises(SystemExit) as end:
        command(script, *arguments)
    assert isinstance(end.value.code, str) and "Traceback" not in end.value.code
    return end.value.code


def metrics(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def losses(out):
    return {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}


def last(out):
    return max(losses(out), default=0)


@pytest.fixture(scope="module")
def whole(words):
    """Returns the folder of an undisturbed run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "generate", generate)
        command("train.sft", *options(words, words / "whole"))
    return words / "whole"


def test_a_run(words, whole, capsys):
    assert list(losses(whole)) == list(range(1, STEPS + 1))
    held_out = [line["validation_loss"] for line in metrics(whole) if "validation_loss" in line]
    assert len(held_out) == 5 and held_out[-1] < held_out[0] - 0.3
    line = metrics(whole)[-1]
    assert {"accuracy", "grad_norm", "learning_rate", "tokens", "tokens_per_second"} <= line.keys()
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"Finished, at step {STEPS} of {STEPS}" in (whole / "report.html").read_text()
    (start,) = json.loads((whole / "run.json").read_text())["starts"]
    assert {"parameters", "optimizer", "batch", "estimated"} == start["memory"].keys() and "ended" in start
    count = sum(array.size for array in jax.tree.leaves(zoo.load(words / "model")))
    assert start["parameters"] == {"all": count, "trained": count} and "commit" in start
    assert start["ended"]["step"] == STEPS and start["ended"]["metrics"]["loss"] == losses(whole)[STEPS]
    assert start["memory"]["optimizer"] > 2 * start["memory"]["parameters"] > 0 and start["memory"]["estimated"] > 0
    samples = [json.loads(sample) for sample in (whole / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 4, 8, 12, 16} and all(sample["prompt"] for sample in samples)
    model = zoo.load(whole / "model")
    assert model.config == zoo.load(words / "model").config
    assert model.embed_tokens.weight.dtype == "float32"
    assert zoo.tokenizer(whole / "model").encode("ab") == zoo.tokenizer(words / "model").encode("ab")
    ends = [63, zoo.tokenizer(words / "model").encode("9")[0]]  # the end of a text, and of a chat's turn
    assert json.loads((whole / "model" / "generation_config.json").read_text())["eos_token_id"] == ends
    command("train.sft", *options(words, whole))
    said = unspaced(capsys.readouterr().out)
    table = (
        f"model {words / 'model'}, {count:,} parameters trained all of them steps {STEPS} tokens a step 128, in 4 rows"
    )
    assert unspaced(table) in said and unspaced("peak learning rate 0.01, by adamw") in said
    assert unspaced(f"at best, {held_out[-1]:.3f} of the model that is exported.") in said
    assert unspaced(f"Going on from step {STEPS}") in said and f'zoo.load("{whole / "model"}")' in said


def test_card(words, whole):
    """The card of a model names what it was trained on, in the Hub's metadata, and no path of this machine."""
    text = (whole / "model" / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "base_model": "org/first", "library_name": "transformers", "license": "gemma",
        "pipeline_tag": "text-generation", "tags": ["equinox-zoo", "sft"],
    }  # fmt: skip
    held_out = [line["validation_loss"] for line in metrics(whole) if "validation_loss" in line]
    assert f"after {STEPS} steps" in body
    assert f"| validation_loss | {held_out[0]:.4g} | {held_out[-1]:.4g} |" in body
    digest = hashlib.sha256((words / "words.jsonl").read_bytes()).hexdigest()
    assert f"| words.jsonl | {digest} |" in body and f"equinox-zoo {zoo.__version__}" in body
    count = sum(array.size for array in jax.tree.leaves(zoo.load(words / "model")))
    assert f"| model | model, {count:,} parameters |" in body
    assert str(words) not in text


def test_card_of_a_repository(tmp_path, capsys):
    """The base is named as on the Hub, with its license. A card that is no YAML ends no run."""
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: own\ntags: [a]\n---\n")
    source = Source("qwen3-0.6b", tmp_path)
    assert card.of_base(source) == {"license": "other", "license_name": "own", "base_model": "Qwen/Qwen3-0.6B"}
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert card.of_base(source) == {"base_model": "Qwen/Qwen3-0.6B"}
    assert "has no metadata that can be read" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def stopped_at(monkeypatch):
    """Returns `stopped_at(n)`, which sends a SIGTERM in the n-th step of a run."""

    def stopped_at(step):
        class Stop(StopRequest):
            asked = 0

            def agreed(self):
                self.asked += 1
                if self.asked == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().agreed()

        monkeypatch.setattr(loop, "StopRequest", Stop)

    return stopped_at


GOLDEN = pathlib.Path(__file__).parent / "golden" / "losses.json"


def test_the_same_again(whole, record_property):
    """The losses of `whole` equal the committed ones, up to another jax's or another CPU's rounding."""
    golden, found = json.loads(GOLDEN.read_text()), list(losses(whole).values())
    off = np.abs(np.array(found) / np.array(golden) - 1).max()
    record_property("figure", f"{STEPS} losses within {off:.1e} of the committed ones")
    assert off < 1e-4


@pytest.mark.thorough
def test_told_to_stop(words, whole, stopped_at, capsys):
    out = words / "stopped"
    stopped_at(6)
    command("train.sft", *options(words, out))
    assert "Stopped by SIGTERM after step 6, which is saved" in capsys.readouterr().out.replace("\n", " ")
    assert list(losses(out)) == list(range(1, 7)) and not (out / "model").exists()
    stopped_at(0)
    command("train.sft", *options(words, out))
    assert "Going on from step 6" in capsys.readouterr().out
    assert losses(out) == losses(whole)
    assert (out / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


@pytest.mark.thorough
def test_a_run_goes_on_from_a_local_checkpoint(words, whole, tmp_path, monkeypatch, capsys):
    """A run that failed in step 8 resumes from its local checkpoint of step 6, rather than the shared one of step 4."""
    out, asked = tmp_path / "failed", []

    def fail(stop):
        asked.append(stop)
        return 1 / (8 - len(asked)) and ""

    how = options(words, out)
    monkeypatch.setenv("ZOO_LOCAL_CHECKPOINTS", str(tmp_path / "disk"))
    monkeypatch.setattr(checkpoint, "EVERY_LOCAL", 3)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "agreed", fail)
        with pytest.raises(ZeroDivisionError):
            command("train.sft", *how)
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"4", "id"}
    assert [path.name[0] for path in (tmp_path / "disk").glob("*/0/*")] == ["6"]
    command("train.sft", *how)
    assert "Going on from step 6" in capsys.readouterr().out
    assert losses(out) == losses(whole)
    assert (out / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert not list((tmp_path / "disk").iterdir())


def test_a_run_from_the_file_of_another(words, whole, tmp_path, stopped_at):
    """The run has the same options and numbers as the other; an unknown option ends it with a message."""
    stopped_at(3)
    command("train.sft", "--config", whole / "run.yaml", "--out", tmp_path / "again")
    assert losses(tmp_path / "again") == {step: loss for step, loss in losses(whole).items() if step <= 3}
    (tmp_path / "run.yaml").write_text("stepz: 1")
    assert "has stepz, which is no option of this script; do you mean steps?" in refused(
        "--config", tmp_path / "run.yaml"
    )


@pytest.mark.thorough
def test_remat_auto(words, whole, tmp_path, stopped_at, monkeypatch, capsys):
    """If the memory is known, a run reports its choice, and equals a run with that choice."""
    monkeypatch.setattr(defaults, "device_bytes", lambda: 1e12)
    stopped_at(2)
    command("train.sft", *options(words, tmp_path / "out", "--remat", "auto"))
    said = " ".join(capsys.readouterr().out.split())
    assert "--remat auto is --remat dots --microbatches 1: a device needs about" in said
    assert "of 1,000.0 GB; the fastest." in said
    assert losses(tmp_path / "out") == {step: loss for step, loss in losses(whole).items() if step <= 2}


def assert_eight_bits(words, float_run, stopped_at, matmul, *more):
    """Checks that the losses are nearly those of the float run, though this run stops in between and resumes."""
    out = words / matmul
    stopped_at(5)
    command("train.sft", *options(words, out, "--matmul", matmul, *more))
    stopped_at(0)
    command("train.sft", *options(words, out, "--matmul", matmul, *more))
    assert losses(out).keys() == losses(float_run).keys()
    ours, theirs = (np.array(list(losses(folder).values())) for folder in (out, float_run))
    assert np.mean(ours[-4:]) < np.mean(ours[:4]) - 0.3
    assert 0 < np.mean(np.abs(ours - theirs)) < 0.1 and abs(np.mean(ours[-8:]) - np.mean(theirs[-8:])) < 0.05
    assert zoo.load(out / "model").config == zoo.load(words / "model").config


@pytest.mark.thorough
def test_int8(words, whole, stopped_at):
    assert_eight_bits(words, whole, stopped_at, "int8")


@pytest.mark.thorough
def test_fp8(words, stopped_at):
    """fp8 rounds gradients, too, so that at a higher rate two runs soon differ."""
    more = ["--steps", 40, "--lr", 3e-3]
    command("train.sft", *options(words, words / "float", *more))
    assert_eight_bits(words, words / "float", stopped_at, "fp8", *more)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more, said",
    [
        (["--batch", 8], "of another run: --batch was 4 and is 8. Set that back"),
        (["--seed", 8], "--seed was 0 and is 8"),
        (["--seq-len", 24], "--seq-len was 32 and is 24"),
        (["--packing", "off"], "--packing was fit and is off"),
        (["--hold-out", 0.1], "--hold-out was 0.05 and is 0.1"),
        (["--columns", "prompt=prompt"], "--columns was missing and is prompt=prompt. Set that back"),
        (["--no-completions-only"], "--completions-only was True and is False"),
        (["--model", "other"], "identity.data"),
    ],
)
def test_resuming_on_other_data_is_refused(words, whole, more, said):
    """The message names the difference; here the tokenizer is another one of the same size."""
    if more[0] == "--model":
        more = ["--model", shutil.copytree(words / "model", words / "other")]
        text = (words / "other" / "tokenizer.json").read_text()
        (words / "other" / "tokenizer.json").write_text(text.replace('"q"', '"\u00e9"'))
    assert said in refused(*options(words, whole, *more))


@pytest.mark.thorough
def test_a_mended_record(words, tmp_path, stopped_at, capsys):
    """A changed letter in data of equal size is refused unless accepted. Changes of other options are reported."""
    write_words(tmp_path / "words.jsonl", 0, count=200)
    same = [words, tmp_path / "out", "--data", tmp_path / "words.jsonl", "--hold-out", 0]
    command_of = lambda *more: options(*same, *more)
    stopped_at(2)
    command("train.sft", *command_of())
    text = (tmp_path / "words.jsonl").read_text()
    (tmp_path / "words.jsonl").write_text(text.replace("A", "B", 1))
    said = refused(*command_of())
    assert "words.jsonl has other contents" in said and "--accept-data" in said and "--out" in said
    capsys.readouterr()
    command("train.sft", *command_of("--accept-data", "--clip-norm", 3))
    said = capsys.readouterr().out.replace("\n", " ")
    assert "words.jsonl has other contents. The run goes on with it at the same place" in said
    assert "Not as before: --clip-norm was 1.0 and is 3.0." in said and "Stopped by SIGTERM after step 4" in said
    command("train.sft", *command_of())  # the change was accepted before, and need not be again
    said = capsys.readouterr().out.replace("\n", " ")
    assert "Going on from step 4" in said and "--clip-norm was 3.0 and is 1.0" in said and "other contents" not in said
    (tmp_path / "words.jsonl").rename(tmp_path / "verbs.jsonl")
    text = refused(*command_of("--data", tmp_path / "verbs.jsonl"))
    assert "verbs.jsonl is new, words.jsonl is gone" in text
    text = refused(*command_of("--data", tmp_path / "verbs.jsonl", "--accept-data", "--batch", 8))
    assert "--batch was 4 and is 8" in text


@pytest.mark.thorough
def test_folders_by_default(words, tmp_path, stopped_at, monkeypatch, capsys):
    """A run has a folder of its own, in which the same command resumes; other options make another run."""
    monkeypatch.chdir(tmp_path)

    def start(*more):
        arguments = options(words, "", "--hold-out", 0, *more)
        del arguments[arguments.index("--out") : arguments.index("--out") + 2]
        stopped_at(1)
        command("train.sft", *arguments)
        return capsys.readouterr().out.replace("\n", " ")

    assert "Going on" not in start() and losses(tmp_path / "runs" / "sft").keys() == {1}
    said = start("--clip-norm", 3)
    assert "runs/sft has another run: --clip-norm was 1.0 and is 3.0. So this run goes to runs/sft-2; --out" in said
    assert "Going on from step 1 of runs/sft." in start() and losses(tmp_path / "runs" / "sft").keys() == {1, 2}
    assert "Going on from step 1 of runs/sft-2." in start("--clip-norm", 3, "--keep", 1, "--mesh", "replica=1")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["sft", "sft-2"]


def test_the_folder_that_is_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    about = lambda data="a", **new: {"identity": {"data": {"files": {"x": data}}}, "options": {"--lr": 1.0} | new}
    choose = lambda about, **options: str(folder.run_folder(sft.SFTOptions.of(**options), about))
    assert choose(about()) == "runs/sft"
    for name in ("sft", "sft-3", "sft-more", "sft-4"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    folder.write_manifest(tmp_path / "runs" / "sft-3", about(), sft.SFTOptions.of())
    assert choose(about()) == "runs/sft-3" and choose(about(**{"--lr": 2.0})) == "runs/sft"
    # Options that did not exist when a run began have their defaults.
    assert choose(about(**{"--optimizer": "adamw", "--moments": "float32"})) == "runs/sft-3"
    assert choose(about(**{"--optimizer": "muon"})) == "runs/sft"
    (tmp_path / "runs" / "sft" / "notes.txt").write_text("of somebody else")
    assert choose(about(**{"--lr": 2.0})) == choose(about(data="b")) == "runs/sft-2"
    assert choose(about(data="b"), accept_data=True) == "runs/sft-3"
    assert choose(about(data="b", **{"--lr": 2.0}), accept_data=True) == "runs/sft-2"
    steps = lambda steps, decay: about(**{"--steps": steps, "--decay": decay})
    (tmp_path / "runs" / "sft-5").mkdir()
    folder.write_manifest(tmp_path / "runs" / "sft-5", steps(100, 20), sft.SFTOptions.of())
    capsys.readouterr()
    choose(steps(40, 8))  # the user has given --steps alone
    assert "runs/sft-5 has another run: --steps was 100 and is 40." in capsys.readouterr().out.replace("\n", " ")


def test_never(words, tmp_path, stopped_at):
    """With "never", neither the first step nor the end of a run has samples or evaluations."""
    out = tmp_path / "out"
    stopped_at(1)
    command("train.sft", *options(words, out, "--sample-every", "never", "--eval-every", "never"))
    assert losses(out) and not any("validation_loss" in line for line in metrics(out))
    samples = out / "samples.jsonl"
    assert not samples.exists() or not samples.read_text()
    assert not Run.is_due(types.SimpleNamespace(done=lambda: True), "never")
    said = refused(*options(words, tmp_path / "best", "--eval-every", "never", "--best", "validation_loss"))
    assert "leave out --eval-every never" in said
    assert not runfile.parse(sft.SFTOptions, ["--norms-every", "never"]).watch.norms_due(1)


def test_what_follows_from_the_steps_is_not_told():
    """A user who changes --steps alone gets no message about --decay, unless one of its values was given."""
    of = lambda steps, **more: folder.defining_options(defaults.resolve_steps(sft.SFTOptions.of(**more), steps))
    before, now = of(100), of(40)
    assert before["--decay"] == 20 and now["--decay"] == 8
    assert folder.changes(before, now, sft.SFTOptions()) == "--steps was 100 and is 40"
    given = of(40, decay=5, warmup=1)
    assert folder.changes(before, given, sft.SFTOptions()) == (
        "--decay was 20 and is 5, --steps was 100 and is 40, --warmup was 3 and is 1"
    )
    assert folder.changes(now, given, sft.SFTOptions()) == "--decay was 8 and is 5, --warmup was 2 and is 1"


def test_other_options_are_told_when_a_run_goes_on(words, whole, tmp_path, capsys):
    """Options that affect the numbers are reported in one line. The run is at its end, so nothing is computed."""
    out = shutil.copytree(whole, tmp_path / "out")
    more = ["--lr", 0.02, "--schedule", "wsd", "--z-loss", 0.1, "--matmul", "int8", "--compute-dtype", "bfloat16"]
    command("train.sft", *options(words, out, *more, "--keep", 7))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Not as before: ")]
    for change in (
        "--lr was 0.01 and is 0.02", "--schedule was cosine and is wsd", "--z-loss was 0.0 and is 0.1",
        "--matmul was float and is int8", "--compute-dtype was float32 and is bfloat16",
    ):  # fmt: skip
        assert change in line
    assert "--keep" not in line and "--out" not in line


@pytest.mark.thorough
def test_freeze(words, tmp_path, stopped_at, capsys):
    """Frozen weights are exported unchanged, also after a stop; all others learn. Neither a run's base nor its frozen
    weights may change.
    """
    patterns = ("embed_tokens.*", "*.mlp.*")
    more = ["--freeze", *patterns, "--steps", 3, "--eval-every", 3, "--hold-out", 0]
    stopped_at(2)
    command("train.sft", *options(words, tmp_path / "out", *more))
    assert "identity.freeze" in refused(*options(words, tmp_path / "out", *more, "--freeze", "*.mlp.*"))
    stopped_at(0)
    command("train.sft", *options(words, tmp_path / "out", *more))
    assert "Going on from step 2" in capsys.readouterr().out
    before, after = (convert.tensors.open_tensors(path / "model") for path in (words, tmp_path / "out"))
    for name in after:
        frozen = "embed_tokens" in name or ".mlp." in name
        assert (before[name].view().tobytes() == after[name].view().tobytes()) == frozen, name
    for more, sentence in (
        (["--freeze", "mpl.*"], "--freeze mpl.* matches none of the model's weights, which are embed_tokens.weight, "),
        (["--freeze", "*"], "--freeze * leaves nothing to train."),
        (["--freeze", "*.mlp.*", "--lora.rank", 2], "--freeze is of no use to adapters"),
    ):
        assert sentence in refused(*options(words, tmp_path / "no", *more, "--hold-out", 0))


@pytest.mark.thorough
def test_not_finite(words):
    out = words / "nan"
    text = refused(*options(words, out, "--lr", "1e30", "--clip-norm", "inf", "--warmup", "0", "--hold-out", "0"))
    (step,) = map(int, re.findall(r"Step (\d+) is not finite", text))
    assert step > 1 and "Lower --lr" in text
    assert (out / "checkpoints" / str(step)).is_dir() and not (out / "model").exists()


def test_dry_run(words, capsys):
    command("train.sft", *options(words, words / "dry", "--dry-run"))
    output = "".join(capsys.readouterr().out.split())  # tables wrap long paths
    for word in (
        "words.jsonl", "190", "prompt", "completion", "Example3", "filled", "vocabulary", "Memory", "Mesh", "fsdp",
        "free",
    ):  # fmt: skip
        assert word in output, word
    assert not (words / "dry").exists()


def test_examples_are_decoded_whole(capsys):
    """Examples are shown in full, even if the learnt part begins within a character or after a space."""
    tokenizer, text = zoo.tokenizer("tiny"), "na\u00efve \u65e5\u672c"
    ids = tokenizer.encode(text, special=False)
    masks = [[int(i >= at) for i in range(len(ids))] for at in range(1, len(ids))]
    found = Survey(1, 1, {}, {}, 0, 0, 1.0, examples=[Example(ids, m, True) for m in masks])
    report.examples(found.examples, tokenizer, seq_len=99)
    assert len(masks) > 8 and capsys.readouterr().out.count(text) == len(masks)


def test_pretrain(words, capsys):
    out = words / "pretrain"
    command("train.pretrain", *options(words, out, "--steps", 2, "--router-balance", 0, "--eval-every", 2))
    assert len(losses(out)) == 2 and "zoo.load" in capsys.readouterr().out
    assert [line["step"] for line in metrics(out) if "validation_loss" in line] == [0, 2]
    assert zoo.load(out / "model").config == zoo.config(words / "model")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deepseek3", "qwen3_next"])
def test_mtp_weight(base, name, monkeypatch):
    """The scripts train the MTP module, and give its loss this weight."""
    model, got = tiny.write(base / "further" / name, name), []
    tiny.write_tokenizer(model)
    start = lambda o, trained, task, *_: got.append((trained.abstract, task.objective))
    monkeypatch.setattr(finetune, "start", start)
    monkeypatch.setattr(pretrain, "start", start)
    more = ("--model", model, "--mtp-weight", 0.25)
    for script in (pretrain, sft):
        o = script.main.__annotations__["o"]
        script.main(runfile.parse(o, options(base, base / f"{o.name}-{name}", *more)))
    batch = {name: jax.ShapeDtypeStruct((2, 8), "int32") for name in ("tokens", "targets", "segments", "positions")}
    batch["loss_mask"] = batch["tokens"]
    for abstract, objective in got:
        sums = eqx.filter_eval_shape(objective, abstract, batch)[2]
        assert "mtp_loss" in sums and objective.keywords["mtp_weight"] == 0.25
    assert len(got) == 2


@pytest.mark.thorough
def test_mtp_learns(base):
    """The MTP module is created, learns, and is exported. Without decay it changes only by its own loss."""
    model, out = tiny.write(base / "further", "deepseek3", num_hidden_layers=1, first_k_dense_replace=1), base / "mtp"
    tiny.write_tokenizer(model)
    more = ("--steps", 1, "--weight-decay", 0, "--mtp-weight", 0.3, "--router-balance", 0)
    command("train.pretrain", *options(base, out, "--model", model, *more))
    assert metrics(out)[-1]["mtp_loss"] > 0
    config, where = zoo.config(model), lambda model: np.asarray(model.mtp.eh_proj.weight)
    before = zoo.registry.family_of(config).init_model(config, key=jax.random.key(0), parts=("mtp",))
    change = np.abs(where(zoo.load(out / "model", parts=("mtp",))) - where(before))
    assert np.median(change) > 1e-3  # Adam's first step is about the learning rate, 0.01


def test_options_in_python(untyped):
    """Options accept the command line's forms: strings for paths, and one value or a list where several are allowed."""
    o = sft.SFTOptions.of(data="x.jsonl", weights=1, out="runs/x")
    assert (o.data, o.mixture.weights, o.out) == (("x.jsonl",), (1.0,), pathlib.Path("runs/x"))
    assert sft.SFTOptions.of(data=["a", pathlib.Path("b")]).data == ("a", "b")
    assert dpo.DPOOptions.of(data=pathlib.Path("x.jsonl")).data == ("x.jsonl",)
    assert grpo.GRPOOptions.of(reward="number").rewards.reward == ("number",)
    assert distill.DistillOptions.of(teacher="tiny", store="logits").store == pathlib.Path("logits")
    assert distill.DistillOptions.of(teacher="tiny").store is None


def test_folders_are_of_this_machine(capsys):
    for options, word in (({"out": "gs://b/run"}, "--out gs:/"), ({"store": "s3://b/logits"}, "--store s3:/")):
        wrong = {name: pathlib.Path(path) for name, path in options.items()}
        with pytest.raises(ValueError, match=f"{word}.*is in an object store, and must be a path of this machine"):
            distill.DistillOptions.of(teacher="tiny", **wrong)
    with pytest.raises(SystemExit):
        runfile.parse(sft.SFTOptions, ["--out", "gs://b/x"])
    assert "--out gs:/b/x is in an object store" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, more, said",
    [
        ("", [], ["bad.jsonl", "empty"]),
        ('{"prompt": "a", "completion": "B"}\n{"prompt": "a", "comp\n', [], ["bad.jsonl", "line 2"]),
        ('{"question": "a"}\n', [], ["bad.jsonl, line 1", "question", "messages"]),
        ('{"text": "abc"}\n' * 9, ["--seq-len", "100"], ["--seq-len 100", "64 positions"]),
        ('{"text": "abc"}\n' * 9, ["--model", "./nowhere"], ["nowhere"]),
        ('{"text": "abc"}\n' * 9, ["--mesh", "fsdp=3"], ["fsdp=3", "3 devices"]),
        ('{"prompt": "abcdefg", "completion": "h"}\n' * 9, ["--seq-len", "4"], ["nothing to learn"]),
    ],
)
def test_bad_input(base, tmp_path, content, more, said):
    (tmp_path / "bad.jsonl").write_text(content)
    text = refused(*options(base, tmp_path / "out", "--data", tmp_path / "bad.jsonl", *more))
    assert all(word in text.replace("\n", " ") for word in said), text
    assert not (tmp_path / "out").exists()


# ======================================================================================================================
# Separate processes.
# ======================================================================================================================


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "train.sft", *arguments],
        cwd=ROOT, env=hurry.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


@pytest.mark.thorough
@pytest.mark.parametrize("script, more", [
    ("train.sft", ["--lora.rank", 2, "--batch", 2]),
    ("train.grpo", ["--prompts", 2, "--group", 2, "--max-new-tokens", 6, "--reward", "reward.py:some"]),
])  # fmt: skip
def test_samples_of_a_model_whose_layers_lie_apart(wide, tmp_path, monkeypatch, script, more):
    """On a mesh of one device, where its layers exceed 32 MiB, a model in training draws what it draws stacked."""
    monkeypatch.setattr(zoo, "generate", generate)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("reward.py").write_text("def some(completion, record): return sum(map(ord, completion)) % 7 / 7\n")
    usual = ["--model", wide / "model", "--data", wide / "words.jsonl", "--steps", 1, "--seq-len", 32]
    split, parts = stack.apart, []
    monkeypatch.setattr(engine, "apart", lambda model: parts.append(made := split(model)) or made)
    samples = []
    for bytes in (stack.CACHED, 2**60):
        monkeypatch.setattr(stack, "CACHED", bytes)
        out = tmp_path / str(bytes)
        command(script, *usual, "--out", out, *more)
        assert len(losses(out)) == 1
        samples.append((out / "samples.jsonl").read_text())
        nodes = jax.tree.leaves(parts, is_leaf=scan.is_apart)
        assert any(map(scan.is_apart, nodes)) == (bytes < 2**60)
        parts.clear()
    assert samples[0] == samples[1] and samples[0]


@pytest.mark.thorough
def test_killed_and_resumed(words, record_property):
    """SIGKILL at two moments, with saves under way, and then SIGTERM, change no loss and no weight. An error is one
    sentence with exit code 1. With more trials, every other kill comes at a random time after the start, perhaps before
    the first step.
    """
    kills, choose = trials(2, 50, 200), random.Random(0)
    steps = 40 if kills == 2 else 8 * kills
    long = ["--steps", steps, "--lr", "3e-3", "--eval-every", max(4, steps // 10)]
    finish(start(*options(words, words / "calm", *long)))
    out, early = words / "killed", 0
    for step in (5, 17) if kills == 2 else (None, 5) * (kills // 2):
        process, came, began = start(*options(words, out, *long)), last(out), time.monotonic()
        far, late = (step if kills == 2 else came + (step or steps)), choose.uniform(0, 12)
        while process.poll() is None and last(out) < far and (step or time.monotonic() - began < late):
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        early += last(out) == came
    process, far = start(*options(words, out, *long)), max(28, last(out) + 2)
    while process.poll() is None and last(out) < far:
        time.sleep(0.01)
    process.terminate()
    output, _ = process.communicate()
    assert process.returncode == AGAIN
    (stopped,) = map(int, re.findall(r"Stopped by SIGTERM after step (\d+), which is saved", output))
    assert far <= stopped < steps
    assert "Going on from step" in finish(start(*options(words, out, *long)))
    assert losses(out) == losses(words / "calm")
    assert list(losses(out)) == list(range(1, steps + 1))
    record_property("figure", f"{kills} kills, {early} before the first new step: 0 of {steps} losses differ")
    ours, theirs = (convert.tensors.open_tensors(folder / "model") for folder in (out, words / "calm"))
    assert all(ours[name].view().tobytes() == theirs[name].view().tobytes() for name in theirs)
    output = finish(start(*options(words, out, *long, "--batch", "8")), code=1)
    assert "--batch was 4 and is 8" in " ".join(output.split()) and "Traceback" not in output


@nightly
@pytest.mark.thorough
def test_stopped_at_any_moment(words, record_property):
    """After a signal at a random moment after the first step, a run that mostly validates and saves is saved soon."""
    choose, out, took = random.Random(0), words / "any", []
    busy = ["--steps", 2000, "--eval-every", 3, "--save-every", 3]
    for _ in range(count := trials(3, 20, 100)):
        process, came = start(*options(words, out, *busy)), last(out)
        while process.poll() is None and last(out) == came:
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 1))
        process.send_signal(choose.choice([signal.SIGTERM, signal.SIGUSR2]))
        began = time.monotonic()
        output, _ = process.communicate(timeout=300)
        took.append(time.monotonic() - began)
        (stopped,) = re.findall(r"Stopped by SIG\w+ after step ([\d,]+), which is saved", output)
        stopped = int(stopped.replace(",", ""))
        assert process.returncode == AGAIN and (out / "checkpoints" / str(stopped)).is_dir() and last(out) == stopped
    record_property("figure", f"{count} of {count} saved, exit code {AGAIN}, at most {max(took):.1f} s to the end")


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory):
    """Runs the start of the README's longer run, on real weights."""
    if not SHARED.is_dir():
        pytest.skip("the small trained Llama is not beside this checkout")
    folder = tmp_path_factory.mktemp("shakespeare")
    (folder / "model").symlink_to(SHARED / "aidreams260k")
    data = ["--data", SHARED / "text" / "tinyshakespeare.txt", "--seq-len", 128, "--batch", 16, "--lr", 3e-3]
    finish(start(*options(folder, folder / "out", *data, "--steps", 40, "--save-every", 1000, "--eval-every", 20)))
    return folder / "out"


@pytest.mark.thorough
def test_real_weights_learn_shakespeare(shakespeare):
    """Held-out loss falls by more than a nat."""
    held_out = [line["validation_loss"] for line in metrics(shakespeare) if "validation_loss" in line]
    assert held_out[-1] < held_out[0] - 1


@pytest.mark.thorough
@pytest.mark.live
def test_transformers_loads_what_was_trained(shakespeare):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    theirs = make_golden.logits(shakespeare / "model")
    ours = np.asarray(zoo.load(shakespeare / "model")(jnp.asarray(tiny.TOKENS)))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_faults_of_ours_end_a_run_of_several_processes(monkeypatch, capsys):
    """A fault ends the process, for which the others would otherwise wait. A process alone shows Python's traceback."""
    monkeypatch.setattr(sys, "argv", ["sft"])
    ended = []
    monkeypatch.setattr(cluster, "end", ended.append)

    def main(o):
        raise KeyError("odd")

    with pytest.raises(KeyError):
        end_in_a_sentence(main, sft.SFTOptions)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    end_in_a_sentence(main, sft.SFTOptions)
    assert ended == ["KeyError: 'odd'"] and "in main" in capsys.readouterr().err
