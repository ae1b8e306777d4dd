"""Opens images with Pillow: files, URLs, bytes and base64, within limits of size, each refusal naming its source."""

import base64
import dataclasses
import functools
import http.client
import io
import os
import pathlib
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8

from convert.files import regular
from convert.private import public


Image = UInt8[np.ndarray, "_ _ 3"]  # height, width, RGB

# What Pillow is let read. Its other formats are rare, and one of them starts another program (EPS).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of such a file
MAX_PIXELS = 89_478_485  # of an image that is opened, 256 MiB as RGB; Pillow warns of larger ones
MAX_BYTES = 2**30  # of a file
DOWNLOAD_BYTES = 2**25  # at most, of an image from a URL
DOWNLOAD_SECONDS = 30


def open_image(source: str | os.PathLike[str] | bytes | Any, *, remote: bool = False) -> Image:
    """Open an image as RGB, 8 bits a channel: upright, its first frame, on white.

    Upright means turned as its EXIF tag says, as transformers' `load_image` does. What is transparent is laid on white,
    as transformers' processors do with an image that Pillow opened; `load_image` of a path drops transparency instead,
    and shows whatever colours lie beneath. Of 16 bits the upper 8 are kept, where Pillow's `convert("RGB")` makes
    all grey values above 255 white.

    Args:
        source: a path, the bytes of a file, a data: URL in base64, an http(s) URL, or Pillow's image.
        remote: whether http(s) URLs are downloaded: at most `DOWNLOAD_BYTES`, in `DOWNLOAD_SECONDS`.

    Raises:
        ValueError: naming the source, if it cannot be read, is damaged or is no image; has more than `MAX_PIXELS`; has
            floats or 32-bit integers for pixels; or is a URL, and those are not allowed.
    """
    return begin_image(source, remote=remote).decode()


def image_size(source: str | os.PathLike[str] | bytes | Any) -> tuple[int, int]:
    """Tell height and width of an image as `open_image` gives it, without decoding it.

    Raises:
        ValueError: as `begin_image`.
    """
    image = begin_image(source)
    return image.height, image.width


@dataclasses.dataclass(frozen=True)
class Begun:
    """An image of which only the beginning is read, not the pixels. Its size is that of `decode()`, upright."""

    height: int
    width: int
    decode: Callable[[], Image]


def begin_image(source: str | os.PathLike[str] | bytes | Any, *, remote: bool = False) -> Begun:
    """Read an image's size. Arguments are `open_image`'s.

    Raises:
        ValueError: as `open_image`, but for damage behind the beginning.
    """
    from PIL import ExifTags
    from PIL import Image as pillow

    image, name = (source, "the image") if isinstance(source, pillow.Image) else _opened(source, remote)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(_too_large(name))
    if not image.width * image.height:
        raise ValueError(f"{name} has no pixels, but {image.width} x {image.height}: get it anew.")
    try:  # PngImageFile's own getexif decodes the pixels, to find what `_in_front` has found
        turned = pillow.Image.getexif(image).get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception as error:
        raise _damaged(name, error) from error
    height, width = (image.width, image.height) if turned else (image.height, image.width)
    return Begun(height, width, functools.partial(_rgb, image, name))


def _opened(source: str | os.PathLike[str] | bytes, remote: bool) -> tuple[Any, str]:
    """Pillow's image, of which it has read the beginning, and what errors call it."""
    from PIL import Image as pillow

    name, data = _file(source, remote)
    data = _in_front(data) if data.startswith(PNG) else data
    pillow.init()
    try:
        # Some builds of Pillow lack some formats.
        return pillow.open(io.BytesIO(data), formats=[f for f in FORMATS if f in pillow.OPEN]), name
    except pillow.UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise ValueError(f"{name} is no image of a kind that is read ({kinds}): convert it to PNG.") from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ValueError(_too_large(name)) from error
    except Exception as error:  # damage can lead to any in Pillow's readers
        raise _damaged(name, error) from error


def _in_front(data: bytes) -> bytes:
    """Move what a PNG says behind its pixels, such as which side is up, before them, so that they need no decoding."""
    chunks, at = [], len(PNG)
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        chunks.append(data[at:end])
        at = end
    pixels = next((n for n, chunk in enumerate(chunks) if chunk[4:8] == b"IDAT"), len(chunks))
    behind: dict[bool, list[bytes]] = {True: [], False: []}
    for chunk in chunks[pixels:]:
        behind[chunk[4:8] in (b"eXIf", b"iTXt", b"tEXt", b"zTXt")].append(chunk)
    return b"".join([PNG, *chunks[:pixels], *behind[True], *behind[False]])


def _rgb(image: Any, name: str) -> Image:
    """Decode Pillow's image. `name` is for errors."""
    from PIL import Image as pillow
    from PIL import ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        deep = image.mode.startswith(("I", "F"))  # more than 8 bits, of one channel
        if not deep and ("A" in image.getbands() or image.info.get("transparency") is not None):
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
        array = np.array(image if deep else image.convert("RGB"))
    except Exception as error:
        raise _damaged(name, error) from error
    if not deep:
        return array
    if array.dtype.kind == "f" or array.min() < 0 or array.max() >= 2**16:
        raise ValueError(f"{name} has {array.dtype} pixels, of which nothing says what is white: save it in 8 bits.")
    return np.repeat((array >> 8).astype(np.uint8)[..., None], 3, axis=-1)


def _too_large(name: str) -> str:
    return f"{name} has more than {MAX_PIXELS:,} pixels, the most that is opened: make it smaller."


def _damaged(name: str, error: Exception) -> ValueError:
    said = str(error).partition("\n")[0] or type(error).__name__
    return ValueError(f"{name} is damaged or cut off ({said}): get it anew.")


def _file(source: str | os.PathLike[str] | bytes, remote: bool) -> tuple[str, bytes]:
    """Returns the name of the image for error messages, and its bytes."""
    if isinstance(source, bytes):
        name, data = f"the image of {len(source)} bytes", source
    elif isinstance(source, str) and source[:5].lower() == "data:":
        header, comma, payload = source.partition(",")
        name = f"the image {header[:40]},{payload[:20]}..."
        if not comma or not header.lower().endswith(";base64"):
            raise ValueError(f"{name} is no data URL in base64, as in data:image/png;base64,iVBO...")
        try:
            data = base64.b64decode(payload)
        except ValueError as error:
            raise ValueError(f"{name} is no base64 ({error}): encode it anew.") from error
    elif isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        name = public(source)
        if not remote:
            raise ValueError(f"{name} is not downloaded unless that is allowed (remote=True): give a file instead.")
        data = _download(source)
    else:
        try:
            if (size := regular(source)) > MAX_BYTES:  # and no pipe, which may never end
                raise ValueError(f"it has {size:,} bytes, and {MAX_BYTES:,} are the most")
            name, data = str(source), pathlib.Path(source).read_bytes()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{str(source)[:200]!r} cannot be read: {why}.") from error
    if not data:
        raise ValueError(f"{name} is empty: get it anew.")
    return name, data


def _download(url: str) -> bytes:
    data, end = bytearray(), time.monotonic() + DOWNLOAD_SECONDS
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as response:
            while block := response.read1(2**16):
                data += block
                if len(data) > DOWNLOAD_BYTES:
                    raise ValueError(f"it has more than {DOWNLOAD_BYTES:,} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"it takes more than {DOWNLOAD_SECONDS} seconds")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{public(url)} cannot be downloaded ({public(str(error))}): give a file instead.") from error
    return bytes(data)
