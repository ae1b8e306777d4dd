"""Lets requests in by the server's names and its key, before anything else reads them, and counts the answers."""

import hmac
import re
from collections.abc import Collection

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from zoo.serve.fields import Refusal
from zoo.serve.metrics import Metrics


OPEN = ("/", "/health")  # paths that need no key: they tell nothing of the models


class Guard:
    """An application that lets requests through to `app`.

    They must carry the `key`, if there is one, and call the server by one of its `hosts`; None allows all names. A
    response before the whole body has arrived closes the connection, which would wait for the rest without end.
    """

    def __init__(self, app: Starlette, key: str | None, hosts: Collection[str] | None, metrics: Metrics):
        self._app, self._key, self._hosts, self._metrics = app, key, hosts, metrics
        self._paths = {route.path for route in app.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request, answer = Request(scope), self._app
        arrived = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers

        async def received() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = arrived or (message["type"] == "http.request" and not message.get("more_body", False))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = request.url.path if request.url.path in self._paths else "other"
                self._metrics.add("zoo_requests_total", path=path, status=str(message["status"]))
                if not arrived:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            self._check(request)
        except Refusal as error:
            arrived = False  # so that the connection is closed
            answer = JSONResponse(error.body, error.status)
        await answer(scope, received, sent)

    def _check(self, request: Request) -> None:
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()
        if self._hosts is not None and host not in self._hosts:
            raise Refusal(f"This server is not called {host!r}; if it is, start it with --hosts.", status=421)
        if request.url.path in OPEN or self._key is None:
            return
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise Refusal("The API key is missing or wrong.", status=401, code="invalid_api_key")
