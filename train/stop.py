"""Leaving a run in good order when it is told to stop."""

import os
import signal
from typing import Any


class StopRequest:
    """Makes SIGTERM and Ctrl-C a request: `with StopRequest() as stop:`, and leave the loop `if stop.requested`.

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

    def _request(self, number: int, _: Any) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = signal.Signals(number).name
