"""Files of web servers, http:// and https://.

A single request fetches a file. The headers of the response show whether the copy in the cache folder is still current;
if it is, the body is not read. fsspec is not used, as it identifies a file by its URL alone and reads without a limit.
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


TIMEOUT = 30  # seconds to connect, and to wait for the next byte
SECONDS = 24 * 3600  # longest time of a response
LARGEST = 2**36  # most bytes of a response without a Content-Length
PIECE = 2**18  # bytes that are read at a time
PROPERTIES = ("Content-Length", "ETag", "Last-Modified")  # headers that change when a file does


def is_url(name: str) -> bool:
    """Whether a file's name is a URL of a web server."""
    return name.partition("://")[0].lower() in ("http", "https")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A response whose headers are read, and whose body is not."""

    name: str
    response: http.client.HTTPResponse

    @property
    def key(self) -> str:
        """Returns the properties that distinguish the file from an earlier file of the same name."""
        return " ".join(f"{name}={self.response.headers.get(name)}" for name in PROPERTIES)

    def write(self, to: pathlib.Path, bar: fsspec.callbacks.Callback) -> None:
        """Reads the body into a file.

        Raises:
            OSError, http.client.HTTPException: the body is not complete, comes too slowly, or does not end.
        """
        encoding = self.response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise OSError(f"its server sends it in the Content-Encoding {encoding}; only gzip is read")
        # Servers send a .gz file with Content-Encoding gzip, too. Such a file is not unpacked here.
        zipped = encoding != "identity" and not self.name.partition("?")[0].endswith(".gz")
        came = to.with_name(f"{to.name}.came") if zipped else to
        length = self.response.length  # None if the server does not send it
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
    """An error for a server that sends too slowly, or without an end."""

    def __str__(self) -> str:
        return f"its server {self.args[0]}"


def opened(url: str, stack: contextlib.ExitStack) -> Opened | None:
    """Requests a file; `stack` closes the response. Returns None if the server has no such .idx file.

    Raises:
        OSError, http.client.HTTPException: the server cannot be reached, or refuses.
    """
    # With another encoding, a server may not send the number of bytes.
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
