"""Continuous batching: decodes any number of prompts, of any lengths, together in a batch of fixed size.

A row whose sequence has ended takes the next sequence from the queue, while the other rows go on. Three compiled
functions do the work (`zoo.generation.decoding`): `prefill` processes prompts into caches of their own, `insert` copies
these into rows of the batch, once for each sample, and `advance` decodes (with a draft,
`zoo.generation.speculative.advance`). `Engine` keeps the queue, and a list of which sequence is in which row.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Unpack

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Int, PRNGKeyArray

from zoo.generation import constraints, decoding, speculative
from zoo.generation.constraints import AbstractConstraint
from zoo.generation.decoding import Drawn, Rows, State, check_rewinds, init_state, insert, prefill
from zoo.generation.sampling import Sampling, SamplingOptions, settings
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel, Images, pad_patches, require_vision
from zoo.weights.gather import gathered


PADDING = 512  # the most by which the vocabulary sizes of model and draft may differ, through padding
AT_ONCE = 8  # prompts in one prefill: enough to keep a device busy; each needs a cache beside the batch's


@dataclasses.dataclass(eq=False)
class Completion:
    """The tokens drawn after a prompt so far, with their log-probabilities.

    `tokens` include the stop token that ended the completion, and `ended` says whether there is one. `logprobs` are log
    softmax(logits / temperature) of each token, without penalties and filters (`top_k`, ...); at temperature 0, log
    softmax(logits). `calls` is the number of calls of the model after the prompt, which is smaller than the number of
    tokens if a draft's tokens were accepted. `finished` says that no more tokens will come.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    calls: int = 0
    ended: bool = False
    finished: bool = False


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One completion to be made, in a row or waiting for one."""

    completion: Completion
    prompt: list[int]
    images: Images | None
    sampling: Sampling
    key: np.ndarray
    owner: Hashable
    constraint: AbstractConstraint | None = None
    allowed: np.ndarray | None = None  # the constraint's

    @property
    def length(self) -> int:
        """The number of tokens so far, of the prompt and drawn ones."""
        return len(self.prompt) + len(self.completion.tokens)


@dataclasses.dataclass(eq=False)
class _Group:
    """A prompt, and its sequences that wait for a row. After prefill, row `row` of the state `read` is the prompt's."""

    owner: Hashable
    prompt: list[int]
    images: Images | None
    waiting: collections.deque[_Sequence]
    read: State | None = None
    row: int = 0


class Engine:
    """Decodes `batch` sequences at once, each with room for `max_tokens` of a prompt with its completion.

        engine = Engine(model, batch=8, max_tokens=512, stops=tokenizer.eos)
        (completion,) = engine.submit(ids, Sampling(max_new_tokens=100))
        while not completion.finished:
            for each, tokens in engine.step().items(): ...

    Each submission has its own `Sampling` and key. The compiled functions take these as arrays, so new values compile
    nothing. The tokens of a row do not depend on the other rows. If several processes hold parts of the model,
    all must make the same calls, and all get the same results.
    """

    def __init__(
        self,
        model: AbstractModel,
        *,
        batch: int,
        max_tokens: int,
        stops: Sequence[int] = (),
        stride: int = 16,
        cache_dtype: DTypeLike | None = None,
        draft: AbstractDraft | None = None,
    ):
        """
        Args:
            stops: the tokens that end a completion.
            stride: the largest number of tokens that a step decodes in each row. With a draft a step is at least one
                round, which may draw one token more than the draft proposes.
            cache_dtype: "int8" for a cache in 8 bits, or a floating-point dtype; None is the model's
                (`zoo.nn.cache.init_cache`).
            draft: proposes tokens, which the model checks (`zoo.generation.speculative`).

        Raises:
            ValueError: the draft has another vocabulary, or a cache can't take rejected tokens back or is made anew
                where a text grows long.
        """
        if draft is not None and abs(draft.model.config.vocab_size - model.config.vocab_size) > PADDING:
            raise ValueError(
                f"The draft has a vocabulary of {draft.model.config.vocab_size}, and the model's is "
                f"{model.config.vocab_size}; they have to be the same, but for padding."
            )
        if draft is not None:
            for each in (model, draft.model):
                check_rewinds(each)
                if max_tokens > (most := each.config.cache_limit or max_tokens):
                    raise ValueError(
                        f"A text of more than {most} tokens is read anew, which a draft can't be: generate without "
                        f"one, or with at most that many tokens, and not {max_tokens}."
                    )
        self.model, self.max_tokens, self.stride, self.cache_dtype = model, max_tokens, stride, cache_dtype
        self.draft = draft
        self._stops = np.array(stops, np.int32)
        sharding = jax.tree.leaves(eqx.filter(model, eqx.is_array))[0].sharding
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        self._state = init_state(model, draft, batch, max_tokens, cache_dtype, mesh)
        self._rows: list[_Sequence | None] = [None] * batch
        self._groups: collections.deque[_Group] = collections.deque()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008 (a value)
        *,
        key: PRNGKeyArray | None = None,
        samples: int = 1,
        images: Images | None = None,
        owner: Hashable = None,
        constrained: Sequence[AbstractConstraint] = (),
    ) -> list[Completion]:
        """Queues a prompt, and returns its completions, which `step` will fill in. All samples share one prefill.

        `key` is a `jax.random.key`, by default that of the sampling's seed; sample n draws with
        `jax.random.fold_in(key, n)`. `images` are the prompt's images, as for a batch of one row. Each free row goes to
        the `owner` in the queue that has the fewest rows; an owner's prompts are served in order. `constrained` has one
        constraint for each sample; () leaves the samples free.

        Raises:
            ValueError: the prompt has no tokens, unknown tokens, or too many for a row or for the model; the sampling
                has stop strings; or there are images, and the model takes none or there is a draft.
        """
        new = sampling.max_new_tokens
        check(self.model, prompt, new)
        if sampling.stop:
            raise ValueError("The engine knows tokens and no text, so it takes no stop strings: `generate` does.")
        if images is not None:
            require_vision(self.model)
        if images is not None and self.draft is not None:
            raise ValueError("A draft takes no images: generate without one.")
        if len(prompt) + new > self.max_tokens:
            raise ValueError(
                f"The prompt has {len(prompt)} tokens, which with max_new_tokens={new} exceeds the engine's "
                f"max_tokens={self.max_tokens}."
            )
        numbers = np.arange(bucket(samples, 1))  # few sizes, so that little is compiled
        key = jax.random.key(sampling.seed) if key is None else key
        folded = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        sequences = [
            _Sequence(Completion(), list(prompt), images, sampling, data, owner, each, each and each.allowed())
            for data, each in zip(
                np.asarray(jax.random.key_data(folded)), constrained or [None] * samples, strict=False
            )
        ]
        self._groups.append(_Group(owner, list(prompt), images, collections.deque(sequences)))
        return [sequence.completion for sequence in sequences]

    def cancel(self, completion: Completion) -> None:
        """Finishes a completion with the tokens that it has, and frees its row."""
        completion.finished = True

    @property
    def idle(self) -> bool:
        """Whether no sequence is in a row or in the queue."""
        return not self._groups and not any(self._rows)

    def step(self) -> dict[Completion, list[int]]:
        """Fills free rows from the queue, decodes up to `stride` tokens, and returns each completion's new tokens.

        While sequences are in the queue, decoding stops as soon as an eighth of the rows are free.
        """
        self._sweep()
        self._admit()
        running = [(row, sequence) for row, sequence in enumerate(self._rows) if sequence]
        if not running:
            return {}
        enough = len(running) - max(1, len(self._rows) // 8) if self._groups else 0
        drawn = self._advance(any(sequence.constraint for _, sequence in running), np.array(enough))
        tokens, logprobs, counts, calls = map(gathered, (drawn.tokens, drawn.logprobs, drawn.count, drawn.calls))
        new = {}
        for row, sequence in running:
            done, count = sequence.completion, counts[row]
            new[done] = tokens[row, :count].tolist()
            done.tokens += new[done]
            done.logprobs += logprobs[row, :count].tolist()
            done.calls += int(calls[row])
            done.ended = done.tokens[-1] in self._stops
            done.finished = done.ended or len(done.tokens) == sequence.sampling.max_new_tokens
            if sequence.constraint is not None and not done.finished:
                for token in new[done]:
                    sequence.constraint.push(token)
                sequence.allowed = sequence.constraint.allowed()
        self._sweep()
        self._requeue()
        return new

    def _advance(self, constrained: bool, enough: np.ndarray) -> Drawn:
        """Decodes up to `stride` tokens in each row; if any row is constrained, one, or with a draft one round."""
        rows = self._table()
        if self.draft is not None:
            inputs, steps = ((self.model, self.draft), self._stops, rows), 1 if constrained else self.stride
            self._state, drawn = speculative.advance(inputs, self._state, steps, enough)
            return drawn
        if not constrained:
            self._state, drawn = decoding.advance((self.model, self._stops, rows), self._state, self.stride, enough)
            return drawn
        drawn, tokens = constraints.draw(rows, self._state.tokens, self._state.logits)
        self._state = constraints.read((self.model, rows, drawn.tokens, tokens), self._state)
        return drawn

    def _requeue(self) -> None:
        """Moves sequences that have just outgrown their cache to the head of the queue, to be prefilled anew."""
        for row, s in enumerate(self._rows):
            if s and self._room(s) == 0:
                text = s.prompt + s.completion.tokens
                self._groups.appendleft(_Group(s.owner, text, s.images, collections.deque([s])))
                self._rows[row] = None

    def _room(self, sequence: _Sequence) -> int | None:
        """The number of tokens to draw until the cache has to be made anew; None: it does not have to be.

        The token after the last that the cache can hold is drawn from what the cache holds.
        """
        most = self.model.config.cache_limit
        return None if most is None or sequence.length > most + 1 else most + 1 - sequence.length

    def _sweep(self) -> None:
        """Frees the rows of finished completions, and removes them from the queue."""
        self._rows = [None if s and s.completion.finished else s for s in self._rows]
        for group in self._groups:
            group.waiting = collections.deque(s for s in group.waiting if not s.completion.finished)
        self._groups = collections.deque(group for group in self._groups if group.waiting)

    def _admit(self) -> None:
        """Prefills prompts from the queue and copies them into free rows."""
        free = [row for row, sequence in enumerate(self._rows) if sequence is None]
        turns = self._turns(len(free)) if free else collections.deque()
        while turns:
            new = turns[0].read
            if new is None:
                new = self._prefill(turns)
            pairs, count = np.zeros((len(self._rows), 2), np.int32), 0
            while turns and turns[0].read is new:
                group, row = turns.popleft(), free.pop(0)
                self._rows[row], pairs[count], count = group.waiting.popleft(), (group.row, row), count + 1
            self._state = insert((new, pairs, np.array(count)), self._state)
        self._groups = collections.deque(group for group in self._groups if group.waiting)

    def _turns(self, free: int) -> collections.deque[_Group]:
        """Returns the groups that get the free rows, one for each row. A row goes to the owner that has the fewest."""
        waiting: dict[Hashable, collections.deque[_Group]] = {}
        for group in self._groups:
            waiting.setdefault(group.owner, collections.deque()).extend([group] * len(group.waiting))
        rows = collections.Counter(sequence.owner for sequence in self._rows if sequence)
        turns: collections.Counter[_Group] = collections.Counter()
        while waiting and turns.total() < free:
            owner = min(waiting, key=rows.__getitem__)
            turns[waiting[owner].popleft()] += 1
            rows[owner] += 1
            if not waiting[owner]:
                del waiting[owner]
        return collections.deque(turns.elements())

    def _prefill(self, turns: Iterable[_Group]) -> State:
        """Prefills the first of these groups' prompts together: as many as can be padded to one shape."""
        first, *others = dict.fromkeys(turns)
        seq, chosen = bucket(len(first.prompt)), [first]
        for group in others:
            if len(chosen) == AT_ONCE or group.read is not None or bucket(len(group.prompt)) != seq:
                break
            seen = [g.images.patches.shape[1:] for g in (*chosen, group) if g.images is not None]
            if len(set(seen)) > 1:  # small images would be padded to the size of large ones
                break
            chosen.append(group)
        prompts, lengths = padded([g.prompt for g in chosen], bucket(len(chosen), 1), min(seq, self.max_tokens))
        images = batched_images([g.images for g in chosen], *prompts.shape)
        read = prefill(self.model, self.draft, prompts, lengths, self.max_tokens, self.cache_dtype, images)
        for group in self._groups:  # drops other groups' prefills, so that there is one such cache at a time
            group.read = None
        for row, group in enumerate(chosen):
            group.read, group.row = read, row
        return read

    def _table(self) -> Rows:
        """Returns each row's sequence as arrays for the compiled functions."""
        rows = self._rows
        column = lambda of, off: np.array([off if s is None else of(s) for s in rows], np.int32)
        drawn = lambda s: len(s.completion.tokens)
        left = lambda s: min(s.sampling.max_new_tokens - drawn(s), self._room(s) or self.max_tokens)
        some = next(s for s in rows if s)
        return Rows(
            positions=column(lambda s: s.length, -1),
            drawn=column(drawn, 0),
            left=column(left, 0),
            keys=np.stack([(s or some).key for s in rows]),
            settings=settings(
                [s.sampling if s else Sampling() for s in rows],
                allowed=[s and s.allowed for s in rows],
                constrained=[s is not None and s.constraint is not None for s in rows],
            ),
        )


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
    **options: Unpack[SamplingOptions],
) -> list[list[Completion]]:
    """Completes each prompt `samples` times, `batch` sequences at a time, and returns them in the prompts' order.

    Fields of `Sampling` may be given by keyword, as to `zoo.generate`, whose greedy texts (the default) have the same
    tokens. Completion n of prompt m draws with the key `fold_in(fold_in(key(seed), m), n)`, whatever else is decoded. A
    completion ends with the first of the `stops`. `cache_dtype` "int8" keeps the cache in 8 bits. A `draft` makes this
    faster if the model accepts many of its tokens (docs/generation.md). `images` has each prompt's images, or None for
    a prompt without any; () if no prompt has images.

    Raises:
        TypeError: a keyword is no field of `Sampling`.
        ValueError: as in `Engine.submit`; the message names the prompt.
    """
    sampling = sampling.changed(options)
    if not prompts:
        return []
    for n, prompt in enumerate(prompts):
        check(model, prompt, sampling.max_new_tokens, f"Prompt {n}")
    engine = Engine(
        model,
        batch=min(batch, len(prompts) * samples),
        max_tokens=bucket(max(map(len, prompts))) + sampling.max_new_tokens,
        stops=stops,
        cache_dtype=cache_dtype,
        draft=draft,
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(sampling.seed), np.arange(len(prompts)))
    completions = [
        engine.submit(prompt, sampling, key=key, samples=samples, images=shown)
        for prompt, key, shown in zip(prompts, keys, images or [None] * len(prompts), strict=True)
    ]
    while not engine.idle:
        engine.step()
    return completions


def check(model: AbstractModel, prompt: Sequence[int], new: int, name: str = "The prompt") -> None:
    """Raises ValueError unless the model can continue this prompt by `new` tokens."""
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if new < 1:
        raise ValueError(f"max_new_tokens={new} asks for nothing; it must be at least 1.")
    if not len(prompt):
        raise ValueError(f"{name} has no tokens; there is nothing to continue.")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab:
            raise ValueError(
                f"{name} has token {token}, but the model's vocabulary has {vocab}; is the tokenizer the model's?"
            )
    if len(prompt) + new > limit:
        raise ValueError(
            f"{name} has {len(prompt)} tokens, which with max_new_tokens={new} exceeds the model's {limit} positions; "
            "shorten one of them."
        )


def bucket(size: int, least: int = 16) -> int:
    """Returns the next power of two, to which arrays are padded so that few shapes are compiled."""
    return max(least, 1 << (size - 1).bit_length())


def padded(
    prompts: Sequence[Sequence[int]], rows: int, seq: int
) -> tuple[Int[np.ndarray, "rows seq"], Int[np.ndarray, " rows"]]:
    """Right-pads prompts, and returns them with their lengths; prompts of one token fill the other rows."""
    tokens, lengths = np.zeros((rows, seq), np.int32), np.ones(rows, np.int32)
    for n, prompt in enumerate(prompts):
        tokens[n, : len(prompt)], lengths[n] = prompt, len(prompt)
    return tokens, lengths


def batched_images(each: Sequence[Images | None], rows: int, seq: int) -> Images | None:
    """Joins the images of prompts into those of a padded batch [rows, seq]; None if there are no images.

    The last image is repeated until their number is a power of two, so that few shapes are compiled.
    """
    if not (some := [images for images in each if images is not None]):
        return None
    up = lambda x, size: np.concatenate([x, x[-1:].repeat(size - len(x), axis=0)])
    patches, grids = (
        pad_patches([np.asarray(one) for images in some for one in images.patches]),
        [images.grids for images in some],
    )
    patches, grids = (up(x, bucket(len(patches), 1)) for x in (patches, np.concatenate(grids)))
    image, feature = np.full((rows, seq), -1, np.int32), np.zeros((rows, seq), np.int32)
    first = 0
    for row, images in enumerate(each):
        if images is not None:
            length = images.image.shape[1]
            image[row, :length] = np.where(images.image[0] < 0, -1, images.image[0] + first)
            feature[row, :length] = images.feature[0]
            first += len(images.patches)
    return Images(patches, grids, image, feature)
