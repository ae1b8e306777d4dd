"""A run's options in a file: reading, precedence, refusals, and a run's own file, which restores its options."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import zoo
from convert.private import public
from tests.train.conftest import command
from train import classify, distill, dpo, grpo, pretrain, reward, sft
from train.base import cluster, help, runfile
from train.base.listing import kinds, options_of, retired
from train.base.options import Group
from train.data import store
from train.planning import planner
from train.run import defaults, folder, inspection, report
from train.run.inspection import InspectOptions
from train.run.launcher import LaunchOptions
from train.run.preparation import PrepareOptions
from train.watch.watch import origin


ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def parse(tmp_path):
    """Returns `parse(text, *arguments)`: options of `train.sft` from a file with this text, and from a command line."""

    def parse(text, *arguments, options=sft.SFTOptions):
        (tmp_path / "run.yaml").write_text(text)
        return runfile.parse(options, ["--config", str(tmp_path / "run.yaml"), *arguments])

    return parse


def test_values_are_words_of_a_command_line(parse):
    o = parse(
        "model: x\ndata: [a.jsonl, b]\nweights: 1\nlr: 1e-4\nseq_len: 64\npacking: off\ncompletions-only: false\n"
        "clip-norm: .inf\nload-state: null\nwarmup: -1\nlora:\n  rank: 16\nlora.alpha: 8.0\nchat: {template: x.jinja}\n"
    )
    assert (o.model, o.data, o.mixture.weights) == ("x", ("a.jsonl", "b"), (1.0,))
    assert (o.optim.lr, o.step.seq_len, o.rows.packing, o.completions_only) == (1e-4, 64, "off", False)
    assert (o.optim.clip_norm, o.checkpoints.load_state, o.optim.warmup) == (float("inf"), None, -1)
    assert (o.lora.rank, o.lora.alpha, o.chat.template) == (16, 8.0, "x.jinja")
    assert parse("") == sft.SFTOptions.of(config=o.config)


def test_the_command_line_wins(parse):
    o = parse("lr: 1.0\nbatch: 3\ndata: [a, b]\ncompletions-only: false\nlora: {rank: 4, alpha: 2}", *(
        "--lr", "2", "--data", "c", "--completions-only", "--lora.rank", "8"
    ))  # fmt: skip
    assert (o.optim.lr, o.step.batch, o.data, o.completions_only) == (2.0, 3, ("c",), True)
    assert (o.lora.rank, o.lora.alpha) == (8, 2.0)
    both = parse("model: m\ndata: d", options=pretrain.PretrainOptions)  # options without defaults
    assert (both.model, both.data) == ("m", ("d",))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("learning-rate: 1", "has learning-rate, which is no option"),
        ("sed: 1", "has sed, which is no option of this script; do you mean seed?"),
        ("lora: {rnk: 2}", "has lora.rnk, which is no option of this script; do you mean lora.rank?"),
        ("lora.rnk: 2", "has lora.rnk, which"),
        ("lora: 16", "has '16' where options"),
        ("seed.x: 1", "has seed.x, which is no option"),
        ("seed: {x: 1}", "seed has no options of its own"),
        ("config: other.yaml", "has config, which is no option"),
        ("lr: [1, 2]", "lr has one value, not 2"),
        ("lr: 1\nlr: 2", "has lr twice"),
        ("lora:\n  rank: 1\n  rank: 2", "has rank twice"),
        ("completions-only: maybe", "completions-only is true or false, not maybe"),
        ("- lr", "where options with their names have to be"),
        ("lr: [1", "is no YAML"),
    ],
)
def test_refused(parse, text, sentence):
    with pytest.raises(ValueError, match=r"run\.yaml") as error:
        parse(text)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_values_of_another_kind_are_refused_as_on_the_command_line(parse, capsys):
    with pytest.raises(SystemExit):
        parse("optimizer: adamz")
    said = capsys.readouterr()
    assert "adamz" in said.out + said.err and "optimizer" in said.out + said.err


def test_options_of_before(parse, capsys):
    """A former option is refused on the command line, and has no effect in a file: both say what to do instead."""
    former = retired(sft.SFTOptions)
    assert {"bin", "chat.date", "rewarm", "step-timeout"} <= former.keys()
    assert not former.keys() & {each.name for each in options_of(sft.SFTOptions)}
    for name, sentence in former.items():
        with pytest.raises(ValueError, match=f"has no option --{re.escape(name)} any more: {re.escape(sentence)}$"):
            runfile.parse(sft.SFTOptions, [f"--{name}", "1"])
    capsys.readouterr()
    o = parse("lr: 1.0\nneftune: 0.0\nchat:\n  date: 2026-01-01\n  template: x\n")
    assert (o.optim.lr, o.chat.template) == (1.0, "x")
    said = " ".join(capsys.readouterr().out.split())
    assert "has neftune, which has no effect any more: embeddings get" in said
    assert "has chat.date, which has no effect any more: templates that" in said


@pytest.mark.parametrize("options", [sft.SFTOptions, grpo.GRPOOptions])
def test_a_run_s_own_file(tmp_path, monkeypatch, options):
    """The file restores the run's options, except for those derived from the data, and keeps the commands."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train.sft", "--model", "a b"])
    more = {} if options is grpo.GRPOOptions else {"data": ("x", "y"), "weights": (0.5, 0.5), "packing": "off"}
    o = options.of(out=pathlib.Path("runs/a"), lr=1e-9, clip_norm=float("inf"), load_state="off", dry_run=True, **more)
    o = defaults.resolve_steps(o.changed(lora=o.lora.changed(rank=4)), 7)
    runfile.write(tmp_path, o)
    runfile.write(tmp_path, o)
    text = (tmp_path / "run.yaml").read_text()
    assert text.count("# python -m train.sft --model 'a b'\n") == 1 and ("\nbatch" in text) == (
        options is sft.SFTOptions
    )
    again = runfile.parse(options, ["--config", str(tmp_path / "run.yaml")])
    left = {"steps": 0} if options is sft.SFTOptions else {}
    assert again == o.changed(config=tmp_path / "run.yaml", dry_run=False, **left)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train.sft", "--keep", "2"])
    runfile.write(tmp_path, o)
    assert (tmp_path / "run.yaml").read_text().startswith(text.splitlines()[0] + "\n# python -m train.sft --keep 2\n")


URL = "https://me:pa55@127.0.0.1:9/a.jsonl?X-Amz-Signature=pa55"


@pytest.mark.parametrize("script", ["train.prepare", "train.inspect", "train.sft"])
def test_secrets_stay_out_of_messages(tmp_path, capsys, script):
    """A script that cannot read a URL names it without secrets. It warns once that the list of processes shows them."""
    with pytest.raises(SystemExit) as end:
        data = ["--data", URL] if script == "train.sft" else [URL, "--model", "tiny"]
        command(script, *data, *([] if script == "train.inspect" else ["--out", tmp_path / "out"]))
    assert "https://***@127.0.0.1:9/a.jsonl?X-Amz-Signature=***" in str(end.value.code)
    said = "".join(capsys.readouterr())
    assert "pa55" not in said + str(end.value.code)
    assert said.count("a URL of the command line has a password or token") == 1


def test_secrets_stay_out_of_stores_and_tables(tmp_path, capsys):
    """A store that an earlier version began with secrets continues, and so does one with another password."""
    about, other = ({"sources": [URL.replace("pa55", word)]} for word in ("pa55", "0ther"))
    store.begin(tmp_path / "new", about)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / store.ABOUT).write_text(json.dumps(about))
    for name in ("new", "old"):
        store.begin(tmp_path / name, other)
    store.end(tmp_path / "new", {})
    assert "pa55" not in (tmp_path / "new" / store.STORE).read_text()
    report.rows(f"Data: {URL}", {"files": URL})
    assert "pa55" not in capsys.readouterr().out + (tmp_path / "new" / store.ABOUT).read_text()


def test_secrets_stay_out_of_pages():
    entry = inspection.Entry("https://me:pa55@h/a.jsonl, line 1", [], [], False)
    assert inspection.sample(entry, zoo.tokenizer("tiny")).where == "https://***@h/a.jsonl, line 1"


def test_secrets_of_urls_stay_out(tmp_path, monkeypatch):
    """Secrets are neither in messages nor in a run's files, which only the owner can read."""
    url, shown = (
        "https://me:pa55@host/a.jsonl?X-Amz-Signature=abc&b=1",
        "https://***@host/a.jsonl?X-Amz-Signature=***&b=1",
    )
    assert public(f"{url} and '{url}'") == f"{shown} and '{shown}'"
    assert public(f'{{"data": "{url}", "sas": "az://a/b?sv=1&sig=x%2B"}}') == (
        f'{{"data": "{shown}", "sas": "az://a/b?sv=1&sig=***"}}'
    )
    for plain in (
        "s3://bucket/a@b.jsonl",
        "hf://datasets/org/name@main/a",
        "https://host/a?page=2",
        "me@host",
        "a?b=key",
    ):
        assert public(plain) == plain
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train.sft", "--data", url])
    o = sft.SFTOptions.of(data=(url,), out=tmp_path)
    about = folder.run_manifest(o, {"data": {"path": url}})
    folder.write_manifest(tmp_path, about, o)
    for name in "run.yaml", "run.json":
        text = (tmp_path / name).read_text()
        assert shown in text and "pa55" not in text and (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert about["identity"]["data"]["path"] == shown and shown in origin()["command"]
    with pytest.raises(SystemExit) as error:
        cluster.end(f"OSError: {url} cannot be listed.")
    assert str(error.value) == f"OSError: {shown} cannot be listed."


SCRIPTS = {
    "sft": sft.SFTOptions, "pretrain": pretrain.PretrainOptions, "dpo": dpo.DPOOptions, "grpo": grpo.GRPOOptions,
    "reward": reward.RewardOptions, "classify": classify.ClassifyOptions,
    "distill": distill.DistillOptions, "plan": planner.Options, "prepare": PrepareOptions,
    "inspect": InspectOptions, "launch": LaunchOptions,
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_help_is_two_screens_and_says_defaults_in_words(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        runfile.parse(script, ["--help"])
    brief = capsys.readouterr().out
    assert end.value.code == 0 and len(brief.splitlines()) <= 100
    assert max(len(line) for line in brief.splitlines()) <= 100
    with pytest.raises(SystemExit):
        runfile.parse(script, ["--help-all"])
    everything = capsys.readouterr().out
    found = options_of(script)
    assert {each.name for each in found} >= {name.replace("_", "-") for name in kinds(script)} - {"lora", "chat"}
    for each in found:
        assert each.text, f"--{each.name} says nothing"
        shown = help.invocation(each)
        assert shown in everything and (each.rare or shown in brief)
        said = help.default_in_words(each)
        assert said.split()[-1] not in ("None", "-1", "default:"), f"--{each.name} has {said}"
    titles = [line for line in brief.splitlines() if line in list(Group)]
    assert titles == [each for each in Group if each in titles]


def test_help_of_a_run_begins_with_its_model_and_data(capsys):
    with pytest.raises(SystemExit):
        runfile.parse(sft.SFTOptions, ["-h"])
    said = capsys.readouterr().out
    assert said.startswith("usage: ") and "[options]" in said.splitlines()[0]
    assert [said.index(part) for part in ("\nModel\n  --model", "\nData\n  --data", "\nOptimizer\n")] == sorted(
        said.index(part) for part in ("\nModel\n  --model", "\nData\n  --data", "\nOptimizer\n")
    )
    words = {each.name: help.default_in_words(each) for each in options_of(sft.SFTOptions)}
    assert words["norms-every"] == "default: never" and words["eval-tokens"] == "default: 256"
    assert words["epochs"] == "default: 3 epochs, but 8 for the embedded instructions"


@pytest.mark.thorough
def test_the_usage_names_the_module():
    run = subprocess.run([sys.executable, "-m", "train.compare", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.startswith("usage: python -m train.compare")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--learning_rate", "--lr"), ("--learning-rate=1", "--lr"), ("--batch-size", "--batch"),
        ("--seqlen", "--seq-len"), ("--output-dir", "--out"), ("--lora.alhpa", "--lora.alpha"),
        ("--warmup_steps", "--warmup"), ("--no-completion-only", "--no-completions-only"),
    ],
)  # fmt: skip
def test_the_option_that_is_meant(given, meant):
    with pytest.raises(ValueError, match=f"has no option {given.partition('=')[0]}; do you mean {meant}\\?$"):
        runfile.parse(sft.SFTOptions, [given, "1"])
    assert runfile.parse(sft.SFTOptions, ["--seq_len", "8", "--lora.rank=2"]).step.seq_len == 8


def test_an_option_that_is_like_none():
    with pytest.raises(ValueError, match="has no option --frobnicate; --help-all lists"):
        runfile.parse(sft.SFTOptions, ["--frobnicate"])
