"""Turns SIGTERM and Ctrl-C into a request to stop, so that a run can save and end in order."""

import os
import signal
from typing import Any

from train import cluster


class StopRequest:
    """Catches SIGTERM and Ctrl-C: use `with StopRequest() as stop:`, and leave the loop if `stop.agreed()`.

    `requested` is the signal's name, or empty. A second signal ends the process at once.
    """

    def __init__(self):
        self.requested = ""

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> str:
        """Returns the signal that any process of the run got, or "". All call it at the same point, and stop there."""
        number = cluster.agree(signal.Signals[self.requested] if self.requested else 0)
        return signal.Signals(number).name if number else ""

    def _request(self, number: int, _: Any) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = signal.Signals(number).name
