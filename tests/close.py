"""Comparisons of two computations of the same numbers, by bounds that follow from rounding.

A sum of n terms in floating point is off by at most gamma_n = n u / (1 - n u) times the sum of their sizes, in
whichever order a CPU adds them (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). u is half of eps.
So two orders differ by at most 2 n u = n eps of that size, and n adds up over sums that follow each other.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


# In a margins run (tests/margins.py), the function that takes the file and line of each comparison, and error / bound.
record: Callable[[str, int, float], None] | None = None


def close(ours, theirs, *, terms: float, size: float | None = None, dtype=None) -> None:
    """Asserts that the largest |ours - theirs| is at most terms * eps * size, in each array of two trees.

    `terms` is the number of roundings along the longest chain: the lengths of the sums that follow each other. `size`
    is the largest |theirs| of the array; say it where the operands of a sum or a difference are larger than the result.
    eps is that of `dtype`, or else of the coarsest among float32 and the types of the two arrays. NaN fails. Infinities
    have to be equal, and do not count for the size. A list of numbers, or of such lists, is an array.
    """
    __tracebackhide__ = True
    for place, one, other in _pairs(ours, theirs):
        kind = _coarsest(one, other) if dtype is None else jnp.dtype(dtype)
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        of = _size(other) if size is None else float(size)
        why = f"{terms:g} roundings of {of:.3g} in {kind}"
        _judge(place, one, other, terms * float(jnp.finfo(kind).eps) * of, why)


def as_exact(ours, plain, exact, *, times: float = 4) -> None:
    """Asserts that ours is about as far from `exact`, which is float64, as the plain formula in the same type is.

    The bound is `times` the error of the plain formula, plus one rounding of the largest |exact|, in each array.
    """
    __tracebackhide__ = True
    for (place, one, want), (_, formula, _) in zip(_pairs(ours, exact), _pairs(plain, exact), strict=True):
        kind = _coarsest(one, formula)
        one, formula, want = (np.asarray(x, np.float64) for x in (one, formula, want))
        own, rounding = _apart(formula, want).max(initial=0), float(jnp.finfo(kind).eps) * _size(want)
        _judge(place, one, want, times * own + rounding, f"{times:g} times the error of the plain formula, {own:.3g},")


def _pairs(ours, theirs):
    """Yields the place and the two arrays for each array of the trees."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(theirs, is_leaf=_are_numbers)
    others = structure.flatten_up_to(ours)
    return [(jax.tree_util.keystr(path), one, other) for (path, other), one in zip(leaves, others, strict=True)]


def _are_numbers(x) -> bool:
    return isinstance(x, list | tuple) and all(isinstance(n, int | float | np.number) or _are_numbers(n) for n in x)


def _coarsest(*arrays):
    kinds = [jnp.dtype(x.dtype) for x in arrays if isinstance(x, np.ndarray | jax.Array)]
    floats = [kind for kind in kinds if jnp.issubdtype(kind, jnp.floating)]
    return max([jnp.dtype(jnp.float32), *floats], key=lambda kind: float(jnp.finfo(kind).eps))


def _size(x: np.ndarray) -> float:
    """Returns the largest finite |x|."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


def _apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Returns |ours - theirs|: 0 for equal infinities, infinity for NaN."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(ours - theirs)
    return np.where(ours == theirs, 0, np.where(np.isnan(apart), np.inf, apart))


def _judge(place: str, ours: np.ndarray, theirs: np.ndarray, bound: float, why: str) -> None:
    __tracebackhide__ = True
    assert ours.shape == theirs.shape or not theirs.ndim, f"{place} ours is {ours.shape}, theirs {theirs.shape}"
    apart = _apart(ours, theirs)
    error = float(apart.max(initial=0))
    if record is not None:
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__ or "/tests/" not in frame.f_code.co_filename:
            frame = frame.f_back
        record(frame.f_code.co_filename, frame.f_lineno, error / bound if 0 < bound < np.inf else error and np.inf)
        return
    if not error <= bound < np.inf:
        at = tuple(map(int, np.unravel_index(apart.argmax(), apart.shape)))
        values = f"{np.broadcast_to(ours, apart.shape)[at]:.9g} and {np.broadcast_to(theirs, apart.shape)[at]:.9g}"
        raise AssertionError(f"{place}{list(at)}: {values} are {error:.3g} apart; {why} allow {bound:.3g}".strip())
