"""Arrays of few shapes, so that little is compiled."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def bucket(size: int, least: int = 16) -> int:
    """Returns the next power of two, to which arrays are padded so that few shapes are compiled."""
    return max(least, 1 << (size - 1).bit_length())


def rounded(size: int, most: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, 16, ...: a few numbers, at most half as large again; or `most`."""
    power = 1 << max(0, size - 1).bit_length()
    return min(most, 3 * power // 4 if 4 * size <= 3 * power and power >= 4 else power)


def filled(numbers: Sequence[int], count: int, other: int) -> Int[np.ndarray, " count"]:
    """Returns numbers as an array of `count`, with another number in the places of those that there are not."""
    return np.array([*numbers, *[other] * (count - len(numbers))], np.int32)


def padded(
    prompts: Sequence[Sequence[int]], rows: int, seq: int
) -> tuple[Int[np.ndarray, "rows seq"], Int[np.ndarray, " rows"]]:
    """Right-pads prompts, and returns them with their lengths; rows without a prompt are padding."""
    tokens, lengths = np.zeros((rows, seq), np.int32), np.zeros(rows, np.int32)
    for n, prompt in enumerate(prompts):
        tokens[n, : len(prompt)], lengths[n] = prompt, len(prompt)
    return tokens, lengths
