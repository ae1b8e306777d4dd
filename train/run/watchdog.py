"""The watchdog of a run: it measures where time goes, detects hangs, and notes the step in which an error occurs.

After SIGUSR1, the stacks of all threads are written to stacks-0.txt (for process 0) in the run's folder, with the
number of the last step that was done. The same happens when a step takes ten times as long as others. A run without any
progress is ended.
"""

import contextlib
import faulthandler
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from train.base import cluster, environment
from train.base.goodput import Goodput
from train.base.profiling import Profile
from train.base.stop import AGAIN
from train.run import offending


POLL_SECONDS = 1.0  # seconds between checks
HANGS = 10  # times the median of the steps
LEAST = 60.0  # seconds that a step may always take


def timeout() -> float:
    """Returns the seconds without progress after which a process ends: 1800, or ZOO_STEP_TIMEOUT of the environment.

    A batch, a step, a validation, a checkpoint or a sample is progress; compiling is not.
    """
    return environment.number("ZOO_STEP_TIMEOUT", 1800)


class Watchdog:
    """The watchdog: `with Watchdog(...) as dog:` around the loop, with `begin` and `done` around each step."""

    def __init__(self, profile: Profile, out: pathlib.Path, step: int):
        self.timeout, self.profile, self.out, self.last = timeout(), profile, out, step
        self.goodput = Goodput(out, step)
        self.batches: Sequence[Any] = ()
        self._done, self._saved = threading.Event(), 0.0

    def __enter__(self) -> "Watchdog":
        self.stacks = (self.out / f"stacks-{jax.process_index()}.txt").open("a")
        self._told, self._size = self.last - 1, os.fstat(self.stacks.fileno()).st_size
        faulthandler.register(signal.SIGUSR1, self.stacks, all_threads=True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.goodput.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR1)
        self.stacks.close()
        if not pathlib.Path(self.stacks.name).stat().st_size:
            os.remove(self.stacks.name)
        with contextlib.suppress(Exception) if error else contextlib.nullcontext():
            self.profile.end(self.last)
        if error and not isinstance(error, FloatingPointError | KeyboardInterrupt | SystemExit):
            error.add_note(self._place())
        self.goodput.__exit__(kind, error, trace)

    def begin(self, n: int, batches: Sequence[Any]) -> None:
        """Records that step `n` begins, with its batches."""
        cluster.reached_sync_point()
        self.batches = batches
        saved = self.goodput.clock.seconds["checkpoint"]
        if saved != self._saved:
            self._saved = saved
            self.goodput.saving(n - 1)
        self.profile.begin(n)

    def done(self, n: int, **numbers: Any) -> dict[str, Any]:
        """Records that step `n` is done, with its metrics. Returns the metrics of `Goodput.step`."""
        self.last, self.batches = n, ()
        self.profile.done(n)
        return self.goodput.step(n, **numbers)

    def _place(self) -> str:
        """Returns the step of an error, for its message. Writes the step's batches to the run's folder."""
        clock = self.goodput.clock
        if not self.batches:
            return f"This was after step {self.last} ({clock.phase})."
        text = f"This was in step {self.last + 1}; step {self.last} was the last good one."
        with contextlib.suppress(Exception):  # the first error is the one to report
            if jax.process_index() == 0:
                for number, batch in enumerate(self.batches, 1):
                    offending.write_batch(self.out / f"failed-{self.last + 1}.{number}.npz", batch)
                text += f" Its batch is in {self.out}/failed-{self.last + 1}.1.npz."
        return text

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Writes the stacks if a step hangs, with the last good step below them. Ends the run after the timeout."""
        clock, median = self.goodput.clock, self.goodput.median()
        waited = time.monotonic() - clock.moved
        hangs = clock.phase in ("step", "input") and median and waited > max(LEAST, HANGS * median)
        stuck = waited > self.timeout
        if (hangs and self._told != self.last) or stuck:
            self._told = self.last
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            how = f"{waited:,.0f} s ({clock.phase})" + (f"; the median is {median:.3g} s" if median else "")
            print(f"No step for {how}. Stacks: {self.stacks.name}", file=sys.stderr, flush=True)
        if os.fstat(self.stacks.fileno()).st_size > self._size:  # stacks were written, here or by a signal
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"{now}, process {os.getpid()}: the last good step was {self.last}", file=self.stacks, flush=True)
            self._size = os.fstat(self.stacks.fileno()).st_size
        if stuck:
            reason = f"no progress for {waited:,.0f} s (ZOO_STEP_TIMEOUT) after step {self.last}, in {clock.phase}"
            print(f"{reason}. The same command goes on from the last checkpoint.", file=sys.stderr, flush=True)
            with contextlib.suppress(BaseException):
                cluster.end(f"{reason}.")
            os._exit(AGAIN)
