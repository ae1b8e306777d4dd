"""A checkpoint is restored bit by bit, and none is used if it is unfinished, damaged or of another run."""

import errno
import fcntl
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reliability import trials
from train.base.stop import StopRequest
from train.run import resume
from train.sft import SFTOptions
from train.state.checkpoint import Checkpoints
from train.state.optim import adamw, rounded, sgd
from train.state.state import TrainState, abstract_state, init_state
from zoo.nn.layers import Linear


ROOT = pathlib.Path(__file__).parents[2]
OPTIMIZER = adamw(lambda step: 0.1)
IDENTITY = {"model": {"hidden_size": 8, "layer_types": ("full", "sliding")}, "data": "abc", "scaling": None}


def model(size=8):
    return Linear(size, 16, bias=True, key=jax.random.key(0))


def at(step, state=None):
    """Returns a state as after `step` steps, with different values everywhere."""
    return jax.tree.map(lambda a: a + step, state or init_state(model(), OPTIMIZER))


def checkpoints(folder, **options):
    said = []
    return Checkpoints(folder, identity=options.pop("identity", IDENTITY), say=said.append, **options), said


def assert_same(got, want):
    same = lambda g, w: g.dtype == w.dtype and g.sharding == w.sharding and (np.asarray(g) == np.asarray(w)).all()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.all(jax.tree.map(same, got, want))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a folder with the checkpoints of steps 1 and 2. Tests copy it, and do not change it."""
    folder = tmp_path_factory.mktemp("saved")
    kept, _ = checkpoints(folder)
    for step in (1, 2):
        kept.save(at(step), {"next": step})
    kept.close()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_restores_the_newest_bit_by_bit(folder):
    kept, said = checkpoints(folder)
    state, data = kept.restore(abstract_state(model(), OPTIMIZER))
    assert_same(state, at(2))
    assert data == {"next": 2} and not said


def test_a_run_whose_identity_has_a_password(tmp_path):
    """A run with a password in its identity, as earlier versions stored it, resumes, also with another password."""
    identity = lambda url: IDENTITY | {"data": {"path": url}}
    kept, _ = checkpoints(tmp_path, identity=identity("s3://me:pa55@host/a"))
    kept.save(at(1), 7)
    kept.close()
    for url in ("s3://***@host/a", "s3://me:0ther@host/a"):
        assert checkpoints(tmp_path, identity=identity(url))[0].restore(abstract_state(model(), OPTIMIZER))[1] == 7
    with pytest.raises(
        ValueError, match=r"its identity.data.path is s3://\*\*\*@host/a, and now it is s3://\*\*\*@host/b"
    ):
        checkpoints(tmp_path, identity=identity("s3://me:pa55@host/b"))[0].restore(abstract_state(model(), OPTIMIZER))


def test_nothing_to_restore(tmp_path):
    assert checkpoints(tmp_path / "new")[0].restore(abstract_state(model(), OPTIMIZER)) is None


@pytest.mark.parametrize(
    "sizes", [(2, 4), (1, 1), *(pytest.param(s, marks=pytest.mark.thorough) for s in ((2, 1), (1, 4), (8, 1)))]
)
def test_onto_other_devices(folder, sizes):
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices)
    place = Linear.partition_specs(model(), P("tensor", "fsdp"))
    placed = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), model(), place)
    state, _ = checkpoints(folder)[0].restore(abstract_state(placed, OPTIMIZER))
    assert_same(state, at(2, init_state(placed, OPTIMIZER)))
    assert state.opt_state[1][0].mu.weight.sharding.spec == P("tensor", "fsdp")


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
    """The state may be donated: the step that follows overwrites the arrays that are being saved."""
    advance = jax.jit(lambda state: jax.tree.map(lambda a: a + 1, state), donate_argnums=0)
    state = TrainState(jnp.int32(1), jnp.zeros((1024, 1024)), jnp.zeros((1024, 1024)))
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    kept, _ = checkpoints(tmp_path)
    for step in range(1, 4):
        kept.save(state, step)
        for _ in range(5):
            advance(jax.tree.map(jnp.copy, state))
        state = advance(state)
        kept.check(wait=True)
        got, data = kept.restore(abstract)
        assert data == step == got.step
        assert (got.model == step - 1).all() and (got.opt_state == step - 1).all()


def test_a_save_is_finished_when_the_run_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), checkpoints(tmp_path)[0] as kept:
        kept.save(at(1), None)
        raise ZeroDivisionError
    assert checkpoints(tmp_path)[0].steps() == [1]


def test_keeps_the_last(tmp_path):
    kept, _ = checkpoints(tmp_path, keep=2)
    for step in range(1, 8):
        kept.save(at(step), None)
    kept.save(at(7), "again")
    kept.close()
    assert kept.steps() == [6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]


@pytest.mark.thorough
def test_all_damage_is_found(saved, tmp_path, record_property):
    """If a file of the newest checkpoint has a flipped bit or a zeroed page, or is cut or missing, the one before is
    used.
    """
    files = [path.relative_to(saved) for path in (saved / "2").rglob("*") if path.is_file() and path.stat().st_size]
    abstract, choose = abstract_state(model(), OPTIMIZER), random.Random(0)
    meta = json.loads((saved / "2" / "meta.json").read_text())
    assert "2/meta.json" in map(str, files) and meta["data"] == {"next": 2}
    found = same = 0
    cases = files + choose.choices(files, k=trials(100, 1000, 10_000) - len(files))
    for n, name in enumerate(cases):
        folder = shutil.copytree(saved, tmp_path / "checkpoints")
        file, kind = folder / name, choose.choice(["flip", "flip", "zero", "cut", "remove"])
        content = bytearray(before := file.read_bytes())
        if kind == "flip":
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        elif kind == "zero":
            first = choose.randrange(len(content))
            content[first : first + 4096] = bytes(len(content[first : first + 4096]))
        file.write_bytes(content[: len(content) // 2] if kind == "cut" else content)
        if kind == "remove":
            file.unlink()
        kept, said = checkpoints(folder)
        state, data = kept.restore(abstract)
        if data == {"next": 2}:
            white = name.name == "manifest.json" and kind == "flip"
            assert white or content == before, "only white space of the manifest may change"
        else:
            assert int(state.step) == 1 and kept.steps() == [1]
            assert len(said) == 1 and "step 2 is damaged" in said[0]
            if n < len(files):
                kept.save(at(2), {"next": 2})
                kept.close()
                assert kept.steps() == [1, 2]
            found += 1
        same += data == {"next": 2}
        del kept  # this also releases its lock
        shutil.rmtree(folder)
    record_property("figure", f"{found} of {len(cases) - same} found, 0 wrong ({same} changed nothing)")


def test_all_damaged(folder):
    for step in (1, 2):
        (folder / str(step) / "meta.json").write_text("{}")
    for _ in range(2):  # the second time only those that were set aside are left
        with pytest.raises(
            OSError, match=r"is undamaged. To begin anew, remove 1.damaged, 2.damaged from there, or.*--out"
        ):
            checkpoints(folder)[0].restore(abstract_state(model(), OPTIMIZER))
    for step in (1, 2):
        shutil.rmtree(folder / f"{step}.damaged")
    assert checkpoints(folder)[0].restore(abstract_state(model(), OPTIMIZER)) is None


def test_a_file_that_cannot_be_read_is_no_damage(folder, monkeypatch):
    """If a file cannot be read, as when a file server fails, the start ends, names the file, and changes nothing."""

    def fails(file, _):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    abstract = abstract_state(model(), OPTIMIZER)
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", fails)
        message = rf"The checkpoint {folder}/2 cannot be read \(.*Input/output error: '{folder}/2/.*start again. If it"
        with pytest.raises(OSError, match=message):
            checkpoints(folder)[0].restore(abstract)
        for source in folder.parent, f"{folder.parent}@2":
            with pytest.raises(OSError, match=message):
                resume.load_state(str(source), abstract, {})
    kept, said = checkpoints(folder)
    assert kept.restore(abstract)[1] == {"next": 2} and kept.steps() == [1, 2] and not said


def test_fewer_steps_than_are_done(folder):
    kept, _ = checkpoints(folder)
    with pytest.raises(ValueError, match=rf"{folder} has done 2 steps, and --steps is 1: give 2 or more"):
        resume.begin(SFTOptions.of(steps=1), folder, kept, abstract_state(model(), OPTIMIZER), {}, 1, at)


def test_one_that_is_asked_for(folder):
    """If a given step cannot be restored, no other is used in its place."""
    kept, said = checkpoints(folder)
    abstract = abstract_state(model(), OPTIMIZER)
    state, data = kept.restore(abstract, step=1)
    assert_same(state, at(1))
    assert data == {"next": 1}
    (folder / "1" / "meta.json").write_text("{}")
    assert kept.restore(abstract, step=1) is None and "step 1 is damaged" in said[-1]
    assert kept.restore(abstract, step=1) is None and kept.steps() == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "xyz"}, "identity.data is abc, and now it is xyz"),
        ({"model": {"hidden_size": 9, "layer_types": ["full", "sliding"]}}, "hidden_size is 8, and now it is 9"),
        ({"scaling": 8.0}, "identity.scaling is None, and now it is 8.0"),
        ({"seed": 0}, "identity.seed is missing, and now it is 0"),
        ({"data": {"files": {"a.txt": "1"}}}, "identity.data is abc, and now it is missing"),
    ],
)
def test_another_run_is_refused(folder, changes, message):
    kept, _ = checkpoints(folder, identity=IDENTITY | changes)
    with pytest.raises(ValueError, match=message):
        kept.restore(abstract_state(model(), OPTIMIZER))
    assert kept.steps() == [1, 2]


@pytest.mark.parametrize("other", [sgd(lambda step: 0.1), rounded(OPTIMIZER, "bfloat16")])
def test_another_optimizer_is_refused(folder, other):
    with pytest.raises(ValueError, match=r"its state.opt_state\.1.* Set --optimizer and --moments back to go on"):
        checkpoints(folder)[0].restore(abstract_state(model(), other))


def test_another_model_is_refused(folder):
    with pytest.raises(ValueError, match=r"state.model.weight is float32\[16, 8\], and now it is float32\[16, 9\]"):
        checkpoints(folder)[0].restore(abstract_state(model(9), OPTIMIZER))
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, at(0))
    with pytest.raises(ValueError, match="and now it is bfloat16"):
        checkpoints(folder)[0].restore(half)


def test_a_state_that_is_not_finite_is_refused(tmp_path):
    kept, _ = checkpoints(tmp_path)
    bad = eqx.tree_at(lambda s: s.model.bias, at(3), jnp.full(16, jnp.nan))
    with pytest.raises(FloatingPointError, match=r"model.bias is not finite at step 3"):
        kept.save(bad, None)
    kept.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_no_array_of_a_checkpoint_is_not_finite(tmp_path, number):
    """A checkpoint with one element that is not finite, in the model or the optimizer, is refused."""
    kept, _ = checkpoints(tmp_path)
    leaves, structure = jax.tree.flatten(at(3))
    floats = [n for n, leaf in enumerate(leaves) if leaf.dtype.kind == "f"]
    assert len(floats) == 6
    for n in floats:
        bad = [leaf.at[(-1,) * leaf.ndim].set(number) if n == k else leaf for k, leaf in enumerate(leaves)]
        with pytest.raises(FloatingPointError, match=r"(model|opt_state\S*)\.(weight|bias) is not finite at step 3"):
            kept.save(jax.tree.unflatten(structure, bad), None)
    kept.close()
    assert not list(tmp_path.iterdir())


# Orbax's own threads still work on a failed save, and find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(tmp_path):
    """A limit of 1 kB on file sizes fails like a full disk, and later saves succeed."""
    kept, said = checkpoints(tmp_path)
    kept.save(at(1), None)
    kept.check(wait=True)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        for step in (2, 3):
            kept.save(at(step), None)
            kept.check(wait=True)
        assert len(said) == 2 and all(str(tmp_path) in text and "File too large" in text for text in said)
        assert kept.steps() == [1]
        kept.save(at(4), None)
        with pytest.raises(OSError, match="File too large"):
            kept.check(wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    kept.save(at(5), None)
    kept.save(at(6), None)  # removes the file that was being written when the disk was full
    kept.close()
    assert kept.steps()[-2:] == [5, 6] and not list(tmp_path.glob("*.unfinished"))


CHILD = """
import sys
import jax.numpy as jnp
from train.run import resume
from train.state.checkpoint import Checkpoints
from train.state.state import TrainState

kept = Checkpoints(sys.argv[1], identity={})
for step in range(10_000):
    kept.save(TrainState(jnp.int32(step), jnp.full((3000, 1000), float(step)), None), step)
    print(step, flush=True)
"""


@pytest.mark.thorough
def test_killed_while_saving(tmp_path, record_property):
    """Kills come at a moment within a save, and at random moments, some of them within a save, too."""
    zeros = TrainState(jnp.int32(0), jnp.zeros((3000, 1000)), None)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), zeros)
    unfinished, kills, least, choose = 0, 0, trials(3, 30, 200), random.Random(0)
    while kills < least or not unfinished:
        folder = tmp_path / str(kills)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, folder],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        while (started := int(child.stdout.readline())) < 2 + choose.randrange(3):
            pass
        with pytest.raises(OSError, match=rf"{tmp_path} is in use by another run \(process {child.pid} on "):
            checkpoints(folder, identity={})
        while kills % 2 == 0 and not any(folder.glob("*.unfinished")):
            assert child.poll() is None
        child.kill()
        started += len(child.communicate()[0].splitlines())
        left = any(folder.glob("*.unfinished"))
        unfinished, kills = unfinished + left, kills + 1
        kept, said = checkpoints(folder, identity={})
        assert len(said) == left
        state, data = kept.restore(abstract)
        assert data == int(state.step) >= started - 1
        assert (state.model == data).all()
        assert all(path.name.isdigit() for path in folder.iterdir())
    record_property("figure", f"{kills} of {kills} recover, {unfinished} with leftovers, which are removed")


MEMORY = """
import pathlib, sys
import jax
import jax.numpy as jnp
from train.run import resume
from train.state.checkpoint import Checkpoints
from train.state.state import TrainState

def memory(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

arrays = int(sys.argv[3])

def made(n):
    shape = (2**24 // arrays,)
    return jnp.zeros(shape) if arrays == 1 else jax.random.normal(jax.random.key(n), shape)  # no smaller in files

def new():
    return TrainState(jnp.int32(0), *([made(n) for n in range(arrays)] for _ in range(2)))

advance = jax.jit(lambda state: jax.tree.map(lambda a: a + 1, state), donate_argnums=0)
kept = Checkpoints(sys.argv[1], identity={}, keep=1)
place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), jax.eval_shape(new))
advance.lower(abstract).compile()
small, other = TrainState(jnp.int32(0), jnp.zeros(8), ()), Checkpoints(f"{sys.argv[1]}-small", identity={})
other.save(small, None)
other.restore(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), small))
before = memory("VmRSS")  # with all the libraries that restoring loads
pathlib.Path("/proc/self/clear_refs").write_text("5")
found = kept.restore(abstract)
state = found[0] if found else new()
for step in range(3):
    state = jax.block_until_ready(advance(state))
peak, seen = memory("VmHWM") - before, []
for step in range(int(sys.argv[2])):
    kept.save(state, None)
    state = advance(state)
    kept.check(wait=True)
    seen.append(memory("VmRSS"))
kept.close()
half = len(seen) // 2
print(peak / 2**27, *([min(seen[:half]), min(seen[half:])] if seen else []))
"""


def test_arrays_are_read_one_after_another(tmp_path):
    """Arrays are read one by one, so that the host's extra memory, as NumPy traces it, is far less than the state."""
    state = TrainState(jnp.int32(1), *([jnp.full(2**18, n, jnp.float32) for n in range(16)] for _ in range(2)))
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    kept, _ = checkpoints(tmp_path)
    kept.save(state, None)
    kept.check(wait=True)
    tracemalloc.start()
    try:
        got, _ = kept.restore(abstract)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_same(got, state)
    assert peak < 0.3 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux tells it")
def test_memory_of_a_resumed_run(tmp_path, record_property):
    """In three steps a resumed run peaks at little more than its state: 128 MiB in 64 arrays of random numbers. A new
    run's peak is recorded, too. Saves do not make memory grow.
    """

    def run(folder, saves, arrays):
        command = [sys.executable, "-c", MEMORY, tmp_path / folder, str(saves), str(arrays)]
        return [float(word) for word in subprocess.check_output(command, cwd=ROOT, text=True).split()]

    new, early, late = run("two", saves := trials(40, 80, 200), 1)
    run("many", 2, 32)
    (resumed,) = run("many", 0, 32)
    peaks = f"peak {new:.2f} of the state when new, {resumed:.2f} when resumed"
    record_property("figure", f"{peaks}; {late / early - 1:+.1%} over {saves} saves")
    assert resumed < 1.2 and late < 1.02 * early


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, int(sys.argv[3]), int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_that_of_every_process_of_a_run(tmp_path):
    """A living process of a run keeps others away, and a dead one does not. Each process has a place of its own."""
    folder, lock = tmp_path / "checkpoints", tmp_path / "checkpoints.lock"
    hold = lambda *place: subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock, *map(str, place)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for process in (0, 3):
        with hold(process, 1) as other:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(OSError, match=r"in use by another run .*another folder \(--out\)"):
                checkpoints(folder)
            other.kill()
        kept, said = checkpoints(folder)
        assert not said
        with hold(3, 1) as mine, hold(0, 2) as other:
            assert mine.stdout.readline() == "held\n" and other.stdout.readline() == ""
            mine.kill()
        del kept


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    kept, said = checkpoints(tmp_path / "checkpoints")
    assert len(said) == 1 and "can't be locked" in said[0] and "No locks available" in said[0]
    kept.save(at(1), None)
    kept.close()


def test_a_signal_is_a_request():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_the_process():
    code = (
        "import os, signal\nfrom train.base.stop import StopRequest\nwith StopRequest():\n"
        + 2 * " os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 130
