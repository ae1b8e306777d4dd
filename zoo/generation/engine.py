"""Continuous batching: decodes any number of prompts, of any lengths, together in a batch of fixed size.

A row whose sequence has ended takes the next sequence from the queue, while the other rows go on. Compiled functions do
the work (`zoo.generation.decoding`): `read` reads prompts into the rows' caches, and `advance` decodes (with a draft,
`zoo.generation.speculative.advance`). `Engine` keeps the queue, a list of which sequence is in which row, and the books
of the caches' pages (`zoo.generation.pages`) and of texts that others go on from (`zoo.generation.prefixes`).
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Int, PRNGKeyArray

from zoo.generation import constraints, decoding, speculative
from zoo.generation.constraints import AbstractConstraint
from zoo.generation.decoding import (
    CHUNK,
    Drawn,
    Progress,
    Reading,
    Record,
    Rows,
    init_state,
    read,
    room,
    take,
)
from zoo.generation.images import batched_images, joined_images, part_of_images
from zoo.generation.pages import Pool, Table
from zoo.generation.prefixes import Prefix, Prefixes, ends_of_chunks, keys_of_chunks
from zoo.generation.sampling import Sampling, settings
from zoo.generation.shapes import bucket, filled, padded
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel, Images, require_vision
from zoo.nn.rows import all_in_pages, windows
from zoo.nn.stack import apart
from zoo.weights.gather import gathered


PADDING = 512  # the most by which the vocabulary sizes of model and draft may differ, through padding


@dataclasses.dataclass(eq=False)
class Completion:
    """The tokens drawn after a prompt so far, with their log-probabilities.

    `tokens` include the stop token that ended the completion, and `ended` says whether there is one. `logprobs` are log
    softmax(logits / temperature) of each token, without penalties and filters (`top_k`, ...); at temperature 0, or with
    `Engine(raw_logprobs=True)`, log softmax(logits). `calls` is the number of calls of the model after the prompt,
    which is smaller than the number of tokens if a draft's tokens were accepted. `finished` says that no more tokens
    will come. `likeliest` has, for each token, the likeliest ones in its place with their log-probabilities, as many as
    `submit` was asked for. `prompt` are all tokens before the drawn ones, and `images` those of the prompt. `records`
    has, once it is finished, what an `Engine` records of each token that the model has read, in the prompt and after
    it.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    likeliest: list[dict[int, float]] = dataclasses.field(default_factory=list)
    calls: int = 0
    ended: bool = False
    finished: bool = False
    prompt: list[int] = dataclasses.field(default_factory=list)
    images: Images | None = None
    records: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A text to be read, and the sequences after it that wait for a row."""

    owner: Hashable
    tokens: list[int]
    images: Images | None
    after: Completion | None  # the completion that it continues
    long: bool  # whether it is beyond the model's `cache_limit`
    ends: list[int]  # of the chunks in which it is read
    keys: list[bytes]  # of the chunks but the last one; empty if prompts do not share chunks
    waiting: collections.deque["_Sequence"] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One completion to be made. In a row it has pages, and has read the first `read` tokens of `prompt`."""

    completion: Completion
    prompt: _Prompt
    sampling: Sampling
    key: np.ndarray
    keep: bool
    top: int  # likeliest tokens that are asked for
    table: Table = dataclasses.field(default_factory=list)
    read: int = 0
    in_chunks: bool = True  # whether all of this was read in chunks from the beginning
    turn: int = 0  # the number of sequences that came to a row before it
    over: bool = False  # whether it has drawn all of its tokens, and was not cancelled
    records: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)  # of the tokens, part by part
    constraint: AbstractConstraint | None = None
    allowed: np.ndarray | None = None  # the constraint's

    @property
    def length(self) -> int:
        """The number of tokens so far, of the prompt and drawn ones."""
        return len(self.completion.prompt) + len(self.completion.tokens)

    @property
    def end_of_chunk(self) -> int:
        """The number of tokens of the prompt up to the end of the chunk that is read next."""
        return next(end for end in self.prompt.ends if end > self.read)

    @property
    def draws(self) -> bool:
        """Whether all of the prompt is read."""
        return self.read >= len(self.prompt.tokens)


@dataclasses.dataclass(eq=False)
class _Flight:
    """A step that the device was given, and whose tokens the host has not read yet."""

    rows: dict[_Sequence, int]  # of the sequences that still are in them
    drawn: Drawn
    least: int  # tokens that a row draws unless its sequence ends


class Engine:
    """Decodes `batch` sequences at once, each with room for `max_tokens` of a prompt with its completion.

        engine = Engine(model, batch=8, max_tokens=512, stops=tokenizer.eos)
        (completion,) = engine.submit(ids, Sampling(max_new_tokens=100))
        while not completion.finished:
            for each, tokens in engine.step().items(): ...

    Each submission has its own `Sampling` and key. The compiled functions take these as arrays, so new values compile
    nothing. The tokens of a row do not depend on the other rows. If several processes hold parts of the model,
    all must make the same calls, and all get the same results.

    The cache lies in pages, of which a row has as many as its text needs. Where they are too few for what comes next,
    first go the prefixes that were not used for the longest time: texts of finished completions that were kept, and
    prompts whose samples wait for rows. They are read anew when they are needed. Then the sequence that came to its row
    last goes back to the head of the queue, and is read anew with the tokens that it has drawn.

    The device gets the next step before the host reads the tokens of the last one. It knows itself how far each row has
    come (`decoding.Progress`), and which have ended; these stay as they are. So the host may be one step behind: it
    reserves pages for the most tokens that both steps may draw, and a row is free one step after its sequence has
    ended. Constraints need the host between two tokens; while there are some, each step is read before the next one.
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
        cache_tokens: int | None = None,
        page: int | None = None,
        chunk: int = CHUNK,
        prefixes: bool = False,
        beside: int | None = None,
        record: Sequence[Record] = (),
        raw_logprobs: bool = False,
        overlap: bool = True,
    ):
        """
        Args:
            stops: the tokens that end a completion.
            stride: the largest number of tokens that a step decodes in each row. With a draft a step is at least one
                round, which may draw one token more than the draft proposes.
            cache_dtype: "int8" for a cache in 8 bits, or a floating-point dtype; None is the model's
                (`zoo.nn.cache.init_cache`).
            draft: proposes tokens, which the model checks (`zoo.generation.speculative`).
            cache_tokens: the number of tokens for which there is memory, of all rows and kept texts together. None:
                for all rows, and as much for prompts whose samples wait as up to 8 rows have.
            page: the number of tokens of a page; None: 64, and on TPUs 128. On a mesh that splits rows there are no
                pages, and each row has memory for `max_tokens`.
            chunk: the largest number of tokens of a prompt that are read at a time.
            prefixes: whether what was read of a prompt serves later ones that begin with the same chunks. That changes
                no bit of what they get.
            beside: the most tokens of prompts that a step reads while rows draw, but one chunk at least: it bounds how
                long these wait. None: a step reads all prompts that have a row.
            record: what completions get in `records` of each token: "experts", those to which the routers have sent it,
                [tokens, layers with experts, choices]; "hidden", the features that the model unembeds, [tokens, embed].
                Recording waits for each chunk that is read.
            raw_logprobs: whether log-probabilities are those of softmax(logits) at any temperature, as servers give
                them. Training needs those with which tokens are drawn, softmax(logits / temperature).
            overlap: whether the device gets a step before the tokens of the last one are read. That changes no draw.

        Raises:
            ValueError: the draft has another vocabulary, or a cache can't take rejected tokens back or is made anew
                where a text grows long; or there is less memory than one row may need; or experts are to be recorded,
                and the model has none.
        """
        if draft is not None:
            for each in (model, *draft.models):
                if abs(each.config.vocab_size - model.config.vocab_size) > PADDING:
                    raise ValueError(
                        f"The draft has a vocabulary of {each.config.vocab_size}, and the model's is "
                        f"{model.config.vocab_size}; they have to be the same, but for padding."
                    )
                decoding.check_rewinds(each)
                if max_tokens > (most := each.config.cache_limit or max_tokens):
                    raise ValueError(
                        f"A text of more than {most} tokens is read anew, which a draft can't be: generate without "
                        f"one, or with at most that many tokens, and not {max_tokens}."
                    )
        if cache_tokens is not None and cache_tokens < max_tokens:
            raise ValueError(f"cache_tokens={cache_tokens} is less than one row may need: max_tokens={max_tokens}.")
        self.model, self.max_tokens, self.stride, self.cache_dtype = model, max_tokens, stride, cache_dtype
        self.draft, self.chunk, self.prefixes, self.beside, self._record = draft, chunk, prefixes, beside, tuple(record)
        self.raw_logprobs = raw_logprobs
        self.tokens_read, self.tokens_found = 0, 0  # of prompts: read, and read before
        self._models, self._stops = (model, draft), np.array(stops, np.int32)
        self._decoding = apart(self._models)
        sharding = jax.tree.leaves(eqx.filter(model, eqx.is_array))[0].sharding
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        sizes = {} if mesh is None else mesh.shape
        layout = decoding.layout_of(model, draft, batch, max_tokens, sizes, stride, chunk, cache_tokens, page)
        self._state = init_state(model, draft, batch, max_tokens, cache_dtype, mesh, layout)
        decoding.shapes_of_records(model, self._state.caches[0], batch, self._record)  # raises if there are none
        kinds = windows(self._state.caches)
        self._pool = Pool(layout, kinds)
        self._all_in_pages = draft is None and all_in_pages(self._state.caches)
        self._copies: list[dict[int, int]] = [{} for _ in kinds]  # for each window: the page to copy to, and from which
        # What prefixes have beside pages may take as much memory as the caches.
        size_of = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
        of_row = size_of(eqx.filter_eval_shape(take, self._state, np.array(0)))
        self._prefixes = Prefixes(self._pool, max(batch, size_of(self._state) // of_row))
        self._rows: list[_Sequence | None] = [None] * batch
        self._queue: collections.deque[_Prompt] = collections.deque()
        self._turn = itertools.count()
        self._flights: collections.deque[_Flight] = collections.deque()
        self._overlap, self._new = overlap, {}

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008 (a value)
        *,
        key: PRNGKeyArray | None = None,
        samples: int = 1,
        images: Images | None = None,
        owner: Hashable = None,
        after: Completion | None = None,
        keep: bool = False,
        constrained: Sequence[AbstractConstraint] = (),
        top: int = 0,
    ) -> list[Completion]:
        """Queues a prompt, and returns its completions, which `step` will fill in. All samples share one prefill.

        `key` is a `jax.random.key`, by default that of the sampling's seed; sample n draws with
        `jax.random.fold_in(key, n)`. `images` are the prompt's images, as for a batch of one row. Each free row goes to
        the `owner` in the queue that has the fewest rows; an owner's prompts are served in order. `constrained` has one
        constraint for each sample; () leaves the samples free.

        `top` asks for that many of the likeliest tokens in the place of each, which the step has anyway.

        The text of a finished completion goes on by `after`: the prompt then follows its tokens, and may be empty.
        Several such calls, or samples, fork it. If it was submitted with `keep`, only what is new is read: what it has
        read stays in the cache until `free`, or until the cache is short of memory.

        Raises:
            ValueError: the prompt has no tokens, unknown tokens, or too many for a row or for the model; the sampling
                has stop strings; or there are images, and the model takes none or there is a draft; or the completion
                to go on from is not finished.
        """
        tokens, new = list(prompt), sampling.max_new_tokens
        if images is not None:
            require_vision(self.model)
        if images is not None and self.draft is not None:
            raise ValueError("A draft takes no images: generate without one.")
        if after is not None:
            if not after.finished:
                raise ValueError("A completion goes on when it is finished, and this one still is drawn.")
            before = after.prompt + after.tokens
            images, tokens = joined_images(after.images, len(before), images, len(tokens)), before + tokens
        check(self.model, tokens, new)
        if sampling.stop:
            raise ValueError("The engine knows tokens and no text, so it takes no stop strings: `generate` does.")
        if len(tokens) + new > self.max_tokens:
            raise ValueError(
                f"The prompt has {len(tokens)} tokens, which with max_new_tokens={new} exceeds the engine's "
                f"max_tokens={self.max_tokens}."
            )
        numbers = np.arange(bucket(samples, 1))  # few sizes, so that little is compiled
        key = jax.random.key(sampling.seed) if key is None else key
        folded = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        text = self._prompt(owner, tokens, images, after)
        words = np.asarray(jax.random.key_data(folded))[:samples]
        for data, each in zip(words, constrained or [None] * samples, strict=True):
            sequence = _Sequence(Completion(prompt=tokens, images=images), text, sampling, data, keep, top)
            sequence.constraint, sequence.allowed = each, each and each.allowed()
            text.waiting.append(sequence)
        self._queue.append(text)
        return [sequence.completion for sequence in text.waiting]

    def cancel(self, completion: Completion) -> None:
        """Finishes a completion with the tokens that it has, and frees its row. Tokens that come later are cut."""
        completion.finished = True

    def free(self, completion: Completion) -> None:
        """Forgets what the cache has of a completion that was kept. Its text may still go on, and is read anew then."""
        self._prefixes.drop(completion)

    @property
    def idle(self) -> bool:
        """Whether no sequence is in a row or in the queue."""
        return not self._queue and not any(self._rows)

    def step(self) -> dict[Completion, list[int]]:
        """Fills free rows from the queue, decodes up to `stride` tokens, and returns each completion's new tokens.

        While sequences are in the queue, decoding stops as soon as an eighth of the rows are free.
        """
        self._new = {}
        while not self._new and (self._flights or self._dispatch()):
            if self._overlap and not self._constrained:
                self._dispatch()
            if self._flights:  # none where memory was so short that they were read
                self._read_flight()
        return self._new

    @property
    def _constrained(self) -> bool:
        """Whether any row needs the host between two tokens."""
        return any(s is not None and s.constraint is not None for s in self._rows)

    def _dispatch(self) -> bool:
        """Gives the device the next step. Returns whether there is one."""
        self._sweep()
        self._fill()
        while self._constrained and self._flights:
            self._read_flight()
        for _, s in sorted(self._running(), key=lambda each: each[1].turn):
            self._reserve(s, s.length, self._end_of_step(s))
        if not (running := self._running()):
            return False
        self._copy()
        enough = len(running) - max(1, len(self._rows) // 8) if self._queue else 0
        most = max(s.top for _, s in running)
        # few numbers, so that little is compiled
        top = min(bucket(most, 1), self.model.config.vocab_size) if most else 0
        steps = 1 if self._constrained else self.stride
        least = 0 if enough else steps if self.draft is None else max(1, steps // room(self.draft, 0))
        drawn = self._advance(running, steps, top, np.array(enough))
        self._flights.append(_Flight({s: row for row, s in running}, drawn, least))
        return True

    def _running(self) -> list[tuple[int, _Sequence]]:
        """Returns the rows that may draw in the next step, after those that are on their way."""
        least = lambda s: sum(flight.least for flight in self._flights if s in flight.rows)
        return [(row, s) for row, s in enumerate(self._rows) if s and s.draws and self._left(s) > least(s)]

    def _advance(self, running: Sequence[tuple[int, _Sequence]], steps: int, top: int, enough: np.ndarray) -> Drawn:
        """Decodes up to `steps` tokens in each row, or with a draft one round at least."""
        table, tables = self._table(running), self._tables()
        if self._constrained and self.draft is None:
            drawn, tokens = constraints.draw(table, self._state.tokens, self._state.logits, top)
            self._state, records = constraints.read(
                (self._decoding[0], table, tables, drawn.tokens, tokens), self._state
            )
            return dataclasses.replace(drawn, records=records)
        advance = decoding.advance if self.draft is None else speculative.advance
        inputs = self._decoding, self._stops, table, tables
        self._state, drawn = advance(inputs, self._state, steps, top, enough)
        return drawn

    def _read_flight(self) -> None:
        """Reads the tokens of the first step that is on its way, and frees the rows of sequences that have ended."""
        flight = self._flights.popleft()
        drawn = jax.tree.map(gathered, flight.drawn) if flight.rows else flight.drawn
        for s, row in flight.rows.items():
            done, count = s.completion, int(drawn.count[row])
            if done.finished or not count:
                continue
            new = drawn.tokens[row, :count].tolist()
            self._new[done] = self._new.get(done, []) + new
            done.tokens += new
            done.logprobs += drawn.logprobs[row, :count].tolist()
            if s.top:
                both = drawn.likeliest.tokens, drawn.likeliest.logprobs
                ids, values = (a[row, :count, : s.top].tolist() for a in both)
                done.likeliest += [dict(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
            done.calls += int(drawn.calls[row])
            s.records.append({name: np.asarray(a)[row, :count] for name, a in drawn.records.items()})
            done.ended = done.tokens[-1] in self._stops
            done.finished = s.over = done.ended or len(done.tokens) == s.sampling.max_new_tokens
            self._pool.leave(s.table, s.length)
            if s.constraint is not None and not done.finished:
                for token in new:
                    s.constraint.push(token)
                s.allowed = s.constraint.allowed()
        self._sweep()
        for row, s in enumerate(self._rows):
            if s and s.draws and self._left_until_read_anew(s) == 0:
                self._requeue(row)

    def _sweep(self) -> None:
        """Frees the rows of finished completions, keeps what is to be kept, and removes them from the queue."""
        for row, s in enumerate(self._rows):
            if s and s.completion.finished:
                if s.keep and s.draws and (s.over or not self._ahead(s)):
                    self._keep(s.completion, s, s.length)
                elif s.keep and self._all_in_pages and s.length > len(s.prompt.tokens):
                    self._keep(s.completion, s, s.length - 1)  # the step on its way replaces the logits after the last
                s.completion.records = self._joined(s.records, s.length)
                self._leave(row)
        for prompt in self._queue:
            prompt.waiting = collections.deque(s for s in prompt.waiting if not s.completion.finished)
        self._clear_queue()

    def _clear_queue(self) -> None:
        """Removes prompts for which no sequence waits any longer."""
        for prompt in self._queue:
            if not prompt.waiting:
                self._prefixes.drop(prompt)
        self._queue = collections.deque(prompt for prompt in self._queue if prompt.waiting)

    def _leave(self, row: int) -> _Sequence:
        """Takes the sequence out of a row, and gives its pages back."""
        s = self._rows[row]
        assert s is not None
        self._rows[row] = None
        for flight in self._flights:
            flight.rows.pop(s, None)
        self._pool.release(s.table)
        return s

    def _requeue(self, row: int) -> None:
        """Moves a sequence to the head of the queue, to be read anew with all of its tokens."""
        s = self._leave(row)
        before, text = s.prompt, s.completion.prompt + s.completion.tokens
        s.prompt = self._prompt(before.owner, text, before.images, before.after)
        s.prompt.waiting.append(s)
        self._queue.appendleft(s.prompt)

    def _prompt(self, owner: Hashable, tokens: list[int], images: Images | None, after: Completion | None) -> _Prompt:
        """Makes a prompt, cut into the chunks in which it is read. A long text begins with a chunk that is long."""
        most = self.model.config.cache_limit
        long = most is not None and len(tokens) > most
        ends = ends_of_chunks(len(tokens), images, self.chunk, most + 1 if most is not None and long else 0)
        keys = keys_of_chunks(tokens, images, ends[:-1], long) if self.prefixes else []
        return _Prompt(owner, tokens, images, after, long, ends, keys)

    def _left_until_read_anew(self, s: _Sequence) -> int | None:
        """The number of tokens to draw until the text has to be read anew; None: it does not have to be.

        The token after the last that the cache can hold is drawn from what the cache holds.
        """
        most = self.model.config.cache_limit
        return None if most is None or s.prompt.long else most + 1 - s.length

    def _keep(self, key: Hashable, s: _Sequence, length: int) -> None:
        """Keeps what a sequence in a row has read, as a prefix of so many tokens."""
        logits = length == s.length or not self._all_in_pages
        row = take(self._state, np.array(self._rows.index(s))) if logits else None
        table, records = self._pool.share(s.table, length), self._joined(s.records, length)
        self._prefixes.put(key, Prefix(length, table, row, s.prompt.long, length < len(s.prompt.tokens), records))

    def _joined(self, records: Sequence[dict[str, np.ndarray]], length: int) -> dict[str, np.ndarray]:
        """Joins what was recorded of the parts of a text, up to a length."""
        return {name: np.concatenate([part[name] for part in records])[:length] for name in self._record if records}

    def _find(self, prompt: _Prompt) -> Prefix | None:
        """Finds a prefix of a prompt: all of it, the completion that it continues, or as many chunks as possible."""
        for key in (prompt, prompt.after, *reversed(prompt.keys)):
            prefix = None if key is None else self._prefixes.get(key)
            if prefix and prefix.long == prompt.long:
                # Shorter ones, whose pages it shares, have been used too.
                for n in reversed(range(len(prompt.keys))):
                    if prefix.in_chunks and prompt.ends[n] < prefix.length:
                        self._prefixes.get(prompt.keys[n])
                return prefix
        return None

    def _fill(self) -> None:
        """Gives free rows to sequences of the queue, and reads prompts: all, or where rows draw so many `beside`."""
        draws = any(s and s.draws for s in self._rows)
        left = self.beside if self.beside is not None and draws else self._state.tokens.size
        self._admit()
        count = self._read(left, one=True)
        while count:
            left -= count
            self._admit()
            count = self._read(left)

    def _admit(self) -> None:
        """Gives free rows to sequences of the queue, as many as there is memory for.

        A prompt waits for a chunk that a row is reading for another one.
        """
        turns = self._turns(self._rows.count(None))
        starts = ((s, s.length if s.draws else s.read) for s in self._rows if s)
        wanted = (self._wanted(s.table, start, self._end_of_step(s)) for s, start in starts)
        promised = sum(wanted, np.zeros_like(self._pool.most))
        reading = self._being_read()
        for prompt, most in turns.items():
            if self._next_chunk(prompt) in reading:
                continue
            count = next((n for n in range(most) if not self._fits(prompt, n, promised)), most)
            found = self._find(prompt)
            # One sample reads the prompt for all, unless all of it has been read.
            whole = found is not None and found.length == len(prompt.tokens)
            self._begin(prompt, found, count if whole else min(count, 1))
            reading.update(prompt.keys)
            if count < most:
                break
        self._clear_queue()

    def _next_chunk(self, prompt: _Prompt) -> bytes | None:
        """Returns the key of the first chunk of a prompt that has to be read; None: it has none, or is its own."""
        found = self._find(prompt)
        length = found.length if found else 0
        return next((key for key, end in zip(prompt.keys, prompt.ends, strict=False) if end > length), None)

    def _being_read(self) -> set[bytes]:
        """Returns the keys of the chunks that rows are about to read."""
        reading = [s for s in self._rows if s and not s.draws and s.in_chunks]
        pairs = ((s, *each) for s in reading for each in zip(s.prompt.keys, s.prompt.ends, strict=False))
        return {key for s, key, end in pairs if end > s.read}

    def _fits(self, prompt: _Prompt, others: int, promised: Int[np.ndarray, " windows"]) -> bool:
        """Whether there are pages for one more sample of a prompt beside `others`, with which it shares the prompt.

        For that it forgets prefixes. It adds the pages to those that are `promised`.
        """
        while True:
            found, length = self._find(prompt), len(prompt.tokens)
            table, start = (found.table, found.length) if found else (self._pool.empty(), 0)
            table, start = (self._pool.empty(), length) if others else (table, start)
            wanted = self._wanted(table, start, self._after_step(length))
            if (promised + wanted <= self._pool.free).all():
                promised += wanted
                return True
            if not self._prefixes.evict():
                return False

    def _wanted(self, table: Table, start: int, end: int) -> Int[np.ndarray, " windows"]:
        """Counts the pages that a sequence takes, of each window, to have its tokens from `start` to `end` - 1."""
        lacking = self._pool.lacking(table, start, end)
        return np.minimum([len(entries) for entries in lacking], self._pool.most).astype(int)

    def _end_of_step(self, s: _Sequence) -> int:
        """Returns the position before which the next step writes in a sequence's row."""
        return self._after_step(s.length + self._ahead(s))

    def _after_step(self, length: int) -> int:
        """Returns the position before which a step writes in a row with so many tokens."""
        return min(length + room(self.draft, self.stride), room(self.draft, self.max_tokens))

    def _ahead(self, s: _Sequence) -> int:
        """Returns the most tokens that a sequence gets by the steps on their way."""
        return sum(room(self.draft, self.stride) for flight in self._flights if s in flight.rows)

    def _begin(self, prompt: _Prompt, prefix: Prefix | None, count: int) -> None:
        """Puts `count` sequences that wait after a prompt into free rows, from this prefix of the prompt on."""
        rows = [row for row, s in enumerate(self._rows) if s is None][:count]
        for row in rows:
            s = self._rows[row] = prompt.waiting.popleft()
            s.table = self._pool.share(prefix.table, prefix.length) if prefix else self._pool.empty()
            s.read, s.turn = prefix.length if prefix else 0, next(self._turn)
            s.in_chunks = prefix is None or prefix.in_chunks
            s.records = [prefix.records] if prefix else []
            self.tokens_found += s.read
        if prefix and rows:
            text = np.zeros(self._state.tokens.shape[1], np.int32)
            text[: prefix.length] = prompt.tokens[: prefix.length]
            self._state = decoding.put(
                (prefix.row, text, filled(rows, bucket(len(rows), 1), len(self._rows))), self._state
            )

    def _turns(self, free: int) -> dict[_Prompt, int]:
        """Returns how many free rows each prompt gets. A row goes to the owner that has the fewest.

        Samples of a prompt that another sample is just reading wait for that.
        """
        waiting: dict[Hashable, collections.deque[_Prompt]] = {}
        being_read = [s.prompt for s in self._rows if s and not s.draws]
        for prompt in (prompt for prompt in self._queue if prompt not in being_read) if free else ():
            waiting.setdefault(prompt.owner, collections.deque()).extend([prompt] * len(prompt.waiting))
        rows = collections.Counter(s.prompt.owner for s in self._rows if s)
        turns: collections.Counter[_Prompt] = collections.Counter()
        while waiting and turns.total() < free:
            owner = min(waiting, key=rows.__getitem__)
            turns[waiting[owner].popleft()] += 1
            rows[owner] += 1
            if not waiting[owner]:
                del waiting[owner]
        return turns

    def _reserve(self, s: _Sequence, start: int, end: int) -> bool:
        """Makes these positions of a sequence ones that may be written. Returns whether the sequence still has a row.

        For that it forgets prefixes, reads what is on its way, and then takes the rows of sequences that came later, or
        the sequence's own.
        """
        while s in self._rows:
            copies = self._pool.reserve(s.table, start, end)
            if copies is not None:
                for to_make, new in zip(self._copies, copies, strict=True):
                    to_make.update(new)
                return True
            if self._prefixes.evict():
                continue
            if self._flights:  # sequences may have ended, or drawn fewer tokens than they might
                self._read_flight()
            else:
                self._requeue(max((x.turn, row) for row, x in enumerate(self._rows) if x)[1])
        return False

    def _copy(self) -> None:
        """Makes the copies of pages that `_reserve` found necessary."""
        if any(self._copies):
            most = bucket(max(map(len, self._copies)), 1)
            pairs = [
                np.array(
                    [*copies.items(), *[(count, count)] * (most - len(copies))], np.int32
                )  # no page has this number
                for copies, count in zip(self._copies, self._pool.counts, strict=True)
            ]
            self._state = decoding.copy(pairs, self._state)
            self._copies = [{} for _ in self._copies]

    def _tables(self) -> list[Int[np.ndarray, "batch pages"]]:
        return self._pool.arrays([s and s.table for s in self._rows])

    def _read(self, most: int, *, one: bool = False) -> int:
        """Reads a chunk of the prompts in some rows together, of at most so many tokens; with `one` of a row at least.

        Returns the number of tokens.
        """
        while unread := [(row, s) for row, s in enumerate(self._rows) if s and not s.draws]:
            first = min((s for _, s in unread), key=lambda s: s.turn)
            seq, count, chosen = bucket(first.end_of_chunk - first.read), 0, []
            for row, s in sorted(unread, key=lambda each: each[1].turn):
                end = s.end_of_chunk
                fits = count + end - s.read <= most or (one and s is first)
                if (
                    fits
                    and len(chosen) < decoding.most_together(seq)
                    and bucket(end - s.read) == seq
                    and self._reserve(s, s.read, end)
                ):
                    images = part_of_images(s.prompt.images, s.read, end)
                    seen = [x.patches.shape[1:] for *_, x in (*chosen, (images,)) if x is not None]
                    if len(set(seen)) <= 1:  # small images would be padded to the size of large ones
                        chosen.append((row, s, end, images))
                        count += end - s.read
            chosen = [each for each in chosen if self._rows[each[0]] is each[1]]  # whose row no other has needed
            count = sum(end - s.read for _, s, end, _ in chosen)
            if chosen:
                self._read_chunk(chosen, min(seq, self.max_tokens))
            if chosen or first in self._rows:
                return count
        return 0

    def _read_chunk(self, chosen: Sequence[tuple[int, _Sequence, int, Images | None]], seq: int) -> None:
        """Reads the next chunk, up to `end` and with these images, in each row (row, sequence, end, images)."""
        self._copy()
        count = bucket(len(chosen), 1)
        tokens, lengths = padded([s.prompt.tokens[s.read : end] for _, s, end, _ in chosen], count, seq)
        starts = filled([s.read for _, s, *_ in chosen], count, 0)
        rows = filled([row for row, *_ in chosen], count, len(self._rows))
        images = batched_images([images for *_, images in chosen], count, seq)
        new = Reading(rows, tokens, starts, lengths, images, self._record)
        self._state, records = read((self._models, new, self._tables()), self._state)
        records = {name: gathered(a) for name, a in records.items()}
        for n, (_, s, end, _) in enumerate(chosen):
            s.records.append({name: a[n, : end - s.read] for name, a in records.items()})
            self.tokens_read += end - s.read
            s.read = end
            self._pool.leave(s.table, end)
            for key, its_end in zip(s.prompt.keys, s.prompt.ends, strict=False):
                if its_end == end and s.in_chunks and self._prefixes.get(key) is None:
                    self._keep(key, s, end)
            if s.draws and s.prompt.waiting:
                self._keep(s.prompt, s, end)

    def _left(self, s: _Sequence) -> int:
        """Returns the number of tokens that a sequence may still draw in its row, those on their way included."""
        left = s.sampling.max_new_tokens - len(s.completion.tokens)
        return min(left, self._left_until_read_anew(s) or self.max_tokens)

    def _table(self, running: Sequence[tuple[int, _Sequence]]) -> Rows:
        """Returns the sequences of the rows that draw as arrays for the compiled functions."""
        rows, zeros = dict(running), np.zeros(len(self._rows), np.int32)
        progress, ahead = Progress(zeros - 1, zeros.copy(), zeros.copy()), zeros.astype(bool)
        for row, s in running:
            progress.positions[row], progress.drawn[row] = s.length, len(s.completion.tokens)
            progress.left[row], ahead[row] = self._left(s), any(s in flight.rows for flight in self._flights)
        each = [rows.get(row) for row in range(len(zeros))]
        return Rows(
            progress,
            ahead,
            keys=np.stack([(s or running[0][1]).key for s in each]),
            settings=settings(
                [s.sampling if s else Sampling() for s in each],
                allowed=[s and s.allowed for s in each],
                constrained=[s is not None and s.constraint is not None for s in each],
                raw_logprobs=self.raw_logprobs,
            ),
            record=self._record,
        )


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
