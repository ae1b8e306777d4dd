"""Runs uvicorn with two time limits that it lacks: for requests that never arrive whole, and for stopping."""

import asyncio
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from zoo.serve.server import Server


class Listener(uvicorn.Server):
    """Serves `server` on an address. Told to stop, it takes no new requests, and cuts replies after `grace` seconds."""

    def __init__(self, server: Server, *, host: str, port: int, grace: float, **options: Any):
        # uvicorn would cancel replies without telling clients why, so its own limit comes after ours.
        late = int(grace) + 5
        options = {"http": Timely, "ws": "none", "timeout_graceful_shutdown": late} | options
        super().__init__(uvicorn.Config(server.app(), host=host, port=port, **options))
        self._server, self._grace = server, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(self._grace, self._server.worker.cut)
        await super().shutdown(sockets)
        cut.cancel()


class Timely(H11Protocol):
    """Closes a connection if the head of a request is not whole after `SECONDS`. uvicorn would wait for ever."""

    SECONDS = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    def _watch(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._timer = self._timer or self.loop.call_later(self.SECONDS, self.transport.close)
        elif self._timer:
            self._timer.cancel()
            self._timer = None
