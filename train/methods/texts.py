"""Texts: tokens of prompts and of completions, with advantages, packed into the rows of batches."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Shaped

from train.data import pictures
from zoo.generation.images import joined_images
from zoo.nn.model import Images
from zoo.text.tokenizer import Tokenizer


TEXTS = 64  # largest number of texts in a row
SHARING = 8  # texts that share a row on average, so that rows can be filled evenly


class Text(NamedTuple):
    """Tokens of a prompt and of a completion, or of several by turns. The last one was drawn."""

    tokens: Sequence[int]
    logprobs: Sequence[float | None]  # of each token; None: it was not drawn
    advantage: float | Float[np.ndarray, " targets"]  # of the text, or of each of its tokens but the first
    images: Images | None = None  # the prompt's
    experts: Int[np.ndarray, "tokens layers choices"] | None = None  # those that tokens had, see --router-replay
    support: Int32[np.ndarray, "drawn kept"] | None = None  # of the last tokens, see `train.methods.support`


def rows_of(completions: int, multiple: int) -> int:
    """Returns the number of rows for a number of completions: a multiple of `multiple`."""
    return multiple * math.ceil(completions / SHARING / multiple)


def batches_of(
    texts: Sequence[Text], rows: int, tokenizer: Tokenizer, *, iterations: int, minibatches: int, seed: int
) -> list[dict[str, Shaped[np.ndarray, "rows ..."]]]:
    """Returns the batches of a step: for each of its iterations all texts, in another order, in `minibatches` parts.

    Args:
        rows: number of rows of a batch.
    """
    random = np.random.RandomState(seed % 2**32)
    orders = [random.permutation(len(texts)) for _ in range(iterations)]
    parts = [part for order in orders for part in np.array_split(order, minibatches)]
    return [packed([texts[n] for n in part], rows, tokenizer) for part in parts]


def packed(texts: Sequence[Text], rows: int, tokenizer: Tokenizer) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    """Packs texts into rows: the longest first, each into the row with the fewest tokens so far.

    These are the arrays of `train.data.rows`, and two more: "advantages", equal along a text or a turn, and "old",
    the log-probability with which each target was drawn; and, if texts have them, the tokens' "experts", in the form of
    `zoo.nn.routing.experts_of`, and the targets' "support". Rows are as long as the longest one, rounded up (`few`).

    Raises:
        ValueError: there are too many texts for these rows.
    """
    if len(texts) > rows * TEXTS:
        raise ValueError(
            f"{len(texts)} texts do not fit {rows} rows of at most {TEXTS}: conversations were split into too many "
            "parts; take a chat template that does not rewrite its past, or fewer --turns."
        )
    table: list[list[Text]] = [[] for _ in range(rows)]
    filled = [0] * rows
    length = lambda text: len(text.tokens) - 1  # the last token is only a target
    for text in sorted(texts, key=length, reverse=True):
        row = min((n for n in range(rows) if len(table[n]) < TEXTS), key=filled.__getitem__)
        table[row].append(text)
        filled[row] += length(text)
    seq_len = few(max(filled))
    arrays = padding_rows(rows, seq_len)
    if texts and texts[0].experts is not None:
        arrays["experts"] = np.zeros((rows, seq_len, *texts[0].experts.shape[1:]), np.int32)
    if texts and texts[0].support is not None:
        arrays["support"] = np.zeros((rows, seq_len, texts[0].support.shape[1]), np.int32)
    for n, row in enumerate(table):
        end = 0
        for segment, text in enumerate(row, 1):
            here, end, old = slice(end, end + length(text)), end + length(text), text.logprobs[1:]
            arrays["tokens"][n, here], arrays["targets"][n, here] = text.tokens[:-1], text.tokens[1:]
            arrays["loss_mask"][n, here] = [logprob is not None for logprob in old]
            arrays["old"][n, here] = [logprob or 0.0 for logprob in old]
            arrays["segments"][n, here], arrays["positions"][n, here] = segment, np.arange(length(text))
            arrays["advantages"][n, here] = text.advantage
            if text.experts is not None:
                arrays["experts"][n, here] = text.experts[: length(text)]
            if text.support is not None:
                arrays["support"][n, end - len(text.support) : end] = text.support
    if tokenizer.processor is not None:
        arrays |= pictures.of_rows([_images(row) for row in table], seq_len, tokenizer)
    return arrays


def padding_rows(rows: int, seq: int) -> dict[str, Shaped[np.ndarray, "rows seq"]]:
    """Makes a batch of padding."""
    integers = dict.fromkeys(("tokens", "targets", "loss_mask", "segments", "positions"), np.int32)
    kinds = integers | dict.fromkeys(("advantages", "old"), np.float32)
    return {name: np.zeros((rows, seq), kind) for name, kind in kinds.items()}


def _images(row: Sequence[Text]) -> Images | None:
    """Joins the images of a row's texts."""
    images, end = None, 0
    for text in row:
        length = len(text.tokens) - 1
        images, end = joined_images(images, end, text.images, length), end + length
    return images


def few(length: int) -> int:
    """Rounds the length of rows up to a multiple of 16, and of a power of two that is at most a sixteenth of it.

    So few lengths are compiled, at most sixteen between one and its double, and few tokens are padding.
    """
    unit = max(16, 1 << max(0, (length - 1).bit_length() - 5))
    return max(unit, math.ceil(length / unit) * unit)
