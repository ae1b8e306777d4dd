"""Requests to stop, from signals and from `train.base.preemption`: the run saves and ends in order.

The exit code shows whether the run should be started again (docs/reliability.md).
"""

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import rich

from train.base import cluster, preemption


# Slurm sends SIGUSR2 before its time limit, by --signal=USR2@120. SIGXCPU comes near a limit on CPU time, and SIGHUP
# when a shell ends.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
REASONS = (*(number.name for number in SIGNALS), *preemption.REASONS)
AGAIN = 75  # exit code, EX_TEMPFAIL: the run is not finished, and the same command should be started again
CODES = {"SIGINT": 128 + signal.SIGINT, preemption.REASONS[-1]: 0}  # exit codes of reasons that come from a person


@contextlib.contextmanager
def handled(by: Callable[[int, Any], None]) -> Iterator[None]:
    """Installs a handler of SIGNALS inside the `with`. A SIGHUP that is ignored, as by nohup, stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {n: signal.signal(n, by) for n in SIGNALS if not (n == signal.SIGHUP and ignored)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(number: int, _: Any) -> None:
    """Ends this process at once: it is the handler before the first step and after the last, with nothing to save."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    name = signal.Signals(number).name
    os.write(2, f"Stopped by {name}, with nothing left to save; the same command goes on.\n".encode())
    os._exit(AGAIN)


class StopRequest:
    """A context that catches SIGNALS and notices: `with StopRequest() as stop:`; leave the loop if `stop.agreed()`.

    `requested` is the signal's name, or another reason, or empty. A second signal ends the process at once.

    Args:
        out: the folder of the run. A file "stop" in it is a request, too, unless it is older than this process.
    """

    def __init__(self, out: pathlib.Path | None = None):
        self.requested, self._signalled = "", False
        self._watching = contextlib.ExitStack()
        self._out = out if jax.process_index() == 0 else None

    def __enter__(self) -> "StopRequest":
        if self._out:
            preemption.remove_old(self._out)
        self._watching.enter_context(handled(self._request))
        self._watching.enter_context(preemption.watching(self._note, self._out))
        return self

    def __exit__(self, *_: Any) -> None:
        self._watching.close()

    def agreed(self) -> str:
        """Returns the reason why a process of the run is to stop, or "". All processes call it at the same point."""
        number = cluster.agree(1 + REASONS.index(self.requested) if self.requested else 0)
        return REASONS[number - 1] if number else ""

    def _note(self, reason: str) -> None:
        self.requested = self.requested or reason

    def _request(self, number: int, _: Any) -> None:
        if self._signalled and number != signal.SIGXCPU:  # SIGXCPU comes every second
            os._exit(128 + number)
        self._signalled = True
        self._note(signal.Signals(number).name)


def stopped(reason: str, step: int) -> NoReturn:
    """Prints that the run was stopped for one of `REASONS` after `step`, which is saved, and exits."""
    rich.print(f"Stopped by {reason} after step {step:,}, which is saved; the same command goes on from it.")
    sys.exit(CODES.get(reason, AGAIN))
