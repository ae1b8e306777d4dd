"""Serves a model by OpenAI's API, for evaluation and small use: `python -m zoo serve SOURCE`.

- `fields.py` checks the fields of requests.
- `worker.py` runs the model in a thread of its own.
- `server.py` answers requests over HTTP.
- `listen.py` keeps connections, and ends them when the server stops.
"""

import contextlib
import os
import pathlib
from typing import Annotated, Literal

import tyro

import zoo
from zoo.chat import load
from zoo.mesh import make_mesh


def serve(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    adapter: pathlib.Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    batch: int = 8,
    max_tokens: int = 4096,
    quantize: Literal["int8", "fp8", "nf4"] | None = None,
    dtype: str | None = None,
    mesh: str | None = None,
    images: bool = False,
    draft: str | None = None,
    num_draft_tokens: int = 4,
    api_key: str | None = None,
    hosts: tuple[str, ...] = (),
    grace: float = 20.0,
    special_in_content: bool = False,
) -> None:
    """Serves a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Connections are not encrypted: serve only this machine, or put a proxy that encrypts in front.

    Args:
        source: a zoo name, a Hub repository org/name, or a folder.
        adapter: a folder with an adapter of the model, in PEFT's layout.
        host: the address to listen on.
        port: the port to listen on.
        batch: number of replies that are written at the same time; others wait.
        max_tokens: largest number of tokens of a prompt and its reply together. The cache has this room for each reply.
        quantize: hold the layers' weights in 8 or 4 bits.
        dtype: data type of the weights: float32, bfloat16 or float16. None: the checkpoint's.
        mesh: number of devices along each axis, such as tensor=4 or fsdp=2,tensor=2. None: one device.
        images: load the model's vision tower too, so that messages may hold images, as data: URLs.
        draft: a smaller model of the same vocabulary, which proposes tokens for the model to check; mtp for the model's
            own module for multi-token prediction.
        num_draft_tokens: number of tokens that the draft proposes at a time.
        api_key: the key that requests must carry, as OpenAI's clients do; None takes the variable ZOO_API_KEY. Without
            either no key is needed.
        hosts: the names by which clients may call the server, beside localhost and --host; * for any.
        grace: seconds that replies may still take after SIGTERM or Ctrl-C; then they are cut.
        special_in_content: encode <|im_end|> and the like in messages of users and tools as control tokens, not as
            text, as transformers does.
    """
    try:
        from zoo.serve.listen import Listener
        from zoo.serve.server import Server
    except ImportError as error:
        raise SystemExit(f"serve needs starlette and uvicorn ({error}): pip install 'equinox-zoo[serve]'.") from error
    key = os.environ.get("ZOO_API_KEY") if api_key is None else api_key
    if key is not None and not key.strip():
        raise SystemExit(
            "The API key is empty, and would keep nobody out: give --api-key or the variable ZOO_API_KEY a value, or "
            "leave both out."
        )
    devices = None if mesh is None else make_mesh(mesh)
    model, drafting = load(
        source, adapter, draft, num_draft_tokens, images, dtype=dtype, quantize=quantize, mesh=devices
    )
    tokenizer = zoo.tokenizer(
        source, chat_template=zoo.peft.template_of(adapter), special_in_content=special_in_content
    )
    server = Server(
        source, model, tokenizer, batch=batch, max_tokens=max_tokens, draft=drafting,
        api_key=key, hosts=(host, *hosts),
    )  # fmt: skip
    listener = Listener(server, host=host, port=port, grace=grace)
    with contextlib.suppress(KeyboardInterrupt):
        listener.run()
    if not listener.started:
        raise SystemExit(3)  # uvicorn has logged why
