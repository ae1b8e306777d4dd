"""Limits how slow and how large the body of a server's response may be.

Libraries wait for ever as long as a byte arrives now and then.
"""

import time
from collections.abc import Iterable, Iterator


PATIENCE = 60  # seconds over which a server's speed is measured
SLOWEST = 10_000  # bytes a second: slower servers are refused


def paced(
    pieces: Iterable[bytes], error: type[Exception], *, largest: int | None = None, seconds: int | None = None
) -> Iterator[bytes]:
    """Yields the pieces of a body, as long as they stay within the limits.

    Args:
        error: raised, with a message such as "sent 10 bytes in the last 61 seconds", if the pieces arrive more slowly
            than `SLOWEST`, exceed `largest` bytes in total, or take longer than `seconds`.
        largest: the most bytes in total (None: no limit).
        seconds: the most seconds in total (None: no limit).
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
