"""Prepared stores: the same bytes, whoever makes them and after whatever interruption; runs read and refuse them."""

import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import zoo
from tests import hurry
from tests.train.test_checkpoint import HOLDER
from train import dpo, inspect, prepare, pretrain, sft
from train.data import rows, sets, store
from train.data.packing import TEXT
from train.data.records import open_records
from train.run import finetune, preparation
from train.run.preparation import PrepareOptions


SEQ = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    words = lambda n: " ".join(draw.choice(("list", "of", "keys", "returns", "a")) for _ in range(n))
    text = "".join(json.dumps({"text": f"{n} {words(draw.randint(1, 30))}"}) + "\n" for n in range(90))
    (folder / "train.jsonl").write_text(text)
    (folder / "valid.jsonl").write_text("".join(json.dumps({"text": words(20)}) + "\n" for n in range(9)))
    return folder


@pytest.fixture
def small(monkeypatch, tmp_path_factory):
    """Sets files of ten records, no other processes, and another folder for remembered hashes of files."""
    monkeypatch.setattr(store, "RECORDS", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def options(data, out, **changes):
    return PrepareOptions.of(**dict(data=(str(data),), model="tiny", out=out, seq_len=SEQ, workers=1) | changes)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_store_has_all_rows(data, tmp_path, small):
    content = prepare.main(options(data, tmp_path / "out"))
    tokenizer = zoo.tokenizer("tiny")
    train, valid = open_records(data)
    assert valid is not None
    for split, records in ("train", train), ("valid", valid):
        made = store.rows(tmp_path / "out", content, split)
        assert made is not None
        counts = content["splits"][split]
        assert counts["rows"] == len(made) and counts["records"] == len(records)
        shape = dict(vocab_size=2048, seq_len=SEQ)
        pieces = lambda found: sorted(
            row["targets"][row["segments"] == n].tolist() for row in found for n in range(1, row["segments"].max() + 1)
        )
        assert pieces(made) == pieces(TEXT.pack(records, tokenizer, **shape))
        assert counts["tokens"] == sum(int((row["segments"] > 0).sum()) for row in made)
        assert counts["learnt"] == sum(int(row["loss_mask"].sum()) for row in made)
    assert len([name for name in content["shards"] if name.startswith("train")]) == 9
    store.verify(tmp_path / "out")


def test_what_is_finished_is_not_made_again(data, tmp_path, small, monkeypatch):
    """Only missing or unfinished files are made; then the store has the same bytes."""
    whole = tmp_path / "whole"
    prepare.main(options(data, whole))
    expected, made = contents(whole), []
    make = preparation.make
    monkeypatch.setattr(preparation, "make", lambda o, shard: made.append(shard.name) or make(o, shard))
    prepare.main(options(data, whole))
    assert made == [] and contents(whole) == expected
    (whole / "store.json").unlink()
    (whole / "train-00002-of-00009.json").unlink()  # this file is written last
    (whole / "train-00004-of-00009.array_record").write_bytes(b"cut off")
    (whole / "train-00005-of-00009.array_record.elsewhere-1.tmp").write_bytes(b"begun")
    with pytest.raises(FileNotFoundError, match=r"whole is not complete: run `python -m train.prepare`"):
        store.read(whole)
    prepare.main(options(data, whole))
    assert made == ["train-00002-of-00009", "train-00004-of-00009"] and contents(whole) == expected


def test_parts_on_several_machines(data, tmp_path, small, capsys):
    """Parts make the bytes of one machine, in any order; the last one completes the store, and repeating one does no
    harm."""
    prepare.main(options(data, tmp_path / "whole"))
    for part in ("2/3", "0/3", "2/3"):
        assert prepare.main(options(data, tmp_path / "parts", part=part)) == {}
    assert "3 of 10 files are still to be made, by the other parts." in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="is not complete"):
        store.read(tmp_path / "parts")
    prepare.main(options(data, tmp_path / "parts", part="1/3"))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    for part in ("3/3", "1", "a/b", "1/0"):
        with pytest.raises(ValueError, match=f"--part {part}: write the number of this machine"):
            prepare.main(options(data, tmp_path / "other", part=part))


def test_columns(tmp_path, small):
    """Preparing and inspecting rename columns. Other names make another store. A store has no columns to rename."""
    own, ours = tmp_path / "own.jsonl", tmp_path / "ours.jsonl"
    own.write_text('{"body": "a list of keys"}\n')
    ours.write_text('{"text": "a list of keys"}\n')
    prepare.main(options(own, tmp_path / "own", columns=("text=body",)))
    prepare.main(options(ours, tmp_path / "ours"))
    rows_of = lambda name: contents(tmp_path / name)["train-00000-of-00001.array_record"]
    assert rows_of("own") == rows_of("ours")
    with pytest.raises(ValueError, match="own was begun with other data or options: columns was text=body"):
        prepare.main(options(own, tmp_path / "own", columns=("text=body", "label=body")))
    (found,) = inspect.main(inspect.InspectOptions.of(data=(str(own),), columns=("text=body",)))
    assert found.table["documents"] == "1"
    with pytest.raises(ValueError, match=r"--columns: .*own is prepared already and has no columns; give it to train"):
        inspect.main(inspect.InspectOptions.of(data=(str(tmp_path / "own"),), columns=("text=body",)))
    o, tokenizer = sets.DataOptions.of(columns=("text=body",)), zoo.tokenizer("tiny")
    with pytest.raises(ValueError, match=r"--columns: .*own is prepared already"):
        sets.open_set(o, str(tmp_path / "own"), tokenizer, TEXT, {}, seed=0, limit=None, validation_rows=0)


def test_refusals(data, tmp_path, small):
    out = tmp_path / "out"
    prepare.main(options(data, out))
    with pytest.raises(ValueError, match=r"out was begun with other data or options: settings.seq_len was 32"):
        prepare.main(options(data, out, seq_len=16))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="other has other files: name a new folder by --out"):
        prepare.main(options(data, tmp_path / "other"))
    content, tokenizer = store.read(out), zoo.tokenizer("tiny")
    now = store.identity("text", tokenizer, content["settings"])
    store.refuse_other(out, content, now)
    with pytest.raises(ValueError, match="was prepared for tiny with --packing fit, and this run has concat: give"):
        store.refuse_other(out, content, now | {"settings": content["settings"] | {"packing": "concat"}})
    with pytest.raises(ValueError, match="was prepared for tiny with kind text, and this run has pairs"):
        store.refuse_other(out, content, now | {"kind": "pairs"})
    tokenizer.chat_template = f"{tokenizer.chat_template} "
    with pytest.raises(ValueError, match="was prepared for tiny with tokenizer"):
        store.refuse_other(out, content, store.identity("text", tokenizer, content["settings"]))
    shard = out / "train-00003-of-00009.array_record"
    kept = shard.read_bytes()
    shard.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert store.read(out) == content  # of the right size
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record is not what was written: copy"):
        store.verify(out)
    assert kept[-1] == 0, "padding, so that no row is damaged"
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record is not what was written: copy"):
        store.verify(out, anew=True)
    shard.write_bytes(kept[:100])
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record has 100 bytes, and was written with"):
        store.read(out)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record is missing, and was written with"):
        store.read(out)


def test_a_full_disk(data, tmp_path, small):
    """A limit of 2 kB on file sizes fails like a full disk; then the same command continues."""
    out, hard = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        with pytest.raises(OSError, match=rf"{out}/train-00000-of-00009.array_record could not be written, where"):
            prepare.main(options(data, out))
        assert [path.name for path in out.iterdir()] == ["about.json"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    prepare.main(options(data, out))
    store.verify(out)


def test_one_preparation_at_a_time(data, tmp_path, small):
    lock = tmp_path / "out.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock, "0", "1"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(OSError, match=r"out is being prepared by another command \(another process\): wait"):
            prepare.main(options(data, tmp_path / "out"))
        other.kill()


def given(script, options, monkeypatch, data, tmp_path, **changes):
    """Returns the batches, the validation batches and the number of steps of a script's run."""
    found = {}

    def run(o, model, mesh, tokenizer, task, *, data):
        found.update(task=task, steps=o.optim.steps, source=data)

    monkeypatch.setattr(finetune, "run", run)
    monkeypatch.setattr("train.pretrain.start", lambda o, _, task, *rest: run(o, 0, 0, 0, task, data=rest[-1]))
    script.main(
        options.of(
            model="tiny", data=data, seq_len=SEQ, batch=4, out=tmp_path / "run", mesh="fsdp=4,tensor=2", **changes
        )
    )
    return found


def test_a_run_reads_a_store(data, tmp_path, small, monkeypatch, capsys):
    prepare.main(options(data, tmp_path / "out"))
    found = given(sft, sft.SFTOptions, monkeypatch, (str(tmp_path / "out"),), tmp_path, epochs=2)
    content = store.read(tmp_path / "out")
    total = content["splits"]["train"]["rows"]
    assert found["steps"] == -(-2 * total // 4) and found["source"]["sets"][0].keys() == {"store"}
    batches = list(found["task"].data)
    first = [row.tobytes() for batch in batches for row in batch["tokens"]][:total]
    own = [row["tokens"].tobytes() for row in store.rows(tmp_path / "out", content, "train") or ()]
    assert sorted(first) == sorted(own) and first != own
    validation = sum(int((batch["segments"] > 0).sum()) for batch in found["task"].validation)
    assert validation == content["splits"]["valid"]["tokens"]
    assert len(found["task"].prompts) == 3 and "filled" in capsys.readouterr().out
    with pytest.raises(ValueError, match="with --seq-len 32, and this run has 16"):
        sft.main(
            sft.SFTOptions.of(model="tiny", data=(str(tmp_path / "out"),), seq_len=16, steps=1, out=tmp_path / "run")
        )


def test_a_run_compares_the_files_of_a_store(data, tmp_path, small, monkeypatch):
    """A run also notices another file of equal size, and reads each file only once."""
    out, content = tmp_path / "out", prepare.main(options(data, tmp_path / "out"))
    begin = lambda: given(sft, sft.SFTOptions, monkeypatch, (str(out),), tmp_path, steps=1)
    begin()
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("a file is read again"))
        store.verify(out)
    first = out / "train-00003-of-00009.array_record"
    as_long = {shard["rows"]: name for name, shard in content["shards"].items() if name > first.stem}
    second = out / f"{as_long[content['shards'][first.stem]['rows']]}.array_record"
    kept, before = first.read_bytes(), first.stat()
    assert before.st_size == second.stat().st_size
    shutil.copy(second, tmp_path / "other")
    os.utime(tmp_path / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "other").replace(first)
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record is not what was written: copy"):
        begin()
    first.write_bytes(kept[:300] + bytes([kept[300] ^ 1]) + kept[301:])
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record, row [1-9], is not what was written"):
        begin()
    with pytest.raises(ValueError, match=r"train-00003-of-00009.array_record, row [1-9], is not what was written"):
        list(store.rows(out, content, "train") or ())  # when a run has begun


def test_preferences(tmp_path, small, monkeypatch):
    fields = [{"prompt": f"{n}? ", "chosen": "yes", "rejected": "no no"} for n in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in fields))
    out = tmp_path / "out"
    prepare.main(options(tmp_path / "pairs.jsonl", out, kind="preferences"))
    found = given(dpo, dpo.DPOOptions, monkeypatch, (str(out),), tmp_path, epochs=1, hold_out=0.0)
    batches = list(found["task"].data)
    pairs = sum(int(batch["segments"].max(1).sum()) // 2 for batch in batches)
    assert pairs == 30 and all(batch["desirable"].max() == 1 for batch in batches)
    with pytest.raises(ValueError, match="with --unpaired False, and this run has True"):
        given(dpo, dpo.DPOOptions, monkeypatch, (str(out),), tmp_path, epochs=1, loss="kto")


@pytest.mark.thorough
def test_phases(data, tmp_path, small, monkeypatch):
    """Each phase has its own rows; a set continues where it was; a run that resumes anywhere has the same batches."""
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": f"other {n}"}) + "\n" for n in range(50)))
    first, other = str(data / "train.jsonl"), str(tmp_path / "other.jsonl")
    (tmp_path / "phases.yaml").write_text(
        f"- {{steps: 3, data: {first}, seq_len: 16, batch: 8}}\n"
        f"- {{steps: 2, data: [{first}, {other}], weights: [3, 1]}}\n"
        f"- {{steps: 4, data: [{first}, {other}], weights: [1, 1]}}\n"
    )
    found = given(
        pretrain, pretrain.PretrainOptions, monkeypatch, (first,), tmp_path,
        phases=tmp_path / "phases.yaml", packing="off",
    )  # fmt: skip
    batches = list(found["task"].data)
    assert found["steps"] == 9 and [batch["tokens"].shape for batch in batches] == [(8, 16)] * 3 + [(4, 32)] * 6
    text = lambda row: zoo.tokenizer("tiny").decode(row[row > 0].tolist())
    others = [["other" in text(row) for row in batch["tokens"]] for batch in batches]
    assert [sum(each) for each in others] == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    of_other = [row.tobytes() for batch in batches for row in batch["tokens"] if "other" in text(row)]
    assert len(set(of_other)) == len(of_other) == 10
    iterator = iter(found["task"].data)
    iterator.set_state({"next_index": 4})
    np.testing.assert_equal(list(iterator), batches[4:])


@pytest.mark.parametrize(
    "phases, problem",
    [
        ("steps: 3", "must have a list of phases"),
        ("- {data: a}", "phase 1 must have steps"),
        ("- {steps: 1}\n- {steps: 0}", "phase 2 has steps: 0, which must be a number above 0"),
        ("- {steps: 1, sequence: 8}", "phase 1 has sequence, and may have steps, data, weights, seq_len, batch"),
        ("- {steps: 1, seq_len: 64}", "phase 1 has 4 rows of 64 tokens, and --batch 4 --seq-len 32 must be at least"),
        ("- [", "is no YAML"),
        ("- {steps: true}", "phase 1 has steps: True, which must be a number above 0"),
        ("- {steps: 1, data: [1]}", r"phase 1 has data: \[1\], which must be a list of names"),
        ("- {steps: 1, data: []}", r"phase 1 has data: \[\], which must be a list of names"),
        ("- {steps: 1, weights: [a]}", r"phase 1 has weights: \['a'\], which must be a list of numbers"),
        ("- {steps: 9, batch: [2, 0]}", r"phase 1 has batch: \[2, 0\], which must be a number above 0, or a list"),
        ("- {steps: 9, batch: []}", r"phase 1 has batch: \[\], which must be a number above 0, or a list"),
        ("- {steps: 9, batch: [2, 8]}", "phase 1 has 8 rows of 32 tokens, and --batch 4"),
        ("- {steps: 1, batch: [2, 4]}", "phase 1 has 1 steps, which are too few for 2 batches"),
        ("- {steps: 1, weights: [[1]]}", r"phase 1 has weights: \[\[1\]\], which must be a list of numbers"),
    ],
)
def test_phases_that_are_wrong(tmp_path, monkeypatch, data, phases, problem):
    (tmp_path / "phases.yaml").write_text(phases)
    with pytest.raises(ValueError, match=problem):
        given(pretrain, pretrain.PretrainOptions, monkeypatch, (str(data),), tmp_path, phases=tmp_path / "phases.yaml")


def test_a_ramp_is_a_phase_for_each_batch(tmp_path):
    (tmp_path / "phases.yaml").write_text("- {steps: 10, batch: [2, 4, 8]}\n- {steps: 5, seq_len: 16}\n")
    whole = sets.Phase(0, ("a",), (), 32, 8)
    known = [(3, 2, 32), (3, 4, 32), (4, 8, 32), (5, 8, 16)]
    found = sets.read_phases(tmp_path / "phases.yaml", whole)
    assert found == [dataclasses.replace(whole, steps=n, batch=b, seq_len=seq) for n, b, seq in known]


def test_only_the_rows_that_a_run_comes_to_are_made(data, tmp_path, monkeypatch):
    """A run makes only the rows that it reaches, and a longer run begins with the same."""
    made, in_memory = [], rows.in_memory
    counted = lambda found, seq_len, limit=None: made.append(limit) or in_memory(found, seq_len, limit=limit)
    monkeypatch.setattr("train.data.sets.in_memory", counted)
    short, long, endless = (
        list(given(sft, sft.SFTOptions, monkeypatch, (str(data),), tmp_path, **how)["task"].data)
        for how in (dict(steps=3), dict(steps=9), dict(steps=0, epochs=2))
    )
    assert made[::2] == [12, 36, None]
    dry = given(sft, sft.SFTOptions, monkeypatch, (str(data),), tmp_path, steps=0, epochs=2, dry_run=True)
    assert dry["steps"] == len(endless)
    np.testing.assert_equal(long[:3], short)
    np.testing.assert_equal(endless[:9], long[: len(endless)])


@pytest.mark.thorough
def test_killed_again_and_again(data, tmp_path):
    """After kill -9 at any moment, two processes make the same store as one undisturbed process."""
    code = "from train.data import store; store.RECORDS = 3; from train import prepare; import tyro\n"
    code += "if __name__ == '__main__': prepare.main(tyro.cli(prepare.PrepareOptions))"
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, tmp_path / "script.py", str(data), "--model", "tiny", "--seq-len", str(SEQ)]
    begin = lambda out, workers: subprocess.Popen(
        [*map(str, command), "--out", str(tmp_path / out), "--workers", workers],
        env=hurry.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    alone = begin("calm", "1")
    said, _ = alone.communicate(timeout=200)
    assert alone.returncode == 0, said
    kills, draw = 0, random.Random(1)
    while True:
        child, seen = begin("killed", "2"), len(list((tmp_path / "killed").glob("*.json")))
        while child.poll() is None and len(list((tmp_path / "killed").glob("*.json"))) < seen + 4:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.05))
        if not (ended := child.poll() is not None):
            os.killpg(child.pid, signal.SIGKILL)
            kills += 1
        said, _ = child.communicate()
        assert not ended or child.returncode == 0, said
        if ended:
            break
    assert kills >= 2  # a busy machine may write several files before the kill
    for path in (tmp_path / "killed").glob("*.tmp"):
        path.unlink()
    assert contents(tmp_path / "killed") == contents(tmp_path / "calm")
