"""Calibration: how far the probabilities of labels are from how often these are right."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zoo.text.questions import KINDS


BINS = 15  # of the expected calibration error, arXiv:1706.04599
TEMPERATURES = np.geomspace(0.1, 10, 201)


class Answers(NamedTuple):
    """The logits of texts' labels, and what is right."""

    logits: Float[Array, "texts labels"]  # -inf of labels that are no options of a question
    target: Int[Array, " texts"]  # the number of a label; or bits, if texts have several labels
    kind: Int[Array, " texts"]  # of the question; -1 where there is no text or question
    present: Bool[Array, " texts"]


def metrics(found: Answers, *, several: bool) -> dict[str, float]:
    """Computes metrics of all texts: "calibration_error"; "f1" over all labels, if texts have `several`.

    For questions also the temperature of each type for which the loss is lowest, such as "temperature_choice", and the
    "calibrated_error" with these.
    """
    here = np.asarray(found.present)
    logits, target, kind = (np.asarray(a)[here] for a in found[:3])
    if several:
        right = (target[:, None] >> np.arange(logits.shape[1]) & 1) == 1
        chosen, p = logits > 0, 1 / (1 + np.exp(-logits.astype(np.float64)))
        sure = np.where(chosen, p, 1 - p)
        f1 = 2 * np.sum(chosen & right) / max(np.sum(chosen) + np.sum(right), 1)
        return {"calibration_error": calibration_error(sure.ravel(), (chosen == right).ravel()), "f1": float(f1)}
    numbers = {"calibration_error": _error(logits, target)}
    calibrated = logits.copy()
    for n, name in enumerate(KINDS):
        if len(here := np.flatnonzero(kind == n)):
            numbers[f"temperature_{name}"] = best = temperature(logits[here], target[here])
            calibrated[here] /= best
    return numbers | ({"calibrated_error": _error(calibrated, target)} if np.any(kind >= 0) else {})


def calibration_error(sure: Float[np.ndarray, " n"], right: Bool[np.ndarray, " n"]) -> float:
    """Computes the expected calibration error: the mean distance of probabilities from how often they are right.

    The distances are those of 15 bins of probabilities, each weighted by its share.
    """
    which = np.minimum((sure * BINS).astype(int), BINS - 1)
    sums = [np.bincount(which, weights, BINS) for weights in (sure, right.astype(float))]
    return float(np.sum(np.abs(sums[0] - sums[1])) / max(len(sure), 1))


def temperature(logits: Float[np.ndarray, "n labels"], target: Int[np.ndarray, " n"]) -> float:
    """Returns the temperature, from 0.1 to 10, that gives the targets the highest likelihood."""
    losses = [-np.mean(_logp(logits / t)[np.arange(len(target)), target]) for t in TEMPERATURES]
    return float(TEMPERATURES[int(np.argmin(losses))])


def _error(logits: Float[np.ndarray, "n labels"], target: Int[np.ndarray, " n"]) -> float:
    p = np.exp(_logp(logits))
    return calibration_error(p.max(axis=1), p.argmax(axis=1) == target)


def _logp(logits: Float[np.ndarray, "n labels"]) -> Float[np.ndarray, "n labels"]:
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
