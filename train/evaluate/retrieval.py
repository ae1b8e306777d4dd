"""Metrics of models that embed: how held-out texts are ranked, and how cosines follow scores."""

import collections
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int


Loss = Literal["contrastive", "cosent", "distill"]  # of `train.embed`


class Texts(NamedTuple):
    """The texts of groups: an anchor, a positive, and negatives (see `train.data.groups`)."""

    vectors: Float[Array, "groups texts width"]
    numbers: Int[Array, "groups texts"]  # hashes; -1 where there is no text
    scores: Float[Array, "groups texts"]  # of the records; 0 if they have none

    @property
    def present(self) -> Bool[Array, " groups"]:
        return self.numbers[:, 0] >= 0


def metrics(texts: Texts, *, loss: Loss) -> dict[str, float]:
    """Computes metrics of held-out groups.

    But for "cosent" these are of the rank of each positive among the distinct texts of all groups: "recall@1",
    "recall@10", "mrr" (1 / rank) and "ndcg@10". But for "contrastive" there is "spearman", the correlation of the
    order of the cosines with that of the scores.
    """
    here = np.asarray(texts.numbers)[:, 0] >= 0
    vectors, numbers, scores = (np.asarray(a)[here] for a in texts)
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    found = {}
    if loss != "cosent":
        rank = ranks(vectors, numbers)
        gains = np.where(rank <= 10, 1 / np.log2(1 + rank), 0)
        found = {"recall@1": rank == 1, "recall@10": rank <= 10, "mrr": 1 / rank, "ndcg@10": gains}
    if loss != "contrastive":
        cosines = np.einsum("gw,gtw->gt", vectors[:, 0], vectors[:, 1:])
        found["spearman"] = spearman(cosines.reshape(-1), scores[:, 1:].reshape(-1))
    return {name: float(np.mean(values)) for name, values in found.items()}


def ranks(
    vectors: Float[np.ndarray, "groups texts width"], numbers: Int[np.ndarray, "groups texts"]
) -> Int[np.ndarray, " groups"]:
    """Returns the rank of each group's positive, by its cosine with the anchor, among the distinct texts of all groups.

    The positives of other groups with an equal anchor are right, too, and left out.
    """
    candidates, first = np.unique(numbers[:, 1:], return_index=True)
    texts, column = vectors[:, 1:].reshape(-1, vectors.shape[-1])[first], {c: n for n, c in enumerate(candidates)}
    right = collections.defaultdict(list)
    for anchor, positive in numbers[:, :2].tolist():
        right[anchor].append(column[positive])
    found = []
    for group, (anchor, positive, *_) in zip(vectors, numbers.tolist(), strict=True):
        cosines = texts @ group[0]
        own = cosines[column[positive]]
        cosines[right[anchor]] = -np.inf
        found.append(1 + np.count_nonzero(cosines > own))
    return np.array(found)


def spearman(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """Computes Spearman's rank correlation. Equal values have the mean of their ranks."""

    def rank(values: np.ndarray) -> np.ndarray:
        _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[which]

    return float(np.corrcoef(rank(a), rank(b))[0, 1])
