"""Reads the body of a server's answer as long as it comes fast enough, and not more than belongs there.

Libraries wait for ever as long as a byte comes now and then.
"""

import time
from collections.abc import Iterable, Iterator


PATIENCE = 60  # seconds over which a server's speed is measured
SLOWEST = 10_000  # bytes a second: slower servers are refused


def paced(
    pieces: Iterable[bytes], error: type[Exception], *, largest: int | None = None, seconds: int | None = None
) -> Iterator[bytes]:
    """Yields the pieces of a body.

    Args:
        error: is raised, with what the server does as its message, if these come more slowly than `SLOWEST`, add up to
            more than `largest` bytes, or take more than so many seconds.
    """
    start = since = time.monotonic()
    total = before = 0
    for piece in pieces:
        yield piece
        total, now = total + len(piece), time.monotonic()
        if largest is not None and total > largest:
            raise error(f"answers with more than {largest / 2**20:,.0f} MiB, the most that belongs there")
        if seconds is not None and now - start > seconds:
            raise error(f"has not ended its answer after {seconds / 3600:.0f} hours, and {total:,} bytes")
        if now - since > PATIENCE:
            if total - before < (now - since) * SLOWEST:
                raise error(f"sent {total - before:,} bytes in the last {now - since:.0f} seconds")
            before, since = total, now
