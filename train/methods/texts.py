"""Texts: tokens of prompts and of completions, with advantages, packed into the rows of batches."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Shaped

from train.data import pictures
from zoo.generation.images import joined_images
from zoo.nn.model import Images
from zoo.text.tokenizer import Tokenizer


TEXTS = 128  # largest number of texts in a row
SHARING = 16  # texts that share a row on average, so that rows can be filled evenly
WORTH = 0.2  # least share of all tokens that branches have to save: cuDNN's attention, the fastest, knows no branches


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
    texts: Sequence[Text],
    rows: int,
    tokenizer: Tokenizer,
    *,
    iterations: int,
    minibatches: int,
    seed: int,
    branches: bool,
) -> list[dict[str, Shaped[np.ndarray, "rows ..."]]]:
    """Returns the batches of a step: for each of its iterations all texts, in another order, in `minibatches` parts.

    Args:
        rows: number of rows of a batch.
        branches: whether texts may be branches, see `packed`.
    """
    random = np.random.RandomState(seed % 2**32)
    orders = [random.permutation(len(texts)) for _ in range(iterations)]
    parts = [part for order in orders for part in np.array_split(order, minibatches)]
    return [packed([texts[n] for n in part], rows, tokenizer, branches=branches) for part in parts]


def packed(
    texts: Sequence[Text], rows: int, tokenizer: Tokenizer, *, branches: bool = False
) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    """Packs texts into rows, as evenly as `_placed` can.

    These are the arrays of `train.data.rows`, and two more: "advantages", equal along a text or a turn, and "old",
    the log-probability with which each target was drawn; and, if texts have them, the tokens' "experts", in the form of
    `zoo.nn.routing.experts_of`, and the targets' "support". Rows are as long as the longest one, rounded up (`few`).

    With `branches`, a row has the beginning that several of its texts share once, if that saves enough (`WORTH`). They
    are branches of one document then, whose trunk is the beginning, and the array "branches" numbers the row's texts.

    Raises:
        ValueError: there are too many texts for these rows.
    """
    if len(texts) > rows * TEXTS:
        raise ValueError(
            f"{len(texts)} texts do not fit {rows} rows of at most {TEXTS}: conversations were split into too many "
            "parts; take a chat template that does not rewrite its past, or fewer --turns."
        )
    _, table, seq_len = places = packing(texts, rows, branches=branches)
    arrays = padding_rows(rows, seq_len)
    if places.branches:
        arrays["branches"] = np.zeros((rows, seq_len), np.int32)
    if texts and texts[0].experts is not None:
        arrays["experts"] = np.zeros((rows, seq_len, *texts[0].experts.shape[1:]), np.int32)
    if texts and texts[0].support is not None:
        arrays["support"] = np.zeros((rows, seq_len, texts[0].support.shape[1]), np.int32)
    arrays_of = list(map(_arrays_of, texts))
    for row, documents in enumerate(table):
        end, branch = 0, 0
        for segment, members in enumerate(documents.values(), 1):
            trunk = places.trunk(members)
            pieces = [
                (members[0], 0, 0, trunk),
                *((n, branch + i, trunk, _length(texts[n])) for i, n in enumerate(members, 1)),
            ]
            for n, number, first, last in pieces:
                here, end = slice(end, end + last - first), end + last - first
                for name, values in arrays_of[n].items():
                    arrays[name][row, here] = values[first:last]
                arrays["segments"][row, here] = segment
                if "branches" in arrays:
                    arrays["branches"][row, here] = number
            branch += len(members)
    if tokenizer.processor is not None:
        in_row = [[texts[n] for members in documents.values() for n in members] for documents in table]
        arrays |= pictures.of_rows([_images(row) for row in in_row], seq_len, tokenizer)
    return arrays


class Beginning(NamedTuple):
    """The beginning of a text, which other texts may share."""

    of: int  # the number of the first text that has it
    length: int  # in tokens; 0: no other text has it


class Packing(NamedTuple):
    """The places of texts in rows."""

    beginnings: list[Beginning]  # of each text
    table: list[dict[int, list[int]]]  # the numbers of each row's texts, by their beginnings
    length: int  # of a row, in tokens

    @property
    def saved(self) -> int:
        """Counts the tokens that rows do not repeat, since several of their texts begin with them."""
        documents = itertools.chain(*(row.values() for row in self.table))
        return sum((len(members) - 1) * self.trunk(members) for members in documents)

    @property
    def branches(self) -> bool:
        """Whether texts of a row that begin alike are branches of one document."""
        return self.saved > 0

    def trunk(self, members: Sequence[int]) -> int:
        """Counts the first tokens of a row's texts with one beginning that the row has once, if there are several."""
        return self.beginnings[members[0]].length if len(members) > 1 else 0


def packing(texts: Sequence[Text], rows: int, *, branches: bool) -> Packing:
    """Finds the places that `packed` gives to texts, with `branches` if that saves enough (`WORTH`).

    Only rows with several texts of one beginning save tokens, so this is decided once all texts have their rows.
    """
    lengths, alone = list(map(_length, texts)), [Beginning(n, 0) for n in range(len(texts))]
    placed = lambda beginnings: Packing(beginnings, *_placed(lengths, beginnings, rows))
    if branches and (shared := placed(_beginnings(texts))).saved >= WORTH * sum(lengths):
        return shared
    return placed(alone)


def _length(text: Text) -> int:
    """Counts the tokens that a text has in a row. Its last token is only a target."""
    return len(text.tokens) - 1


def _beginnings(texts: Sequence[Text]) -> list[Beginning]:
    """Finds the texts that begin with all tokens before the first drawn one of another text.

    The last of these tokens is not shared: each text has it itself, since what follows it is drawn.
    """
    prompt = lambda n: next((k for k, drawn in enumerate(texts[n].logprobs) if drawn is not None), len(texts[n].tokens))
    prompts = [list(text.tokens[: prompt(n)]) for n, text in enumerate(texts)]
    members: dict[int, list[int]] = {}
    of = -1
    for n in sorted(range(len(texts)), key=prompts.__getitem__):  # one that others begin with comes before them
        if of < 0 or not _begins_with(texts[n], texts[of], len(prompts[of])):
            of = n
        members.setdefault(of, []).append(n)
    found = [Beginning(n, 0) for n in range(len(texts))]
    for of, some in members.items():
        if len(some) > 1:
            for n in some:
                found[n] = Beginning(of, len(prompts[of]) - 1)
    return found


def _placed(
    lengths: Sequence[int], beginnings: Sequence[Beginning], rows: int
) -> tuple[list[dict[int, list[int]]], int]:
    """Chooses a row for each text. Returns the numbers of each row's texts, by their beginnings, and the rows' length.

    The length is the least of `few` at which all texts find room. Those with one beginning are placed together, the
    longest first: where it is already, or else in the emptiest row.
    """
    groups: dict[int, list[int]] = {}
    for n in sorted(range(len(lengths)), key=lambda n: beginnings[n].length - lengths[n]):
        groups.setdefault(beginnings[n].of, []).append(n)
    size = {of: sum(lengths[n] for n in some) - (len(some) - 1) * beginnings[of].length for of, some in groups.items()}
    order = [n for of in sorted(groups, key=size.__getitem__, reverse=True) for n in groups[of]]

    def within(most: int) -> list[dict[int, list[int]]] | None:
        table: list[dict[int, list[int]]] = [{} for _ in range(rows)]
        filled, count = [0] * rows, [0] * rows
        for n in order:
            of, shared = beginnings[n]
            more = [lengths[n] - shared * (of in table[r]) for r in range(rows)]
            fitting = [r for r in range(rows) if filled[r] + more[r] <= most and count[r] < TEXTS]
            if not fitting:
                return None
            row = min(fitting, key=lambda r: (more[r], filled[r]))
            table[row].setdefault(of, []).append(n)
            filled[row], count[row] = filled[row] + more[row], count[row] + 1
        return table

    most = few(max(math.ceil(sum(size.values()) / rows), max(lengths, default=0)))
    while (table := within(most)) is None:
        most = few(most + 1)
    return table, most


def _begins_with(text: Text, other: Text, length: int) -> bool:
    """Whether texts without images begin with the same tokens, which went to the same experts."""
    if text.images is not None or other.images is not None or text.tokens[:length] != other.tokens[:length]:
        return False
    if text.experts is None or other.experts is None:
        return True
    return np.array_equal(text.experts[:length], other.experts[:length])


def _arrays_of(text: Text) -> dict[str, Shaped[np.ndarray, "tokens ..."]]:
    """Returns the arrays of a text, as a row has them."""
    length, old = len(text.tokens) - 1, text.logprobs[1:]
    arrays = {
        "tokens": np.array(text.tokens[:-1]), "targets": np.array(text.tokens[1:]),
        "loss_mask": np.array([logprob is not None for logprob in old]),
        "old": np.array([logprob or 0.0 for logprob in old]),
        "positions": np.arange(length),
        "advantages": np.broadcast_to(text.advantage, length),
    }  # fmt: skip
    if text.experts is not None:
        arrays["experts"] = text.experts[:length]
    if text.support is not None:
        arrays["support"] = np.pad(text.support, ((length - len(text.support), 0), (0, 0)))
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
    """Rounds the length of rows up to a multiple of 8, and of a power of two that is at most a sixteenth of it.

    So few lengths are compiled, at most sixteen between one and its double, and few tokens are padding.
    """
    unit = max(8, 1 << max(0, (length - 1).bit_length() - 5))
    return max(unit, math.ceil(length / unit) * unit)
