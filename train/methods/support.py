"""The tokens among which a token was drawn, with `--top-k` and `--top-p`, so that the loss has the same support.

The model's probabilities change with its updates, and a filter applied to them anew would keep other tokens: a drawn
token could then have a probability of 0. So the tokens that the sampler kept are kept in the rows of a batch.
"""

import numpy as np
from jaxtyping import Float32, Int32

from zoo.generation.engine import Completion


TIED = 2  # as many likeliest tokens are kept as --top-k times this, since tokens as likely as the last one stay, too


def kept(
    completion: Completion, top_k: int, top_p: float
) -> tuple[Int32[np.ndarray, "length kept"], Float32[np.ndarray, " length"]]:
    """Finds the tokens that the sampler kept for each token of a completion, padded with -1.

    Also returns each drawn token's log-probability among these. The completion has the likeliest tokens,
    `TIED * top_k` of them or all of the vocabulary, in the place of each of its tokens. The filters are those of
    `zoo.generation.sampling.Settings.filtered`.
    """
    likeliest = [list(each.items())[: TIED * top_k] for each in completion.likeliest]
    ids = np.array([[id for id, _ in each] for each in likeliest], np.int32)
    logprobs = np.array([[logprob for _, logprob in each] for each in likeliest], np.float32)
    drawn = ids == np.array(completion.tokens)[:, None]
    last = logprobs[:, min(top_k, ids.shape[1]) - 1 :][:, :1]
    p = np.where(logprobs >= last, np.exp(logprobs - logprobs[:, :1]), 0)
    p /= p.sum(axis=1, keepdims=True)
    before = np.cumsum(p, axis=1) - p
    least = np.min(np.where(before < top_p, logprobs, np.inf), axis=1, keepdims=True, initial=np.inf)
    stays = (logprobs >= np.maximum(last, np.minimum(least, logprobs[:, :1]))) | drawn
    own = np.array(completion.logprobs, np.float32)
    total = np.log(np.sum(np.where(stays, np.exp(logprobs - own[:, None]), 0), axis=1) + ~drawn.any(axis=1))
    ids = np.where(stays, ids, -1)
    ids[~drawn.any(axis=1), -1] = np.array(completion.tokens)[~drawn.any(axis=1)]
    return ids, -total.astype(np.float32)


def size(top_k: int, vocab_size: int) -> int:
    """Returns the number of tokens that are kept for each token."""
    return min(TIED * top_k, vocab_size)
