"""Checkpoints of a run: saving and restoring them. Only those that are whole, undamaged and of this run are used.

    checkpoints/400/arrays/        the state: an Orbax checkpoint
    checkpoints/400/meta.json      the run's identity, and its position in the data
    checkpoints/400/manifest.json  the SHA-256 of every other file

Orbax writes the arrays in the background, and reads them onto whatever devices the run has now. This module decides
which folder counts as a checkpoint: a folder gets its name, a number, when all of it is written, and its hashes are
verified before it is used. (Orbax's own manager lists saves that failed or were cut off, and verifies nothing.)

In a run of several processes, each process writes and reads its own parts of the arrays, all in the same folder, and
process 0 does the rest. All processes call the same methods in the same order. An error in one process is raised in
all.
"""

import concurrent.futures
import dataclasses
import errno
import fcntl
import fnmatch
import functools
import json
import logging
import os
import pathlib
import shutil
import socket
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import rich

from convert import manifest
from convert.private import public_json
from train.base.cluster import agree, all_or_raise
from train.base.differences import MISSING, differences
from train.base.goodput import timed
from train.base.options import Group, OptionGroup, option
from train.state.local import EVERY as EVERY_LOCAL
from train.state.local import LocalCheckpoints
from train.state.offload import one_by_one
from train.state.state import TrainState
from zoo.surgery import path_name


FORMAT = 2
DATA = "identity.data*.files.*"  # pattern of the dotted paths of files' hashes; the last part is the file's name
EVERY = 2**31 - 1  # bytes of the lock file, one for each process that a run may have
FAILURES = 3  # number of failed saves in a row after which the run ends

# Parts of an identity that are not the option of the same name: a hash of the model, and whether a best one is kept.
UNLIKE = ("identity.weights", "identity.patience")
logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs pages of tracebacks for each error that it raises


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(OptionGroup):
    """Options for saving, keeping and loading checkpoints."""

    help_group: ClassVar[Group] = Group.RUN

    save_every: int = option(200, identity=False)
    """Number of steps between checkpoints. 0: continuously, each as soon as the last one is written."""
    keep: int = option(2, identity=False)
    """Number of the newest checkpoints that are kept."""
    load_state: str | None = option(None, rare=True)
    """Begin with the full state of another run: RUN, its folder, for its newest checkpoint, or RUN@STEP. The state is
    the weights, the optimizer, the number of the step, and the place in the data if the data is the same. Options may
    differ, except for the model, adapters and the optimizer. --steps counts from the beginning of the other run."""
    accept_data: bool = option(False, rare=True, identity=False)
    """Resume although files of --data have changed since the checkpoint was saved, such as after mending a record. The
    run keeps its place in the order of the records. If the records' number or lengths have changed, some records may
    come twice in this epoch, and some not at all."""
    retired: ClassVar[Mapping[str, str]] = {
        "bin": "old checkpoints are deleted, beside the training.",
    }


class Checkpoints:
    """The checkpoints of one run, in a folder that only it writes to.

    Use it in a `with`, or call `close` at the end, also after an error: a save in progress needs the process alive.

    Args:
        folder: made if it is missing. Leftovers of interrupted saves in it are removed.
        identity: JSON of everything that must stay the same for the run to go on, such as the model's configuration and
            fingerprints of the data and the tokenizer.
        keep: the number of the newest checkpoints to keep.
        say: is called with a line of text when something went wrong and the run can go on.
        accept_data: lets the run go on although files of the data have changed, that is, hashes in `identity` whose
            dotted paths match DATA.
        options: names of the run's options, which an error message uses for values that differ.
        local: a folder on each host's own disk for faster checkpoints (`train.state.local`); None: no such checkpoints.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        identity: Mapping[str, Any],
        keep: int = 3,
        say: Callable[[str], None] = rich.print,
        accept_data: bool = False,
        options: Collection[str] = (),
        local: pathlib.Path | None = None,
    ):
        self.folder, self.identity = pathlib.Path(folder).resolve(), identity
        self.keep, self.say, self.accept_data = keep, say, accept_data
        self.options = options
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: concurrent.futures.Future | None = None
        self._failures = 0
        self._first = jax.process_index() == 0
        all_or_raise(self._open)
        if agree(not self.folder.is_dir()):
            raise OSError(f"Not all processes see {self.folder}; it must be on a file system that they share.")
        all_or_raise(lambda: self._first or self._lock())
        self.local = LocalCheckpoints(local, self.folder) if local else None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.local and kind is not None:
            self.local.wait()
        if kind is None or jax.process_count() == 1:
            self.close()
        elif not issubclass(kind, jax.errors.JaxRuntimeError):  # after such an error a save may wait for a dead process
            self._thread.shutdown()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    @timed("checkpoint")
    def save(self, state: TrainState, data: Any, *, best: int | None = None, only_local: bool = False) -> None:
        """Saves the state in the background, together with `data`: JSON of the run's position in the data.

        It first waits for an earlier save that is still in progress. The state may be donated as soon as this returns.
        The checkpoint of the step `best` is kept, however old it is. If the run has `local` checkpoints, the state is
        saved on the hosts' own disks, too; with `only_local` it is saved only there.

        Raises:
            FloatingPointError: an array of the state is not finite; names the array. Nothing is saved.
            OSError: as in `check`.
        """
        step = int(state.step)
        if not only_local:
            self.check(wait=True)
            if agree(self._first and step in self.steps()):
                return
        paths, arrays = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
        if not (finite := np.asarray(_finite(arrays))).all():
            bad = path_name(paths[int(finite.argmin())])
            raise FloatingPointError(f"{bad} is not finite at step {step}, so this state is not saved.")
        meta = json.dumps(describe(state) | {"identity": self.identity, "data": data})
        if self.local:
            self.local.save(state, meta)
        if only_local:
            return
        unfinished = self.folder / f"{step}.unfinished"
        try:
            all_or_raise(lambda: self._begin(unfinished, meta))
            writing = all_or_raise(lambda: ocp.save_async(str(unfinished / "arrays"), state))
        except OSError as error:
            self._failed(error)
        else:
            self._saving = self._thread.submit(self._finish, unfinished, writing.result, best)

    @timed("checkpoint")
    def check(self, *, wait: bool = False) -> None:
        """Checks whether a save has ended; with `wait`, waits for its end. Call it at every step, to get errors soon.

        With several processes it checks only with `wait`, since a save does not end at the same step in all of them.

        Raises:
            OSError: three saves have failed in a row; gives the reason. For the first two `say` gets a warning.
        """
        if self._saving is not None and (wait or (jax.process_count() == 1 and self._saving.done())):
            saving, self._saving = self._saving, None
            try:
                all_or_raise(saving.result)
            except OSError as error:
                self._failed(error)
            else:
                self._failures = 0

    def local_due(self, n: int) -> bool:
        """Whether a local checkpoint is due after step `n`."""
        return self.local is not None and n % EVERY_LOCAL == 0

    def idle(self) -> bool:
        """Whether no process is still saving. All processes call it at the same point."""
        return not agree(self._saving is not None and not self._saving.done())

    def close(self) -> None:
        """Waits for the end of a save.

        Raises:
            OSError: the last save has failed.
        """
        self.check(wait=True)
        self._thread.shutdown()
        if self.local:
            self.local.close(saved=agree(max(self.steps(), default=-1) if self._first else -1))
        if self._failures:
            raise OSError(f"The last checkpoint could not be saved; {self.folder} has those of steps {self.steps()}.")

    def restore(self, abstract: TrainState, *, step: int | None = None) -> tuple[TrainState, Any] | None:
        """Restores the newest checkpoint, with the shardings of `abstract`. Returns state and `data`, or None.

        A damaged checkpoint is renamed, `say` gets a warning, and the checkpoint before it is used. With `step` it
        restores the checkpoint of that step, or returns None.

        Raises:
            ValueError: the checkpoint is of another run; the error names the difference.
            OSError: all checkpoints are damaged, or one cannot be read, which need not be damage.
        """
        self.check(wait=True)
        found, below = None, np.iinfo(np.int32).max
        while found is None and (newest := agree(max(self._listed(below, step), default=-1))) >= 0:
            below, path = newest, self.folder / str(newest)
            if self.local and step is None:
                found = self.local.restore(newest, abstract, functools.partial(self._refuse_another_run, abstract))
            if found is None and agree(all_or_raise(functools.partial(self._undamaged, path))):
                meta = json.loads((path / "meta.json").read_text())
                if step is None:  # a checkpoint requested by its step was saved by this very run
                    self._refuse_another_run(abstract, path, meta)
                found = read_arrays(path, abstract), meta
        if self.local and step is None:
            self.local.begin()
        if found is None and step is None:
            all_or_raise(self._refuse_all_damaged)
        return found and (found[0], found[1]["data"])

    def _open(self) -> None:
        if self._first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            for path in self.folder.glob("*.unfinished"):
                self.say(f"Removing {path}, which an interrupted save left.")
            self._remove_unfinished()

    def _lock(self) -> None:
        """Keeps other runs away until this process ends, however it ends: each process locks its own byte of a file.

        Process 0 first locks all bytes, which fails while any process of another run is alive. The locks are POSIX
        record locks: NFS and Lustre support them, the system releases them when a process dies, and forked processes do
        not inherit them.
        """
        path = self.folder.with_name(f"{self.folder.name}.lock")
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, file)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, EVERY if self._first else 1, jax.process_index())
            if self._first:
                fcntl.lockf(file, fcntl.LOCK_UN, EVERY, 1)
                os.truncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                self.say(f"WARNING: {path} can't be locked ({error}); see to it that no other run writes there.")
                return
            raise OSError(
                f"{self.folder.parent} is in use by another run ({path.read_text().strip()}). Wait until it has ended, "
                "or take another folder (--out)."
            ) from None

    def _begin(self, unfinished: pathlib.Path, meta: str) -> None:
        if self._first:
            self._remove_unfinished()
            unfinished.mkdir()
            (unfinished / "meta.json").write_text(meta)

    def _listed(self, below: int, only: int | None) -> list[int]:
        """Lists the steps before `below` for which this process finds a checkpoint; or `only` that step."""
        steps = {*(self.steps() if self._first else ()), *(self.local.steps() if self.local else ())}
        return [step for step in steps if step < below and only in (None, step)]

    def _undamaged(self, path: pathlib.Path) -> bool:
        """Whether there is a checkpoint and all of it is undamaged. False in all processes but 0."""
        if not self._first or not path.exists():
            return False
        try:
            manifest.verify(path)
            json.loads((path / "meta.json").read_text())
        except manifest.DAMAGE as error:
            self._set_aside(path, error)
            return False
        except OSError as error:
            raise unreadable(path, error) from error
        return True

    def _refuse_all_damaged(self) -> None:
        if damaged := ", ".join(sorted(path.name for path in self.folder.glob("*.damaged"))) if self._first else "":
            raise OSError(
                f"No checkpoint in {self.folder} is undamaged. To begin anew, remove {damaged} from there, or take "
                "another folder (--out)."
            )

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob("*.unfinished"):
            shutil.rmtree(path, ignore_errors=True)  # a thread of Orbax may still be writing a save that has failed

    def _set_aside(self, path: pathlib.Path, error: Exception) -> None:
        aside = path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        self.say(f"WARNING: the checkpoint of step {path.name} is damaged ({error}). It is now {aside}.")

    def _refuse_another_run(self, abstract: TrainState, path: pathlib.Path, meta: dict[str, Any]) -> None:
        """Raises a ValueError in all processes if `_compare` finds a difference in process 0, which has all hashes."""
        why = self._compare(path, meta, abstract) if self._first else ""
        if agree(bool(why)):
            raise ValueError(why or "Process 0 says why this run does not go on.")

    def _compare(self, path: pathlib.Path, meta: dict[str, Any], abstract: TrainState) -> str:
        """Returns the reason why the run can't go on with a checkpoint; empty if it can."""
        present = {"identity": public_json(self.identity)} | describe(abstract)
        before = {key: meta[key] for key in present}
        # Earlier versions recorded passwords in URLs, and passwords may have changed.
        changed = differences(before | {"identity": public_json(meta["identity"])}, present)
        files = [name for name in changed if fnmatch.fnmatch(name, DATA)]
        if other := [name for name in changed if name not in files]:
            name, (old, new) = other[0], changed[other[0]]
            ours = name == "format" or name.startswith("state.")  # a change of options would be in the identity
            remedy = "Take the version of this project that began it" if ours else "Set that back"
            remedy = "Set --optimizer and --moments back" if name.startswith("state.opt_state.") else remedy
            dtype_alone = name.startswith("state.model.") and old.partition("[")[1:] == new.partition("[")[1:]
            remedy = "Set --weights-dtype back" if dtype_alone else remedy
            option = name.removeprefix("identity.").removeprefix("data.")
            differs = f"its {name} is {old}, and now it is {new}"
            if option in self.options and name not in UNLIKE:
                differs = f"--{option.replace('_', '-')} was {old} and is {new}"
            return (
                f"{path} is of another run: {differs}. {remedy} to go on with it, or "
                "start anew in another folder (--out)."
            )
        hashes = lambda old, new: "is new" if old == MISSING else "is gone" if new == MISSING else "has other contents"
        said = ", ".join(f"{name.split('.files.')[-1]} {hashes(*changed[name])}" for name in files[:3])
        if files and not self.accept_data:
            return (
                f"The data has changed since {path} was saved: {said}. Set it back; or go on with it as it is now by "
                "--accept-data; or start anew in another folder (--out)."
            )
        if files:
            self.say(
                f"WARNING: The data has changed since {path} was saved: {said}. The run goes on with it at the same "
                "place in the order of the records; if their number or lengths are others now, some may come twice in "
                "this epoch, and some not at all."
            )
        return ""

    def _finish(self, unfinished: pathlib.Path, wait: Callable[[], None], best: int | None) -> None:
        wait()
        if self._first:
            manifest.write(unfinished)
            unfinished.rename(unfinished.with_suffix(""))
            for step in {*self.steps()[: -self.keep]} - {best}:
                self._remove(step)

    def _remove(self, step: int) -> None:
        shutil.rmtree((self.folder / str(step)).rename(self.folder / f"{step}.unfinished"))

    def _failed(self, error: BaseException) -> None:
        if self._first:
            self._remove_unfinished()  # otherwise a full disk would stay full
        self._failures += 1
        free = shutil.disk_usage(self.folder).free / 1e9
        text = f"A checkpoint could not be saved in {self.folder}, where {free:.1f} GB are free: {error}"
        if self._failures == FAILURES:
            raise OSError(text) from error
        self.say(f"WARNING: {text} The run goes on; the next save is tried as planned.")


def read_arrays(path: pathlib.Path, abstract: TrainState) -> TrainState:
    """Reads the arrays of a checkpoint, with the shardings of `abstract`, nearly one after another.

    By default Orbax would read all arrays at a time, and each takes its bytes in the host's memory, beside those on the
    devices. The limit is the least with which Orbax reads the largest array.
    """
    context = ocp.Context()
    context.memory.read_concurrent_bytes = 1 + max(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)
    )
    with context:
        return ocp.load(str(path / "arrays"), abstract)


def describe(state: TrainState) -> dict[str, Any]:
    """Returns everything that must be the same in a checkpoint and in the state that it is restored into."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
    return {"format": FORMAT, "state": arrays}


def unreadable(path: pathlib.Path, error: OSError) -> OSError:
    """Makes an error for a checkpoint that may be good, but cannot be read now, as when a file server fails."""
    return OSError(
        f"The checkpoint {path} cannot be read ({error}), which may pass: start again. If it stays, rename that "
        "folder, and the checkpoint before it is used."
    )


@jax.jit
def _finite(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack(one_by_one(lambda array: jnp.isfinite(array).all(), arrays))
