"""Files of web servers, http:// and https://.

One request asks for a file. The head of its answer says whether the copy in the cache folder is still the file; if it
is, the body is not read. fsspec knows a file of the web by its URL alone, and reads for as long as something comes.
"""

import contextlib
import dataclasses
import gzip
import http.client
import pathlib
import urllib.error
import urllib.request
import warnings
from typing import Any, BinaryIO

import fsspec.callbacks

from convert.pacing import paced
from convert.private import public


TIMEOUT = 30  # seconds to connect, and without a byte
SECONDS = 24 * 3600  # most time of an answer
LARGEST = 2**36  # most bytes of an answer that does not say how many it has
PIECE = 2**18  # bytes that are read at a time
PROPERTIES = ("Content-Length", "ETag", "Last-Modified")  # headers that change when a file does


def is_url(name: str) -> bool:
    """Whether a file's name is a URL of a web server."""
    return name.partition("://")[0].lower() in ("http", "https")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A file whose body is still to come."""

    name: str
    response: http.client.HTTPResponse

    @property
    def key(self) -> str:
        """The properties that tell the file from an earlier one of its name."""
        return " ".join(f"{name}={self.response.headers.get(name)}" for name in PROPERTIES)

    def write(self, to: pathlib.Path, bar: fsspec.callbacks.Callback) -> None:
        """Reads the body into a file.

        Raises:
            OSError, http.client.HTTPException: it is not whole, comes too slowly, or does not end.
        """
        encoding = self.response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise OSError(f"its server sends it in the Content-Encoding {encoding}; only gzip is read")
        # Servers call a .gz file gzip, too, which it is by its name: that is not taken off here.
        zipped = encoding != "identity" and not self.name.partition("?")[0].endswith(".gz")
        came = to.with_name(f"{to.name}.came") if zipped else to
        length = self.response.length  # None if the server does not say it
        bar.set_size(length)
        with open(came, "wb") as out:
            try:
                self._copy(self.response.read1, out, bar)
            except TimeoutError:
                raise OSError(f"its server sent nothing for {TIMEOUT} seconds") from None
            size = out.tell()
        if length is not None and size != length:
            raise OSError(f"it came with {size:,} bytes of {length:,}; start again")
        if zipped:
            with gzip.open(came) as packed, open(to, "wb") as out:
                self._copy(packed.read1, out, fsspec.callbacks.NoOpCallback())
            came.unlink()

    def _copy(self, read: Any, out: BinaryIO, bar: fsspec.callbacks.Callback) -> None:
        largest = max(LARGEST, self.response.length or 0)
        for piece in paced(iter(lambda: read(PIECE), b""), _Refused, largest=largest, seconds=SECONDS):
            out.write(piece)
            bar.relative_update(len(piece))


class _Refused(OSError):
    """The server sends too slowly, or without an end."""

    def __str__(self) -> str:
        return f"its server {self.args[0]}"


def opened(url: str, stack: contextlib.ExitStack) -> Opened | None:
    """Asks for a file, and has `stack` end the request. Returns None if there is none.

    Raises:
        OSError, http.client.HTTPException: the server cannot be asked, or refuses.
    """
    # Of other encodings a server may not say how many bytes they have.
    headers = {"User-Agent": "equinox-zoo", "Accept-Encoding": "identity"}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404 and url.endswith(".idx"):
            return None
        raise
    stack.enter_context(response)
    if not any(response.headers.get(name) for name in ("ETag", "Last-Modified")):
        warnings.warn(
            f"The server of {public(url)} gives neither an ETag nor Last-Modified: a change of the file is not noticed "
            "unless its size changes. Give it another name when it does, or fetch it yourself.",
            stacklevel=2,
        )
    return Opened(url, response)
