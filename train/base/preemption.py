"""Detection of reasons to save and end: a machine that is about to be taken away, or a file "stop" in the folder."""

import contextlib
import os
import pathlib
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import rich


FILE = "stop"  # in the folder of a run: making it requests the run to stop, and the run removes it
EVENTS = {"preempted": "TRUE", "maintenance-event": "TERMINATE"}  # of Google's metadata -> how the value begins
REASONS = (*(f"Google Cloud ({name})" for name in EVENTS), f"the file {FILE}")
EVERY = 2.0  # seconds between checks
STARTED = time.time()
PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")  # names Google on its machines


@contextlib.contextmanager
def watching(request: Callable[[str], None], out: pathlib.Path | None) -> Iterator[None]:
    """Checks every two seconds, in a thread, for one of REASONS, and calls `request` with the first, once.

    On machines of Google Cloud, TPUs among them, it queries their metadata server, which gives notice 30 seconds or
    more ahead.

    Args:
        out: the run's folder, in the process that checks for its file "stop"; None in the others.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(EVERY):
            if reason := found(out):
                return request(reason)

    thread = threading.Thread(target=watch, daemon=True)
    if out is not None or on_google():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def found(out: pathlib.Path | None) -> str:
    """Returns one of REASONS, or "". Removes a file "stop" that it finds."""
    if on_google():
        for reason, (name, start) in zip(REASONS, EVENTS.items(), strict=False):
            if metadata(name).startswith(start):
                return reason
    if out is None or not (out / FILE).exists():
        return ""
    with contextlib.suppress(FileNotFoundError):
        (out / FILE).unlink()
    return REASONS[-1]


def remove_old(out: pathlib.Path) -> None:
    """Removes a file "stop" that is older than this process, as it was meant for an earlier start of the run."""
    with contextlib.suppress(FileNotFoundError):
        if (out / FILE).stat().st_mtime < STARTED:
            (out / FILE).unlink()
            rich.print(f"{out / FILE} was made before this start, so it is removed, and the run goes on.")


def on_google() -> bool:
    """Whether there is a metadata server of Google Cloud; GCE_METADATA_HOST names another than the usual one."""
    with contextlib.suppress(OSError):
        return "GCE_METADATA_HOST" in os.environ or "Google" in PRODUCT.read_text()
    return False


def metadata(name: str) -> str:
    """Returns an entry of the metadata server about this machine; "" if the server does not answer."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    try:
        asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        return urllib.request.urlopen(asked, timeout=2).read().decode()
    except OSError:
        return ""
