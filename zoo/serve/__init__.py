"""Serves a model by OpenAI's API, for evaluation and small use: `python -m zoo serve SOURCE`.

- `fields.py` checks the fields of requests.
- `worker.py` runs the model in a thread of its own.
- `server.py` answers requests over HTTP.
- `listen.py` keeps connections, and ends them when the server stops.
"""

import contextlib
import dataclasses
import os
from typing import Annotated

import tyro

from zoo.chat import LoadOptions
from zoo.mesh import make_mesh
from zoo.source import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Options for connections: where the server listens, and to whom."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 8000
    """The port to listen on."""
    api_key: str | None = None
    """The key that requests must carry, as OpenAI's clients do; None takes the variable ZOO_API_KEY. Without either no
    key is needed."""
    hosts: tuple[str, ...] = ()
    """The names by which clients may call the server, beside localhost and --host; * for any."""
    grace: float = 20.0
    """Seconds that replies may still take after SIGTERM or Ctrl-C; then they are cut."""


def serve(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    load: tyro.conf.OmitArgPrefixes[LoadOptions] = LoadOptions(),  # noqa: B008 (a value)
    listen: tyro.conf.OmitArgPrefixes[ListenOptions] = ListenOptions(),
    batch: int = 8,
    max_tokens: int = 4096,
    mesh: str | None = None,
) -> None:
    """Serves a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Connections are not encrypted: serve only this machine, or put a proxy that encrypts in front.

    Args:
        source: a zoo name, a Hub repository org/name, or a folder.
        batch: number of replies that are written at the same time; others wait.
        max_tokens: largest number of tokens of a prompt and its reply together. The cache has this room for each reply.
        mesh: number of devices along each axis, such as tensor=4 or fsdp=2,tensor=2. None: one device.
    """
    try:
        from zoo.serve.listen import Listener
        from zoo.serve.server import Server
    except ImportError as error:
        raise SystemExit(f"serve needs starlette and uvicorn ({error}): pip install 'equinox-zoo[serve]'.") from error
    key = os.environ.get("ZOO_API_KEY") if listen.api_key is None else listen.api_key
    if key is not None and not key.strip():
        raise SystemExit(
            "The API key is empty, and would keep nobody out: give --api-key or the variable ZOO_API_KEY a value, or "
            "leave both out."
        )
    opened = Source.open(source)
    model, draft = load.model(opened, None if mesh is None else make_mesh(mesh))
    server = Server(
        source, model, load.tokenizer(opened), batch=batch, max_tokens=max_tokens, draft=draft,
        api_key=key, hosts=(listen.host, *listen.hosts),
    )  # fmt: skip
    listener = Listener(server, host=listen.host, port=listen.port, grace=listen.grace)
    with contextlib.suppress(KeyboardInterrupt):
        listener.run()
    if not listener.started:
        raise SystemExit(3)  # uvicorn has logged why
