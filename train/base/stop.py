"""Turns signals, and notices of `train.base.preemption`, into a request to stop: a run saves and ends in order.

The exit code tells whoever started the run whether to start it again (docs/reliability.md).
"""

import contextlib
import os
import pathlib
import signal
import sys
from typing import Any, NoReturn

import jax
import rich

from train.base import cluster, preemption


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)  # Slurm's --signal=USR2@120 comes before its time is up
REASONS = (*(number.name for number in SIGNALS), *preemption.REASONS)
AGAIN = 75  # exit code, EX_TEMPFAIL: the run is not finished, and the same command should be started again
CODES = {"SIGINT": 128 + signal.SIGINT, preemption.REASONS[-1]: 0}  # of reasons that are a person's, who wants it so


class StopRequest:
    """Catches SIGTERM, Ctrl-C, SIGUSR2 and notices: `with StopRequest() as stop:`; leave the loop if `stop.agreed()`.

    `requested` is the signal's name, or another reason, or empty. A second signal ends the process at once.

    Args:
        out: the folder of the run, whose file "stop" is a request too.
    """

    def __init__(self, out: pathlib.Path | None = None):
        self.requested, self._signalled = "", False
        self._watching = contextlib.ExitStack()
        self._out = out if jax.process_index() == 0 else None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._request) for number in SIGNALS}
        self._watching.enter_context(preemption.watching(self._note, self._out))
        return self

    def __exit__(self, *_: Any) -> None:
        self._watching.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> str:
        """Returns why any process of the run is to stop, or "". All call it at the same point, and stop there."""
        number = cluster.agree(1 + REASONS.index(self.requested) if self.requested else 0)
        return REASONS[number - 1] if number else ""

    def _note(self, reason: str) -> None:
        self.requested = self.requested or reason

    def _request(self, number: int, _: Any) -> None:
        if self._signalled:
            os._exit(128 + number)
        self._signalled = True
        self._note(signal.Signals(number).name)


def stopped(reason: str, step: int) -> NoReturn:
    """Ends a process whose run was stopped for one of `REASONS` after so many steps, all saved: says so, and exits."""
    rich.print(f"Stopped by {reason} after step {step:,}, which is saved; the same command goes on from it.")
    sys.exit(CODES.get(reason, AGAIN))
