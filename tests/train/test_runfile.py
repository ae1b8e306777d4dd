"""Options of a run in a file: what is read, what wins, what is refused, and that a run's own file gives its options."""

import dataclasses
import pathlib
import sys

import pytest

from convert.private import public
from train import grpo, pretrain, sft
from train.base import cluster, runfile
from train.run import defaults, folder
from train.watch.watch import origin


@pytest.fixture
def parse(tmp_path):
    """`parse(text, *arguments)`: options of `train.sft` from a file with this text, and from a command line."""

    def parse(text, *arguments, options=sft.SFTOptions):
        (tmp_path / "run.yaml").write_text(text)
        return runfile.parse(options, ["--config", str(tmp_path / "run.yaml"), *arguments])

    return parse


def test_values_are_words_of_a_command_line(parse):
    o = parse(
        "model: x\ndata: [a.jsonl, b]\nweights: 1\nlr: 1e-4\nseq_len: 64\npacking: off\ncompletions-only: false\n"
        "clip-norm: .inf\npush-to-hub: null\nwarmup: -1\nlora:\n  rank: 16\nlora.alpha: 8.0\nchat: {date: 2026-01-01}\n"
    )
    assert (o.model, o.data, o.weights) == ("x", ("a.jsonl", "b"), (1.0,))
    assert (o.lr, o.seq_len, o.packing, o.completions_only) == (1e-4, 64, "off", False)
    assert (o.clip_norm, o.push_to_hub, o.warmup) == (float("inf"), None, -1)
    assert (o.lora.rank, o.lora.alpha) == (16, 8.0)
    assert parse("") == dataclasses.replace(sft.SFTOptions(), config=o.config)


def test_the_command_line_wins(parse):
    o = parse("lr: 1.0\nbatch: 3\ndata: [a, b]\ncompletions-only: false\nlora: {rank: 4, alpha: 2}", *(
        "--lr", "2", "--data", "c", "--completions-only", "--lora.rank", "8"
    ))  # fmt: skip
    assert (o.lr, o.batch, o.data, o.completions_only) == (2.0, 3, ("c",), True)
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
        parse("remat: dotz")
    said = capsys.readouterr()
    assert "dotz" in said.out + said.err and "remat" in said.out + said.err


@pytest.mark.parametrize("options", [sft.SFTOptions, grpo.GRPOOptions])
def test_a_run_s_own_file(tmp_path, monkeypatch, options):
    """It gives the options of the run, what was counted from the data apart, and keeps the commands."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train.sft", "--model", "a b"])
    more = {} if options is grpo.GRPOOptions else {"data": ("x", "y"), "weights": (0.5, 0.5), "packing": "off"}
    o = options(out=pathlib.Path("runs/a"), lr=1e-9, clip_norm=float("inf"), push_to_hub="off", dry_run=True, **more)
    o = defaults.resolve_steps(dataclasses.replace(o, lora=dataclasses.replace(o.lora, rank=4)), 7)
    runfile.write(tmp_path, o)
    runfile.write(tmp_path, o)
    text = (tmp_path / "run.yaml").read_text()
    assert text.count("# python -m train.sft --model 'a b'\n") == 1 and ("\nbatch" in text) == (
        options is sft.SFTOptions
    )
    again = runfile.parse(options, ["--config", str(tmp_path / "run.yaml")])
    left = {"steps": 0} if options is sft.SFTOptions else {}
    assert again == dataclasses.replace(o, config=tmp_path / "run.yaml", dry_run=False, **left)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train.sft", "--keep", "2"])
    runfile.write(tmp_path, o)
    assert (tmp_path / "run.yaml").read_text().startswith(text.splitlines()[0] + "\n# python -m train.sft --keep 2\n")


def test_secrets_of_urls_stay_out(tmp_path, monkeypatch):
    """Of a run's files, which are their owner's alone, and of messages."""
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
    o = sft.SFTOptions(data=(url,), out=tmp_path)
    about = folder.about(o, {"data": {"path": url}})
    folder.describe(tmp_path, about, o)
    for name in "run.yaml", "run.json":
        text = (tmp_path / name).read_text()
        assert shown in text and "pa55" not in text and (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert about["identity"]["data"]["path"] == shown and shown in origin()["command"]
    with pytest.raises(SystemExit) as error:
        cluster.end(f"OSError: {url} cannot be listed.")
    assert str(error.value) == f"OSError: {shown} cannot be listed."
