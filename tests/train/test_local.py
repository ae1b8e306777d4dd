"""Fast checkpoints on the hosts' own disks: the newest complete one is used, wherever it is, and is whole bit by bit.

For several processes see test_processes.py, and for a whole run test_scripts.py.
"""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train.test_checkpoint import HOLDER, IDENTITY, OPTIMIZER, assert_same, at, model
from train.state.checkpoint import Checkpoints
from train.state.state import abstract_state, init_state
from zoo.nn.layers import Linear


@pytest.fixture(scope="module")
def placed():
    """Returns a model over two replicas of two devices each; the state is split over all four."""
    mesh = jax.make_mesh((2, 2), ("replica", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = Linear.partition_specs(model(), P("fsdp", None))
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), model(), place)


@pytest.fixture(scope="module")
def first(placed):
    return init_state(placed, OPTIMIZER)


@pytest.fixture
def abstract(placed):
    return abstract_state(placed, OPTIMIZER)


@pytest.fixture
def kept(tmp_path):
    return lambda **options: opened(tmp_path, **options)


def opened(folder, identity=IDENTITY):
    said = []
    kept = Checkpoints(folder / "shared", identity=identity, say=said.append, local=folder / "disk")
    kept.local.say = said.append
    return kept, said


def save(kept, first, *steps, only_local=True):
    for step in steps:
        kept.save(at(step, first), {"next": step}, only_local=only_local)
    kept.check(wait=True)
    kept.local.wait()


def parts(folder):
    """Returns the folder of each step of one process, oldest first."""
    (mine,) = (folder / "disk").glob("*/0")
    return sorted(mine.iterdir(), key=lambda path: int(path.name.split("-")[0]))


def test_the_newest_is_restored_bit_by_bit(kept, first, abstract, tmp_path):
    before, _ = kept()
    save(before, first, 1, only_local=False)
    assert before.steps() == [1]
    again, _ = kept()
    save(again, first, 2, 3, 4)
    assert [path.name.split("-")[0] for path in parts(tmp_path)] == ["3", "4"], "it keeps two"
    after, said = kept()
    state, data = after.restore(abstract)
    assert_same(state, at(4, first))
    assert data == {"next": 4} and not said and after.steps() == [1]
    assert [path.name.split("-")[0] for path in parts(tmp_path)] == ["4"], "one that was not complete would be mixed up"


def test_a_newer_shared_one_wins(kept, first, abstract, tmp_path):
    save(kept()[0], first, 1)
    shared = Checkpoints(tmp_path / "shared", identity=IDENTITY)
    shared.save(at(2, first), {"next": 2})
    shared.close()
    after, said = kept()
    state, data = after.restore(abstract)
    assert_same(state, at(2, first))
    assert data == {"next": 2} and not said and not parts(tmp_path)


def test_an_older_local_one_is_better_than_a_damaged_shared_one(kept, first, abstract, tmp_path):
    before, _ = kept()
    save(before, first, 1, only_local=False)
    save(kept()[0], first, 2)
    shared = Checkpoints(tmp_path / "shared", identity=IDENTITY)
    shared.save(at(3, first), {"next": 3})
    shared.close()
    (tmp_path / "shared" / "3" / "meta.json").write_text("{}")
    after, said = kept()
    assert after.restore(abstract)[1] == {"next": 2} and len(said) == 1 and "step 3 is damaged" in said[0]


@pytest.mark.parametrize("kind", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_one_is_set_aside(kept, first, abstract, tmp_path, kind):
    save(kept()[0], first, 1, 2)
    newest = parts(tmp_path)[-1]
    file = newest / "manifest.json" if kind == "manifest" else max(newest.iterdir(), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content if kind == "flip" else content[: len(content) // 2])
    if kind == "remove":
        file.unlink()
    after, said = kept()
    state, data = after.restore(abstract)
    assert_same(state, at(1, first))
    assert data == {"next": 1} and any("damaged" in text and str(newest) in text for text in said)
    assert newest.with_name(f"{newest.name}.damaged").exists()


def test_a_piece_that_cannot_be_read_is_no_damage(kept, first, abstract, tmp_path, monkeypatch):
    """The start ends, names the file, and changes nothing."""
    save(kept()[0], first, 1, 2)

    def fails(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    newest = parts(tmp_path)[-1]
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", fails)
        with pytest.raises(OSError, match=rf"{newest} cannot be read \(.*Input/output error: '{newest}/.*start again"):
            kept()[0].restore(abstract)
    after, said = kept()
    assert after.restore(abstract)[1] == {"next": 2} and not said


def test_a_piece_that_is_on_no_disk(kept, first, abstract, tmp_path):
    """A piece may be on no disk, as when a host is lost and no replica has its part. Then the manifests lack it."""
    save(kept()[0], first, 1, only_local=False)
    save(kept()[0], first, 2)
    newest = parts(tmp_path)[-1]
    hashes = json.loads((newest / "manifest.json").read_text())
    gone = next(name for name in hashes if name.startswith("1."))
    (newest / "manifest.json").write_text(json.dumps({name: hashes[name] for name in hashes if name != gone}))
    after, said = kept()
    state, data = after.restore(abstract)
    assert_same(state, at(1, first))
    assert data == {"next": 1} and len(said) == 1
    assert "Step 2 on the hosts' own disks is not complete: 1 of " in said[0] and "pieces are on none" in said[0]


def test_another_mesh(kept, placed, first):
    """With as many devices in a replica, one replica is enough; otherwise the pieces differ."""
    save(kept()[0], first, 1, only_local=False)
    save(kept()[0], first, 2)
    for sizes, step in (((1, 2), 2), ((4, 2), 2), ((1, 4), 1)):
        mesh = jax.make_mesh(sizes, ("replica", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        moved = jax.tree.map(lambda a, m=mesh: jax.device_put(a, NamedSharding(m, a.sharding.spec)), placed)
        after, said = kept()
        state, data = after.restore(abstract_state(moved, OPTIMIZER))
        assert_same(state, at(step, init_state(moved, OPTIMIZER)))
        assert data == {"next": step} and bool(said) == (step == 1)


def test_another_run_is_refused(kept, first, abstract):
    save(kept()[0], first, 1)
    with pytest.raises(ValueError, match=r"/1-\d+ is of another run: its identity.data is abc, and now it is xyz"):
        kept(identity=IDENTITY | {"data": "xyz"})[0].restore(abstract)
    assert kept()[0].restore(abstract)[1] == {"next": 1}, "nothing was removed"


def test_a_new_run_in_the_same_place_begins_anew(kept, first, abstract, tmp_path):
    save(kept()[0], first, 1)
    (tmp_path / "shared").rename(tmp_path / "old")
    assert kept()[0].restore(abstract) is None


def test_a_copy_of_a_run_has_its_own(kept, first, abstract, tmp_path):
    """A copied run resumes from the copied checkpoints, and the original's are left alone."""
    before, _ = kept()
    save(before, first, 1, only_local=False)
    save(kept()[0], first, 2)
    shutil.copytree(tmp_path / "shared", tmp_path / "copy" / "shared")
    (original,) = (tmp_path / "disk").iterdir()
    copy = Checkpoints(tmp_path / "copy" / "shared", identity=IDENTITY, local=tmp_path / "disk")
    assert copy.restore(abstract)[1] == {"next": 1}
    copy.close()
    after, said = kept()
    assert after.restore(abstract)[1] == {"next": 2} and not said and parts(tmp_path)[0].is_relative_to(original)


def test_a_run_of_an_earlier_version_keeps_its_own(kept, first, abstract, tmp_path):
    """An earlier version did not note the place of the run."""
    save(kept()[0], first, 1)
    name, _, place = (tmp_path / "shared" / "id").read_text().partition("\n")
    (tmp_path / "shared" / "id").write_text(name)
    assert kept()[0].restore(abstract)[1] == {"next": 1}
    assert (tmp_path / "shared" / "id").read_text() == f"{name}\n{place}"


def test_only_one_run_has_the_folder(kept, first, tmp_path):
    before, _ = kept()
    lock = before.local.folder / "0.lock"
    del before
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock, "0", "1"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(OSError, match=rf"{lock.parent} is in use by another run \(process .*ZOO_LOCAL_CHECKPOINTS"):
            kept()
        other.kill()
    kept()


def test_a_full_disk_does_not_end_the_run(kept, first, abstract, tmp_path):
    """A limit of 100 bytes on file sizes fails like a full disk."""
    before, said = kept()
    save_one = lambda step: before.save(at(step, first), {"next": step}, only_local=True)
    save_one(1)
    before.local.settle()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        for step in range(2, 7):
            save_one(step)
        before.local.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert len(said) == 5 and all("could not be saved" in text and "File too large" in text for text in said)
    assert [path.name.split("-")[0] for path in parts(tmp_path)] == ["1"], "the last complete one stays"
    save_one(7)
    before.local.wait()
    assert kept()[0].restore(abstract)[1] == {"next": 7}


def test_the_state_may_be_donated(kept, first, abstract):
    """The state may be donated: the step that follows overwrites the arrays that are being saved."""
    advance = jax.jit(lambda state: jax.tree.map(lambda a: a + 1, state), donate_argnums=0)
    before, _ = kept()
    state = at(1, first)
    before.save(state, None, only_local=True)
    for _ in range(5):
        state = advance(state)
    before.local.wait()
    restored, _ = kept()[0].restore(abstract)
    assert_same(restored, at(1, first))
    for _ in range(5):
        restored = advance(restored)
    assert_same(restored, state)


def test_after_2038(kept, first, abstract, monkeypatch):
    """A start's time in seconds no longer fits into 32 bits."""
    monkeypatch.setattr("time.time", lambda: 2.0**31 + 5)
    save(kept()[0], first, 1)
    after, _ = kept()
    assert after.restore(abstract)[1] == {"next": 1} and after.local._attempt > 2**31


def test_an_orderly_end_leaves_nothing(kept, first, tmp_path):
    before, _ = kept()
    before.save(at(1, first), None, only_local=True)
    before.save(at(2, first), None)
    before.close()
    assert not list((tmp_path / "disk").iterdir())
