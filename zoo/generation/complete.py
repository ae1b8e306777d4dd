"""Completes a list of prompts, as tokens."""

from collections.abc import Sequence
from typing import Unpack

import jax
import numpy as np
from jax.typing import DTypeLike

from zoo.generation.decoding import Record
from zoo.generation.engine import Completion, Engine, check
from zoo.generation.sampling import Sampling, SamplingOptions
from zoo.generation.shapes import rounded
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel, Images


def complete(
    model: AbstractModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),  # noqa: B008 (a value)
    *,
    samples: int = 1,
    stops: Sequence[int] = (),
    batch: int = 64,
    cache_dtype: DTypeLike | None = None,
    draft: AbstractDraft | None = None,
    images: Sequence[Images | None] = (),
    top: int = 0,
    record: Sequence[Record] = (),
    **options: Unpack[SamplingOptions],
) -> list[list[Completion]]:
    """Completes each prompt `samples` times, `batch` sequences at a time, and returns them in the prompts' order.

    Fields of `Sampling` may be given by keyword, as to `zoo.generate`, whose greedy texts (the default) have the same
    tokens. Completion n of prompt m draws with the key `fold_in(fold_in(key(seed), m), n)`, whatever else is decoded. A
    completion ends with the first of the `stops`. `cache_dtype` "int8" keeps the cache in 8 bits. A `draft` makes this
    faster if the model accepts many of its tokens (docs/generation.md). `images` has each prompt's images, or None for
    a prompt without any; () if no prompt has images. `top` is that of `Engine.submit`, and `record` that of `Engine`.

    Raises:
        TypeError: a keyword is no field of `Sampling`.
        ValueError: as in `Engine.submit`; the message names the prompt.
    """
    sampling = sampling.changed(options)
    if not prompts:
        return []
    for n, prompt in enumerate(prompts):
        check(model, prompt, sampling.max_new_tokens, f"Prompt {n}")
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    engine = Engine(
        model,
        batch=rounded(len(prompts) * samples, batch),
        max_tokens=rounded(longest, model.config.max_position_embeddings),
        stops=stops,
        cache_dtype=cache_dtype,
        draft=draft,
        record=record,
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(sampling.seed), np.arange(len(prompts)))
    completions = [
        engine.submit(prompt, sampling, key=key, samples=samples, images=shown, top=top)
        for prompt, key, shown in zip(prompts, keys, images or [None] * len(prompts), strict=True)
    ]
    while not engine.idle:
        engine.step()
    return completions
