"""Runs uvicorn with time limits that it lacks: for requests that never arrive, unread responses, and shutdown."""

import asyncio
import ipaddress
import logging
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from zoo.serve.server import Server


class Listener(uvicorn.Server):
    """Serves `server` on an address. At shutdown it takes no new requests, and cuts replies after `grace` seconds."""

    def __init__(self, server: Server, *, host: str, port: int, grace: float, **options: Any):
        # uvicorn would cancel replies without telling clients why, so its own limit comes after ours.
        late = int(grace) + 5
        options = {"http": Timely, "ws": "none", "timeout_graceful_shutdown": late} | options
        super().__init__(uvicorn.Config(server.app(), host=host, port=port, **options))
        self._server, self._grace = server, grace
        if server.api_key is None and not is_own(host):
            logging.getLogger("uvicorn.error").warning(
                "The server has no API key (--api-key), so anybody who reaches %s may use it.", host
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(self._grace, self._server.worker.cut)
        await super().shutdown(sockets)
        cut.cancel()


def is_own(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


class Timely(H11Protocol):
    """An HTTP connection with time limits, where uvicorn would wait for ever.

    The connection is closed if the head of a request is not complete after `Server.SECONDS`, or if the client reads
    fewer than `LEAST` bytes of a response in `SECONDS`. The time of a request begins when the connection opens, or when
    the previous response has ended. The body has the time that the head leaves. The request's `state.deadline` tells
    the server when that time ends, by the event loop's clock.
    """

    SECONDS, LEAST = 30.0, 2**16
    _deadline = 0.0
    _timer: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing is paused until the client has read all
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking:
            self._taking.cancel()

    def _expect(self, left: int) -> None:
        """Waits until the client has read `LEAST` of the `left` bytes, or all of these."""
        self._taking = self.loop.call_later(self.SECONDS, self._measure, left)

    def _measure(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if before - left < self.LEAST:
            self.transport.abort()
        else:
            self._expect(left)

    def handle_events(self) -> None:
        self._watch()
        super().handle_events()
        if self.scope is not None:
            self.scope.setdefault("state", {})["deadline"] = self._deadline
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in self._timer, self._taking:
            if timer:
                timer.cancel()

    def _watch(self) -> None:
        if self.conn.their_state is h11.IDLE:
            if self._timer is None:
                self._deadline = self.loop.time() + Server.SECONDS
                self._timer = self.loop.call_later(Server.SECONDS, self.transport.close)
        elif self._timer:
            self._timer.cancel()
            self._timer = None
