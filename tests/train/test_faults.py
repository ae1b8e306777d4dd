"""Faults in a run: bad steps, their replay, the time lost, profiles, and processes that hang."""

import dataclasses
import json
import math
import os
import re
import resource
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.step.language
import zoo
from tests.train.conftest import command, unspaced, write_words
from train.base import goodput, profiling
from train.run import offending, twice, watchdog
from train.state.state import TrainState
from train.step import nans
from train.step.language import cross_entropy
from train.watch.metrics import read_metrics


def poisoned(model, batch, reference=None, means=None, **options):
    """Returns NaN for a batch with the word qqqqqqqqq, and a thousand times the loss for one with xxxxxxxxx."""
    total, count, sums, reports = cross_entropy(model, batch, reference, means, **options)
    letters = lambda letter: jnp.sum((batch["tokens"] == LETTERS[letter]) & (batch["segments"] != 0))
    poison = jnp.log(8.5 - letters("q").astype(jnp.float32))  # the line with the first NaN
    factor = jnp.where(letters("x") > 8, 1000.0, 1.0) + 0.0 * poison
    return total * factor, count, sums | {"loss": sums["loss"] * factor}, reports


LETTERS = {}


@pytest.fixture(scope="module")
def bad(base):
    """Writes words of which one makes a NaN, and one a spike."""
    write_words(base / "bad.jsonl", 0, count=100)
    lines = [line for line in (base / "bad.jsonl").read_text().splitlines() if not {"q", "x"} & {*line}]
    for at, letter in ((20, "q"), (50, "x")):
        lines[at] = json.dumps({"prompt": letter * 9, "completion": "A"})
    (base / "bad.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = zoo.tokenizer(base / "model")
    LETTERS.update({letter: tokenizer.encode(letter, special=False)[0] for letter in "qx"})
    return base


def options(base, out, *more):
    usual = {
        "model": base / "model", "data": base / "bad.jsonl", "out": out, "epochs": 1, "seq-len": 32, "batch": 4,
        "lr": 1e-3, "save-every": 2, "hold-out": 0, "skip-spikes": 40,
    }  # fmt: skip
    return [str(word) for name, value in usual.items() for word in (f"--{name}", value)] + [*map(str, more)]


@pytest.mark.thorough
@pytest.mark.usefixtures("quick")
def test_bad_steps_change_nothing_and_are_replayed(bad, monkeypatch, capsys):
    """One batch makes a NaN, and one a spike. A run that skips both, and a run that stops at the first and is
    restarted, compute the same bits. There is one profile.
    """
    monkeypatch.setattr(train.step.language, "cross_entropy", poisoned)
    monkeypatch.setattr(offending.Running, "WINDOW", 4)
    skips, stops = bad / "skips", bad / "stops"
    command("train.sft", *options(bad, skips, "--on-nonfinite", "skip", "--profile", "2:3"))
    lines = [line for line in read_metrics(skips / "metrics.jsonl") if "loss" in line]
    nan, spike = (line["step"] for line in lines if line.get("skipped"))
    if not math.isnan(float(lines[nan - 1]["loss"])):
        nan, spike = spike, nan
    assert lines[nan - 1]["loss"] == "nan" and 1000 < lines[spike - 1]["loss"] < math.inf and len(lines) > spike
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(zoo.load(skips / "model")) if a.dtype.kind == "f")
    said = capsys.readouterr().out
    assert f"Step {nan} is not finite: its loss is nan" in said and f"Step {spike} is a spike: its loss is" in said

    # Files that the run has written.
    table = (skips / "profile" / "summary.txt").read_text()
    assert re.search(r"\n +\d+\.\d{3} +\d+\.\d% +\d+\.\d  \S*(dot|fusion|while)", table), table
    seconds = json.loads((skips / "goodput.json").read_text())["seconds"]
    assert seconds["compile"] > 0 and seconds["step"] > 0 and seconds["checkpoint"] > 0 and seconds["lost"] == 0
    assert "Goodput" in said and all(line["step_seconds"] >= 0 <= line["input_seconds"] for line in lines)

    with pytest.raises(SystemExit) as end:
        command("train.sft", *options(bad, stops))
    assert f"Step {nan} is not finite" in end.value.code and f"train.replay {stops}/offending-{nan}" in end.value.code
    assert "Lower --lr" in end.value.code
    assert (stops / "checkpoints" / str(nan)).is_dir()
    repeated, compute = [], twice.twice
    monkeypatch.setattr(twice, "twice", lambda step, n: repeated.append(n) or compute(step, n))
    monkeypatch.setenv("ZOO_CHECK_STEP_EVERY", "2")  # it changes nothing
    command("train.sft", *options(bad, stops))
    assert repeated and repeated == [n for n in range(nan + 1, len(lines) + 1) if n % 2 == 0]
    again = [line for line in read_metrics(stops / "metrics.jsonl") if "loss" in line]
    assert [(a["step"], a["loss"], a["grad_norm"], a["learning_rate"]) for a in lines] == [
        (a["step"], a["loss"], a["grad_norm"], a["learning_rate"]) for a in again
    ]
    assert len(json.loads((stops / "goodput.json").read_text())["starts"]) == 2

    capsys.readouterr()
    command("train.replay", skips / f"offending-{nan}")
    said = capsys.readouterr().out
    assert f"batch-{nan}.npz: its loss is nan, and its gradients' norm nan, bit by bit as in the run." in said
    assert re.search(r"The first NaN is made by `log` at \S+test_faults\.py:\d+ \(poisoned\)", said), said
    assert re.search(r"Of (\d+) gradients \1 are not finite; the first is that of \S+weight", said), said
    assert {path.name for path in skips.glob("offending-*")} == {f"offending-{nan}", f"offending-{spike}"}
    with pytest.raises(SystemExit, match="has no step to replay"):
        command("train.replay", skips / "offending-0")


@pytest.mark.parametrize("fault, named", [(None, ""), (0, "model.weight"), (1, "loss")])
def test_a_step_that_has_other_bits_the_second_time(fault, named):
    """A changed bit, in the state on one of eight devices or in the loss, is reported with the device."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P("fsdp"))
    weight = np.array([0, 1, jnp.nan, *range(13)], jnp.bfloat16)
    state = TrainState(jnp.int32(4), Weight(jax.device_put(weight, place)), (jnp.zeros(2, bool),))
    donating = jax.jit(lambda state: (jax.tree.map(lambda a: a, state), {"loss": jnp.float32(2)}), donate_argnums=0)
    calls = []

    def step(state, batch):
        calls.append(batch)
        new = list(donating(state))
        if len(calls) == 2 and fault == 0:  # the last bit of the sixth device's part
            bits = np.asarray(new[0].model.weight).copy()
            bits.view(np.uint16)[11] ^= 1
            new[0] = dataclasses.replace(new[0], model=Weight(jax.device_put(bits, place)))
        if len(calls) == 2 and fault == 1:
            new[1] = {
                "loss": jax.device_put(np.nextafter(np.float32(2), np.float32(3)), jax.NamedSharding(mesh, jax.P()))
            }
        return tuple(new)

    if fault is None:
        new, numbers = twice.twice(step, 5)(state, "batch")
        assert calls == ["batch"] * 2 and new.step == 4 and numbers["loss"] == 2
        return
    device = ", ".join(map(str, jax.devices()[5:6] if fault == 0 else jax.devices()))  # all devices have the loss
    told = rf"Step 5 was computed twice .* 1 of 4 arrays .* \S*{named} first, in process 0 on {device}\. Its result"
    with pytest.raises(FloatingPointError, match=told):
        twice.twice(step, 5)(state, "batch")


@pytest.mark.parametrize("text", ["often", "-1", "nan"])
def test_a_setting_of_the_machine_that_is_no_number(monkeypatch, text):
    monkeypatch.setenv("ZOO_CHECK_STEP_EVERY", text)
    with pytest.raises(ValueError, match=f"ZOO_CHECK_STEP_EVERY must be a number from 0 on, not '{text}'"):
        twice.is_due(1)


class Weight(eqx.Module):
    weight: jax.Array


def test_limits_follow_the_numbers():
    """The limit follows the numbers' mean and deviation. It stays after a spike, and follows a lasting change."""
    numbers = np.random.RandomState(0).rand(100)
    running = offending.Running()
    assert running.limit(6.0) == math.inf
    for number in numbers:
        running.add(number)
    assert running.limit(6.0) == pytest.approx(numbers.mean() + 6 * numbers.std())
    again = offending.Running(*json.loads(json.dumps([running.count, running.mean, running.variance])))
    assert again.limit(6.0) == running.limit(6.0)
    assert offending.Running(99, 2.0, 0.0).limit(5.0) == pytest.approx(2.1)  # a steady number may vary a little
    steps, high = 0, running.mean + 100 * numbers.std()
    while running.limit(6.0) < high:
        running.add(running.limit(6.0))
        steps += 1
    assert 10 < steps < 40


def test_batches_are_kept_with_their_data_types(tmp_path):
    batch = {"a": np.arange(6).reshape(2, 3), "b": jnp.ones((2, 3), jnp.bfloat16), "c": np.ones((2, 1), np.uint8)}
    offending.write_batch(tmp_path / "b.npz", batch)
    again = offending.read_batch(tmp_path / "b.npz", offending.dtypes(batch))
    assert all(again[k].dtype == batch[k].dtype and (again[k] == np.asarray(batch[k])).all() for k in batch)


def test_the_first_operation_with_a_nan():
    """The first NaN is found in a loop, with its iteration and the infinity before it; masks of -inf do not count."""

    def function(x, masked):
        def layer(x, n):
            y = jnp.exp(jnp.where(n == 2, 1000.0, x))  # the infinity
            z = y - jnp.where(n == 2, y, 0.0)
            return jax.nn.softmax(jnp.where(masked, -jnp.inf, z)), None

        return jnp.sum(jax.checkpoint(lambda x: jax.lax.scan(layer, x, jnp.arange(4))[0])(x))

    arguments = jnp.ones(3), jnp.asarray([True, False, False])
    _, said = nans.first(jax.jit(jax.value_and_grad(function)), *arguments)
    assert re.match(r"The first NaN is made by `sub` at .*test_faults.py:\d+ \(.*layer\).*, in turn 3 of 4", said[0])
    assert re.match(r"The first infinity is made by `exp` at .*test_faults.py:\d+ .*, in turn 3 of 4", said[1])


def test_arrays_that_have_nans_before():
    found, said = nans.first(lambda state: state["a"] * 2, {"a": jnp.asarray([1.0, jnp.nan]), "b": jnp.ones(2)})
    assert said == ["0.a had NaNs before the step."] and jnp.isnan(found[1])


class Time:
    """A clock that tests set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def moved(monkeypatch):
    now = Time()
    monkeypatch.setattr(goodput.time, "monotonic", now)
    monkeypatch.setattr(goodput.time, "time", now)
    goodput.begin()
    yield now
    monkeypatch.undo()
    goodput.begin()


def test_goodput(moved, tmp_path, capsys):
    """Each second counts once. A killed start loses its time after the checkpoint."""

    def spend(phase, seconds):
        with goodput.clock().during(phase):
            moved.now += seconds

    moved.now += 7  # start
    with goodput.Goodput(tmp_path, 0) as found:
        for n in range(1, 21):
            spend("input", 1)
            moved.now += 40 if n == 15 else 2
            if n == 1:
                goodput.clock().compiled(0.5)  # traced within the next span
                goodput.clock().compiled(1.5)
            numbers = found.step(n, tokens=100)
            assert numbers == {"step_seconds": {1: 0.5, 15: 40}.get(n, 2), "input_seconds": 1}
            if n == 10:
                spend("checkpoint", 3)
                found.saving(n)
        killed = (tmp_path / "goodput.json").read_text()
    assert found.table() | {"step": 0} == dict(
        start=7, compile=1.5, input=20, step=0, evaluation=0, checkpoint=3, generation=0, lost=0, away=0
    )
    assert found.table()["step"] == 19 * 2 + 40 - 1.5
    said = capsys.readouterr().out
    assert "Goodput 71% of 108 s: step 71%" in said.replace("\n", " ") and "step 15 (40 s); 1 in all" in said, said

    (tmp_path / "goodput.json").write_text(killed)  # killed after step 20, before it could write more
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (moved.now, moved.now))
    moved.now += 60
    goodput.begin()
    moved.now += 5
    with goodput.Goodput(tmp_path, 10) as found:
        pass
    table = found.table()
    assert table["step"] == 10 * 2 - 1.5 and table["lost"] == 30 + 38 and table["away"] == 60 and table["start"] == 12


def test_goodput_on_a_full_disk(moved, tmp_path, capsys):
    """A limit of a few bytes on file sizes fails like a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with goodput.Goodput(tmp_path, 0) as found:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
            found.saving(1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        said = unspaced(capsys.readouterr().out)
        assert unspaced(f"{tmp_path}/goodput.json can't be written") in said and "Filetoolarge" in said
        assert not list(tmp_path.iterdir())
    assert json.loads((tmp_path / "goodput.json").read_text())["starts"][0]["to"] == 1


def unprofiled(out):
    return profiling.Profile(profiling.ProfileOptions(), out)


def test_a_run_that_hangs(moved, tmp_path, monkeypatch, capfd):
    """SIGUSR1, or a step that takes too long, writes stacks; without any progress the process ends."""
    ended = []
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 1e6)  # it looks only when told to
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    text = lambda: (tmp_path / "stacks-0.txt").read_text()
    monkeypatch.setenv("ZOO_STEP_TIMEOUT", "500")
    with watchdog.Watchdog(unprofiled(tmp_path), tmp_path, 0) as watch:
        for n in (1, 2, 3):
            watch.begin(n, [{"tokens": np.ones((1, 2))}])
            moved.now += 1
            watch.done(n, tokens=1)
        watch.look()
        assert not text()
        signal.raise_signal(signal.SIGUSR1)
        watch.look()
        assert "test_a_run_that_hangs" in text() and "(most recent call first)" in text()
        assert text().count("the last good step was 3") == 1
        moved.now += watchdog.LEAST + 1
        for _ in range(2):  # reported only once
            watch.look()
        assert text().count("the last good step was 3") == 2 and not ended
        moved.now += 500
        watch.look()
    assert ended == [watchdog.AGAIN]
    said = capfd.readouterr().err
    assert "No step for 61 s (step); the median is 1 s" in said
    assert "no progress for 561 s (ZOO_STEP_TIMEOUT) after step 3, in step." in said


def test_errors_name_the_step_and_the_batch(tmp_path):
    dog = watchdog.Watchdog(unprofiled(tmp_path), tmp_path, 4)
    with pytest.raises(RuntimeError) as failed, dog as watch:
        watch.begin(5, [{"tokens": np.ones((1, 2))}])
        raise RuntimeError("out of memory")
    (note,) = failed.value.__notes__
    assert "in step 5; step 4 was the last good one" in note and f"{tmp_path}/failed-5.1.npz" in note
    assert (tmp_path / "failed-5.1.npz").exists() and not (tmp_path / "stacks-0.txt").exists()


@pytest.mark.parametrize("wrong", ["10", "3:2", "0:4", "a:b"])
def test_steps_to_profile(wrong, tmp_path):
    with pytest.raises(ValueError, match=f"--profile {wrong}: give the first and the last step, such as 10:13"):
        profiling.Profile(profiling.ProfileOptions(profile=wrong), tmp_path)
