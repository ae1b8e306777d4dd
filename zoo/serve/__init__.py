"""A server that speaks OpenAI's API, for evaluation and small use: `python -m zoo serve SOURCE`.

- `fields.py`: what a request may say.
- `worker.py`: the thread that has the model, and what it writes.
- `server.py`: the answers over HTTP.
"""

import pathlib
from typing import Annotated, Literal

import jax
import tyro
from jax.sharding import AxisType

import zoo


def serve(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    adapter: pathlib.Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    slots: int = 8,
    max_tokens: int = 4096,
    quantize: Literal["int8", "fp8", "nf4"] | None = None,
    dtype: str | None = None,
    mesh: str | None = None,
) -> None:
    """Serves a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    There is no authentication: keep it on this machine, or behind something that has.

    Args:
        source: a zoo name, a Hub repository org/name, or a folder.
        adapter: a folder with an adapter of the model, in PEFT's layout.
        host: the address to listen on.
        port: the port to listen on.
        slots: how many replies are written at the same time; others wait.
        max_tokens: of a prompt and its reply together, at most; the cache has room for these in every slot.
        quantize: hold the layers' weights in 8 or 4 bits.
        dtype: of the weights, float32, bfloat16 or float16; None for the checkpoint's.
        mesh: devices by what they split, such as tensor=4 or fsdp=2,tensor=2; None for one device.
    """
    try:
        import uvicorn

        from zoo.serve.server import Server
    except ImportError as error:
        raise SystemExit(f"serve needs starlette and uvicorn ({error}): pip install 'equinox-zoo[serve]'.") from error
    devices = None if mesh is None else make_mesh(mesh)
    model = zoo.load(source, dtype=dtype, quantize=quantize, mesh=devices)
    model = zoo.peft.load(model, adapter) if adapter else model
    server = Server(source, model, zoo.tokenizer(source), slots=slots, max_tokens=max_tokens)
    uvicorn.run(server.app(), host=host, port=port, timeout_graceful_shutdown=5)


def make_mesh(text: str) -> jax.sharding.Mesh:
    """The mesh that `text` describes, such as "fsdp=2,tensor=2", of the first devices that there are."""
    try:
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise ValueError(f"The mesh {text!r} can't be read: write axes and sizes as in fsdp=2,tensor=2.") from error
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
