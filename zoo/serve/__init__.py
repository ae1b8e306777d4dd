"""Serves a model by OpenAI's API, for evaluation and small use: `python -m zoo serve SOURCE`.

- `fields.py` checks the fields of requests, and `prompts.py` encodes their texts, chats and images.
- `served.py` has the models, and `worker.py` runs them in a thread of its own, where each `reply.py` is written.
- `answers.py` has the forms of answers, `guard.py` lets requests in, and `server.py` answers them over HTTP.
- `texts.py` answers for embeddings, scores and rankings.
- `metrics.py` counts.
- `listen.py` keeps connections, and ends them when the server stops.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated

import tyro
from jax.sharding import Mesh

import zoo
from zoo.chat import LoadOptions
from zoo.generation.decoding import CHUNK
from zoo.generation.speculative import MTPDraft
from zoo.mesh import make_mesh
from zoo.nn.heads import Kind
from zoo.serve.served import Served


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
    adapters: tuple[str, ...] = (),
    head: Kind | None = None,
    batch: int = 8,
    max_tokens: int = 4096,
    chunk: int = CHUNK,
    mesh: str | None = None,
) -> None:
    """Serves a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Connections are not encrypted: serve only this machine, or put a proxy that encrypts in front.

    Args:
        source: a zoo name, a Hub repository org/name, a folder, or a GGUF file.
        adapters: further models of requests, each NAME=FOLDER: the model with the adapter in a folder. They share its
            weights, and each has a cache of its own.
        head: what stands in the place of output embeddings (docs/heads.md), for /v1/embeddings, /v1/score and
            /v1/rerank.
        batch: number of replies that are written at the same time; others wait.
        max_tokens: largest number of tokens of a prompt and its reply together. The cache has this room for each reply.
        chunk: most tokens of prompts that are read between two tokens of a reply, so that a long prompt does not stop
            other replies.
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
    served = models(source, load, dict(map(name_and_folder, adapters)), None if mesh is None else make_mesh(mesh), head)
    server = Server(
        served, batch=batch, max_tokens=max_tokens, chunk=chunk, api_key=key, hosts=(listen.host, *listen.hosts)
    )
    listener = Listener(server, host=listen.host, port=listen.port, grace=listen.grace)
    with contextlib.suppress(KeyboardInterrupt):
        listener.run()
    if not listener.started:
        raise SystemExit(3)  # uvicorn has logged why


def models(
    source: str, load: LoadOptions, adapters: Mapping[str, pathlib.Path], mesh: Mesh | None, head: Kind | None = None
) -> list[Served]:
    """Loads a model, and puts the adapters of folders on it, of which each makes a further model by its name."""
    opened = load.open(source)
    if head is not None:
        if adapters or load.adapter or load.draft or load.images:
            raise ValueError("A model with a head takes no adapters, drafts and images here.")
        model = zoo.load(opened, dtype=load.dtype, quantize=load.quantize, mesh=mesh, head=head)
        return [Served(source, model, load.tokenizer(opened))]
    model, draft = load.model(opened, mesh)
    served = [Served(source, model, load.tokenizer(opened), draft)]
    if adapters and load.adapter:
        raise ValueError("The model has an adapter (--adapter), so that it takes no others: name all by --adapters.")
    for name, folder in adapters.items():
        for warning in zoo.peft.warnings_of(folder, quantize=load.quantize):
            print(warning)
        adapted = zoo.peft.load(model, folder)
        own = dataclasses.replace(draft, model=adapted) if isinstance(draft, MTPDraft) else draft
        served.append(Served(name, adapted, dataclasses.replace(load, adapter=folder).tokenizer(opened), own))
    return served


def name_and_folder(adapter: str) -> tuple[str, pathlib.Path]:
    name, equals, folder = adapter.partition("=")
    if not (name and equals and folder):
        raise SystemExit(f"--adapters {adapter} is not NAME=FOLDER.")
    return name, pathlib.Path(folder)
