"""Fast checkpoints on each host's own disk, beside those of `train.state.checkpoint` in a folder of all processes.

FOLDER is the environment variable ZOO_LOCAL_CHECKPOINTS. Without it there are none.

    FOLDER/RUN/PROCESS/STEP-ATTEMPT/meta.json      the same as meta.json of a shared checkpoint
    FOLDER/RUN/PROCESS/STEP-ATTEMPT/3.0-64.32-64   rows 0 to 64, columns 32 to 64 of the state's array 3, as raw bytes
    FOLDER/RUN/PROCESS/STEP-ATTEMPT/manifest.json  the SHA-256 of every other file

RUN is in the file "id" beside the shared checkpoints, so a new run in the same place has another RUN. That file also
has the path of the shared checkpoints, so a copy of a run gets another RUN, too. FOLDER/RUN/PROCESS.lock is locked
while the process lives. ATTEMPT is the time, in seconds, at which the processes that saved the step were started:
pieces of different attempts are never put together.

Each process writes the parts of arrays on its own devices, one piece for each part, and waits for no other process. The
state is split over the replicas, so each replica first gets the parts of the others: then every replica has the whole
state on its disks. A step is complete if every piece is undamaged on some disk. A process that lacks a
piece, since its disk was lost or its devices have changed, gets the piece from another process, through JAX. Pieces are
not cut: after a restart with another mesh they fit only if the sizes of all axes but "replica" are the same.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich

from convert import manifest
from train.base import writing
from train.base.cluster import agree, all_or_raise, broadcast, gather
from train.base.lock import lock
from train.state.mesh import replicated
from train.state.state import TrainState


META = "meta.json"
EVERY = 20  # steps between two local checkpoints


def folder() -> pathlib.Path | None:
    """Returns the folder that the environment variable ZOO_LOCAL_CHECKPOINTS names; None if it is not set."""
    name = os.environ.get("ZOO_LOCAL_CHECKPOINTS")
    return pathlib.Path(name) if name else None


class LocalCheckpoints:
    """The checkpoints of one run on the hosts' own disks. All processes call the same methods in the same order.

    Args:
        folder: a folder on this host's disk; made if it is missing.
        shared: the folder of the run's `train.state.checkpoint.Checkpoints`, which keep other runs away.
        say: is called with a line of text when something went wrong and the run can go on: about this host, or in
            process 0 about the run.
    """

    def __init__(self, folder: pathlib.Path, shared: pathlib.Path, say: Callable[[str], None] | None = None):
        self.say = say or _say
        all_or_raise(lambda: jax.process_index() or self._identify(folder, shared))
        self.folder = folder.resolve() / (shared / "id").read_text().split("\n")[0]
        self._mine = self.folder / str(jax.process_index())
        all_or_raise(self._open)
        later = max((attempt + 1 for _, attempt in map(_parsed, self._all())), default=0)  # even if a clock is behind
        self._attempt = agree(later if jax.process_index() else max(later, int(time.time())))
        self._whole = (-1, 0)  # step and attempt of the newest checkpoint that is known to be complete
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: tuple[int, concurrent.futures.Future] | None = None

    def steps(self) -> set[int]:
        """Returns the steps of which this host has a part."""
        return {step for step, _ in map(_parsed, self._all())}

    def save(self, state: TrainState, meta: str) -> None:
        """Saves this process's part of the state in the background, with the `meta` of process 0.

        It first waits for an earlier save that is still in progress. The state may be donated as soon as this returns.
        Steps older than the last complete one are removed first, so there are never more than two. If the save fails in
        a process, as on a full disk, that process prints a warning, and the run goes on.
        """
        self.settle()
        step, text = int(state.step), broadcast(meta.encode(), 0)
        pieces: dict[str, np.ndarray] = {}
        for n, leaf in enumerate(jax.tree.leaves(state)):
            for shard in jax.device_put(leaf, replicated(leaf.sharding)).addressable_shards:
                if (name := _name(n, shard.index, leaf.shape)) not in pieces:
                    pieces[name] = np.array(shard.data)  # a copy
        self._saving = step, self._thread.submit(self._write, self._mine / f"{step}-{self._attempt}", pieces, text)

    def restore(
        self, step: int, abstract: TrainState, check: Callable[[pathlib.Path, dict[str, Any]], None]
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Restores a step with the shardings of `abstract`. Returns the state and its meta; None if it is incomplete.

        A damaged part is renamed, and `say` gets a warning. `say` also gets the reason for None. `check` is called with
        the step's folder and its meta, and raises an error if the meta is of another run.

        Raises:
            OSError: a part that no other disk has cannot be read, which need not be damage.
        """
        attempt = agree(max((attempt for s, attempt in map(_parsed, self._all()) if s == step), default=-1))
        if attempt < 0:
            return None
        parts = _Parts(self._all(), f"{step}-{attempt}")
        try:
            if (found := self._collect(parts, [META], [META], step)) is None:
                return None
            check(self._mine / f"{step}-{attempt}", meta := json.loads(found[META]))
            leaves, tree = jax.tree.flatten(abstract)
            places = [replicated(leaf.sharding) for leaf in leaves]
            every: dict[str, bool] = {}  # piece -> whether a device of this process needs it
            for n, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
                for device, index in place.devices_indices_map(leaf.shape).items():
                    name = _name(n, index, leaf.shape)
                    every[name] = every.get(name, False) or device.process_index == jax.process_index()
            needed = [name for name in every if every[name]]
            if (found := self._collect(parts, list(every), needed, step)) is None:
                return None
            arrays = []
            for n, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
                read = functools.partial(_array, found, n, leaf)
                arrays.append(jax.device_put(jax.make_array_from_callback(leaf.shape, place, read), leaf.sharding))
        finally:
            for part, error in parts.damaged.items():
                self._set_aside(part, error)
        self._whole = step, attempt
        return jax.tree.unflatten(tree, arrays), meta

    def begin(self) -> None:
        """Removes all steps but the restored one. The run goes on from that, or from a shared checkpoint, or anew."""
        agree(0)  # waits until all processes have read
        self._tidy()

    def wait(self) -> None:
        """Waits until this process has written its part, whether or not other processes have."""
        self._thread.shutdown()

    def close(self, saved: int) -> None:
        """Waits for the end of a save. Removes everything unless it is newer than the shared checkpoint of `saved`."""
        self.settle()
        self.wait()
        if saved >= self._whole[0]:
            shutil.rmtree(self.folder, ignore_errors=True)  # also parts of other processes here, which have settled

    def _identify(self, folder: pathlib.Path, shared: pathlib.Path) -> None:
        """Writes the file "id" unless it is there: the run's name, and the path of its shared checkpoints."""
        name, place = secrets.token_hex(6), str(shared.resolve())
        with contextlib.suppress(FileNotFoundError):
            before, _, told = (shared / "id").read_text().partition("\n")
            if told == place:
                return
            if told:
                self.say(
                    f"{shared} was copied or moved from {told}, so it does not use the checkpoints in "
                    f"{folder.resolve() / before}: remove them if no run is left there."
                )
            name = name if told else before  # earlier versions did not write the path
        writing.write(shared / "id", f"{name}\n{place}")

    def _open(self) -> None:
        self._mine.mkdir(parents=True, exist_ok=True)
        if other := lock(self._mine.with_suffix(".lock"), self):
            raise OSError(
                f"{self.folder} is in use by another run ({other}). Wait until it has ended, or take another folder "
                "(ZOO_LOCAL_CHECKPOINTS)."
            )
        for path in self.folder.glob("*/*.unfinished"):
            shutil.rmtree(path, ignore_errors=True)  # another process on this host may have removed it

    def _all(self) -> list[pathlib.Path]:
        """Lists the parts of steps on this host, this process's first: process numbers may change with a restart."""
        found = [path for path in self.folder.glob("*/*") if re.fullmatch(r"\d+-\d+", path.name)]
        return sorted(found, key=lambda path: (path.parent != self._mine, path))

    def _write(self, path: pathlib.Path, pieces: Mapping[str, np.ndarray], meta: bytes) -> None:
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.mkdir()
            (unfinished / META).write_bytes(meta)
            for name, piece in pieces.items():
                (unfinished / name).write_bytes(piece.reshape(-1).view(np.uint8).data)
            manifest.write(unfinished)
            unfinished.rename(path)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def settle(self) -> None:
        """Waits for the end of a save in all processes. If the save failed in any, the step's parts are removed."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        error = saving.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None:
            free = shutil.disk_usage(self._mine).free / 1e9
            self.say(
                f"WARNING: step {step} could not be saved in {self._mine}, where {free:.1f} GB are free: {error} "
                "The run goes on; the next save is tried as planned."
            )
        if agree(error is not None):
            shutil.rmtree(self._mine / f"{step}-{self._attempt}", ignore_errors=True)
        else:
            self._whole = step, self._attempt
        self._tidy()

    def _tidy(self) -> None:
        """Removes all steps but the last complete one, and newer ones that processes on this host have saved."""
        for path in self._all():
            step, attempt = _parsed(path)
            if (step, attempt) != self._whole and (attempt != self._attempt or step < self._whole[0]):
                shutil.rmtree(path, ignore_errors=True)

    def _collect(
        self, parts: "_Parts", every: Sequence[str], needed: Iterable[str], step: int
    ) -> dict[str, bytes] | None:
        """Reads the files that this process needs, from this host's disk or through other processes.

        Args:
            every: all files that some process needs.
            needed: the files that this process needs.

        Returns None if a file is on no disk.
        """
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = dict(zip(needed, pool.map(parts.read, needed), strict=True))
        lacked = gather([name in found and found[name] is None for name in every]).any(0)
        if wanted := [name for name, lacking in zip(every, lacked, strict=True) if lacking]:
            offered = {name: found.get(name) or parts.read(name) for name in wanted}
            offers = gather([offered[name] is not None for name in wanted])
            if gone := int((~offers.any(0)).sum()):
                all_or_raise(parts.refuse_unreadable)
                self._say_once(
                    f"Step {step} on the hosts' own disks is not complete: {gone} of {len(every)} pieces are on none "
                    "of them, or are of another mesh. An older one, or a shared one, is used."
                )
                return None
            self._say_once(
                f"{len(wanted)} of {len(every)} pieces of step {step} come from the disks of other processes."
            )
            for name, source in zip(wanted, offers.argmax(0), strict=True):
                data = broadcast(offered[name] or b"", int(source))
                if name in found:
                    found[name] = data
        return found  # pyright: ignore[reportReturnType]

    def _set_aside(self, path: pathlib.Path, error: Exception) -> None:
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another process on this host may have renamed it already
            path.rename(aside)
        self.say(f"WARNING: a checkpoint on this host is damaged ({error}). It is now {aside}.")

    def _say_once(self, text: str) -> None:
        if jax.process_index() == 0:
            self.say(text)


class _Parts:
    """The parts of one step on this host. It reads their files, and records parts that are damaged or unreadable."""

    def __init__(self, paths: Iterable[pathlib.Path], name: str):
        self.damaged: dict[pathlib.Path, Exception] = {}
        self.unreadable: dict[pathlib.Path, OSError] = {}
        self._hashes: dict[pathlib.Path, dict[str, str]] = {}
        for path in paths:
            if path.name == name:
                try:
                    self._hashes[path] = json.loads((path / manifest.NAME).read_text())
                except manifest.DAMAGE as error:
                    self.damaged[path] = error
                except OSError as error:
                    self.unreadable[path] = error

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file, from the first part that has it undamaged; None if no part has."""
        for path, hashes in self._hashes.items():
            if name in hashes and path not in self.damaged | self.unreadable:
                try:
                    data = (path / name).read_bytes()
                    if hashlib.sha256(data).hexdigest() == hashes[name]:
                        return data
                    raise ValueError(f"{path / name} is not what was written")
                except manifest.DAMAGE as error:
                    self.damaged[path] = error
                except OSError as error:
                    self.unreadable[path] = error
        return None

    def refuse_unreadable(self) -> None:
        for path, error in self.unreadable.items():
            raise OSError(
                f"The checkpoint {path} cannot be read ({error}), which may pass: start again. If it stays, remove "
                "that folder, and an older checkpoint is used."
            )


def _parsed(path: pathlib.Path) -> tuple[int, int]:
    step, _, attempt = path.name.partition("-")
    return int(step), int(attempt)


def _name(n: int, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ranges = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return ".".join([str(n), *(f"{start}-{stop}" for start, stop in ranges)])


def _array(found: Mapping[str, bytes], n: int, leaf: Any, index: Any) -> np.ndarray:
    shape = [len(range(*part.indices(size))) for part, size in zip(index, leaf.shape, strict=True)]
    return np.frombuffer(found[_name(n, index, leaf.shape)], leaf.dtype).reshape(shape)


def _say(text: str) -> None:
    """Prints a message about this host, in any process: rich prints only in process 0."""
    if jax.process_index():
        print(f"Process {jax.process_index()}: {text}", file=sys.stderr, flush=True)
    else:
        rich.print(text)
