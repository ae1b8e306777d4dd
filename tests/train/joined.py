"""Tasks that each process of test_processes.py runs, one after another, because starting processes takes long.

python -m tests.train.joined COORDINATOR PROCESSES PROCESS '["task", "argument", ...]' ...

In an argument, {process} is replaced by the number of the process.
"""

import importlib
import json
import os
import pathlib
import signal
import string
import sys
import time
import typing
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import train.step.language
import zoo
from train import replay
from train.base import cluster
from train.base.command import CommandOptions, command
from train.base.stop import AGAIN, StopRequest
from train.run import loop, offending
from train.state import checkpoint
from train.state.checkpoint import Checkpoints
from train.state.state import TrainState
from train.step.language import cross_entropy
from zoo.mesh import make_mesh


MARKS = "~~~~~~", "@@@@@@"
PROMPTS = ["The module", "A list", "for i", "def f", "class", "import", "x =", "Return"]


def script(name, *arguments):
    """Runs a training script with these command-line arguments."""
    sys.argv = [name, *arguments]
    module = importlib.import_module(name)
    try:
        command(module.main, typing.get_type_hints(module.main)["o"])
    except SystemExit as end:
        if end.code != AGAIN:
            raise


def quiet(name, *arguments):
    """Runs a script without samples, since a program that generates takes long to compile."""
    with mock.patch.object(zoo, "generate", lambda model, tokenizer, prompts, **_: [""] * len(prompts)):
        script(name, *arguments)


def with_disks(disks, name, *arguments):
    """Runs a task with local checkpoints in this folder, at every second step."""
    with mock.patch.dict(os.environ, ZOO_LOCAL_CHECKPOINTS=disks), mock.patch.object(checkpoint, "EVERY_LOCAL", 2):
        globals()[name](*arguments)


def struck(kind, step, *arguments):
    """Runs a script without samples, in which process 1 gets a signal in this step of the present start."""

    class Stop(StopRequest):
        asked = 0

        def agreed(self):
            self.asked += 1
            if self.asked == int(step) and jax.process_index() == 1:
                os.kill(os.getpid(), signal.Signals[kind])
            return super().agreed()

    with mock.patch.object(loop, "StopRequest", Stop):
        quiet(*arguments)


def generate(devices=None):
    mesh = make_mesh(devices=devices)
    with jax.set_mesh(mesh):
        texts = zoo.generate(zoo.load("tiny", mesh=mesh), zoo.tokenizer("tiny"), PROMPTS, max_new_tokens=4, stop=["?"])
    print(json.dumps(texts))


def write_marked(path):
    """Writes records of one word, of which two are MARKS."""
    texts = [string.ascii_lowercase[n % 20 : n % 20 + 5] for n in range(64)]
    texts[20], texts[50] = MARKS
    path.write_text("".join(json.dumps({"prompt": "a ", "completion": text}) + "\n" for text in texts))
    return path


def poisoned(data):
    """Returns an objective that is NaN for a batch with the record MARKS[0], and a spike for one with MARKS[1]."""
    tokenizer = zoo.tokenizer("tiny")
    lines = [json.loads(line)["completion"] for line in pathlib.Path(data).read_text().splitlines()]
    ids = {text: {*tokenizer.encode(text, special=False)} for text in lines}
    others = set().union(*(found for text, found in ids.items() if text not in MARKS))
    rare = [jnp.asarray(sorted(ids[mark] - others)) for mark in MARKS]

    def objective(model, batch, *more, **options):
        total, count, sums, reports = cross_entropy(model, batch, *more, **options)
        nan, spike = (jnp.isin(batch["tokens"], each).any() for each in rare)
        factor = jnp.where(nan, jnp.nan, jnp.where(spike, 1000.0, 1.0))
        return total * factor, count, sums | {"loss": sums["loss"] * factor}, reports

    return objective


def bad_steps(data, out, *arguments):
    """Fine-tunes on marked records, and replays the NaN. Prints for each step whether it was finite, or a spike."""
    seen: list[tuple[int, bool, bool]] = []
    check = offending.SpikeGuard.check

    def recorded(self, n, state, numbers, *more):
        seen.append((n, bool(numbers["finite"]), bool(numbers["spike"])))
        return check(self, n, state, numbers, *more)

    with (
        mock.patch.object(offending.Running, "WINDOW", 4),
        mock.patch.object(offending.SpikeGuard, "check", recorded),
        mock.patch.object(train.step.language, "cross_entropy", poisoned(data)),
    ):
        quiet("train.sft", "--data", data, "--out", out, *arguments)
        nan = next(n for n, finite, _ in seen if not finite)
        sys.argv = ["train.replay", f"{out}/offending-{nan}"]
        replay.main()
    print(json.dumps(seen))


def known_state(devices=None):
    """Returns a state spread over the devices, and its values."""
    mesh = make_mesh("fsdp=-1", devices)
    random = np.random.default_rng(0)
    values = [random.standard_normal((8, 5)).astype(np.float32), random.integers(-128, 128, (8, 3), np.int8)]
    values, places = (np.int32(7), *values), (P(), P("fsdp"), P("fsdp"))
    put = lambda a, spec: jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda index: a[index])
    return TrainState(*map(put, values, places)), values


def save(folder):
    kept = Checkpoints(folder, identity={})
    kept.save(known_state()[0], {"next": 3})
    kept.close()


def restore(folder):
    """Restores the state of `save`, and checks it bit by bit: each process gets parts from devices of the other."""
    state, values = known_state(jax.devices()[::-1])
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    kept = Checkpoints(folder, identity={})
    restored, data = kept.restore(abstract)
    kept.close()
    assert data == {"next": 3} and restored.step == 7
    for array, value in zip(jax.tree.leaves(restored), values, strict=True):
        assert array.dtype == value.dtype and array.addressable_shards
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()


def fail_to_save(folder):
    """Lets one save fail in process 0 alone. All processes notice it, and the next save succeeds."""
    said, state = [], known_state()[0]
    kept = Checkpoints(folder, identity={}, say=said.append)
    blocked, first = pathlib.Path(folder, "7.unfinished"), jax.process_index() == 0
    if first:
        blocked.write_text("a file where process 0 needs a folder")
    kept.save(state, None)
    assert len(said) == 1 and "could not be saved" in said[0] and not kept.steps()
    if first:
        blocked.unlink()
    kept.save(state, None)
    kept.close()
    assert len(said) == 1 and kept.steps() == [7]


def hang():
    """Lets process 1 live without ever coming to the point where process 0 waits for it."""
    cluster.PATIENCE, cluster.LIMIT = 1, 3
    with cluster.watching(every=0.2):
        cluster.agree(0)
        time.sleep(300 * jax.process_index())
        cluster.agree(0)


def fail(folder):
    """Lets process 1 fail while process 0 is not waiting for it."""

    def main(o):
        with cluster.watching(every=0.2):
            if jax.process_index():
                pathlib.Path(folder).read_text()
            time.sleep(300)

    sys.argv = ["fail"]
    command(main, CommandOptions)


if __name__ == "__main__":
    coordinator, processes, process, *tasks = sys.argv[1:]
    others = dict(JAX_COORDINATOR_ADDRESS=coordinator, NNODES=processes, NODE_RANK=process)
    with mock.patch.dict(os.environ, others):  # the scripts must not join a second time
        cluster.initialize()
    for task in tasks:
        name, *arguments = json.loads(task.replace("{process}", process))
        print(f"===== {task}", flush=True)
        globals()[name](*arguments)
        cluster.agree(0)  # otherwise one opens a folder that the other still uses
