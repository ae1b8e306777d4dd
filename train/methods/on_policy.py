"""Distillation on policy: the student's own completions, and a teacher's distributions at each of their tokens.

A teacher may be a larger model, one of several, the model that the student began as with a hint in its prompt, or a
model with another tokenizer. The first reads the student's rows. The others need rows of their own, whose places
"teacher_at" say which of their tokens predicts the same as one of the student's. Completions share rows
(`train.methods.texts`).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from kernels.mesh import CONTEXT, split
from train.base.options import Group, OptionGroup, option
from train.data import packing
from train.data.prompts import Prompt, encode
from train.data.records import Record
from train.methods import alignment
from train.methods.rollouts import RolloutOptions, sampled
from train.methods.texts import Text, few, packed
from train.state.mesh import balanced, positions_of
from train.step import loss
from train.step.language import features
from train.step.step import Batch
from train.step.task import Rolled
from zoo import lora
from zoo.nn.model import AbstractModel
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyOptions(OptionGroup):
    """Options for learning from the student's own completions."""

    help_group: ClassVar[Group] = Group.METHOD

    on_policy: float = 0.0
    """Share of the steps whose completions are the student's own. It draws them after the prompts of --data, and in the
    other steps learns from the data's completions (GKD's lambda)."""
    max_new_tokens: int = option(128, group=Group.STEP)
    """Largest number of tokens of the student's completions."""
    hint: str | None = option(None, rare=True)
    """Field of the records with a text that the teacher alone reads, before the question. Without --teacher, the
    teacher is the model that the run begins with."""


# ======================================================================================================================
# Teachers.
# ======================================================================================================================


class Teacher(eqx.Module):
    """A model that the student learns from. Without a `model` it is the student without its adapters.

    `shared` are the ids of tokens that both have, the student's and the teacher's, if their tokenizers differ; and
    `ends` the ids that end a completion.
    """

    model: AbstractModel | None
    shared: tuple[Int[Array, " shared"], Int[Array, " shared"]] | None = None
    ends: tuple[Int[Array, " ours"], Int[Array, " theirs"]] | None = None


class Teachers(eqx.Module):
    """The teachers of a run. A token with the number n in "teacher" learns from the n-th."""

    each: tuple[Teacher, ...]

    def divergences(
        self,
        model: AbstractModel,
        x: Float[Array, "batch seq embed"],
        batch: Batch,
        *,
        beta: float,
        temperature: float,
        top_k: int | None,
    ) -> Float[Array, "batch seq"]:
        """Computes the divergence from the token's teacher at each target; see `train.step.loss.divergence`.

        A teacher that no token has is skipped.

        Args:
            x: the student's features.
            top_k: the number of the teacher's largest logits that are compared, beside all others as one. None: all.
        """

        def of(teacher: Teacher) -> Float[Array, "batch seq"]:
            other = lora.bare(model) if teacher.model is None else teacher.model
            y = jax.lax.stop_gradient(_seen_by_teacher(other, batch))
            compare = functools.partial(_compared, teacher, beta=beta, temperature=temperature, top_k=top_k)
            return loss.by_chunks(lambda x, y: compare(model.unembed(x), jax.lax.stop_gradient(other.unembed(y))), x, y)

        if len(self.each) == 1:
            return of(self.each[0])
        nothing = lambda: jnp.zeros(x.shape[:2], jnp.float32)
        found = nothing()
        for n, teacher in enumerate(self.each):
            mine = (batch["teacher"] == n) & (batch["loss_mask"] != 0)
            found = jnp.where(mine, jax.lax.cond(jnp.any(mine), functools.partial(of, teacher), nothing), found)
        return found


def _seen_by_teacher(teacher: AbstractModel, batch: Batch) -> Float[Array, "batch seq embed"]:
    """Returns the teacher's features for the student's targets."""
    if "teacher_at" not in batch:
        return features(teacher, batch)[0]
    names = ("tokens", "segments", "positions")
    rows = {name: batch[f"teacher_{name}"] for name in names if f"teacher_{name}" in batch and name in batch}
    y, at = features(teacher, rows)[0], batch["teacher_at"]
    if positions_of(batch) is not None:  # `put_batch` has moved the tokens
        at = jnp.asarray(np.argsort(balanced(y.shape[1], split(CONTEXT))))[at]
    return jnp.take_along_axis(y, at[..., None], axis=1)


def _compared(
    teacher: Teacher,
    student_logits: Float[Array, "*batch vocab"],
    teacher_logits: Float[Array, "*batch other"],
    *,
    beta: float,
    temperature: float,
    top_k: int | None,
) -> Float[Array, "*batch"]:
    """Computes the divergence over all tokens, or over those that are shared, or have the largest logits."""
    if teacher.shared is None and top_k is None:
        return loss.divergence(student_logits, teacher_logits, beta=beta, temperature=temperature)
    log_q, log_p = (
        jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
        for logits in (student_logits, teacher_logits)
    )
    if teacher.shared is not None and teacher.ends is not None:
        log_q, log_p = (
            jnp.concatenate(
                [jnp.take(a, shared, axis=-1), jax.nn.logsumexp(jnp.take(a, ends, axis=-1), axis=-1, keepdims=True)],
                axis=-1,
            )
            for a, shared, ends in zip((log_q, log_p), teacher.shared, teacher.ends, strict=True)
        )
    if top_k is not None:
        log_p, largest = jax.lax.top_k(log_p, min(top_k, log_p.shape[-1]))
        log_q = jnp.take_along_axis(log_q, largest, axis=-1)
    return loss.divergence_of_some(log_q, log_p, beta=beta)


# ======================================================================================================================
# Rows.
# ======================================================================================================================


class Question(NamedTuple):
    """A prompt as the student and as its teacher read it, and the data's completion."""

    prompt: Prompt
    teacher: int
    its_prompt: list[int]
    completion: list[int]  # empty if no step learns from the data's completions


@dataclasses.dataclass(frozen=True)
class Rows:
    """A maker of the rows of batches, from records and completions.

    Args:
        teachers: names of the teachers, to which records belong by their field "teacher", or else by the names of their
            files; one teacher has all records.
        tokenizers: for each teacher its tokenizer, or None if it has the student's tokens.
        hint: see `OnPolicyOptions`.
        completions: whether records have completions to learn from.
        rows: the number of rows of a batch, a multiple of `parts`.
        seq_len: the largest number of tokens of a prompt with its completion, the last one aside.
        room: the largest number of tokens of a prompt.
        parts: the number of microbatches. A part gets texts of few teachers.
    """

    tokenizer: Tokenizer
    vocab_size: int
    teachers: Sequence[str]
    tokenizers: Sequence[Tokenizer | None]
    hint: str | None
    completions: bool
    rows: int
    seq_len: int
    room: int
    parts: int

    def question(self, record: Record) -> Question:
        """Reads a record.

        Raises:
            ValueError: the record lacks a prompt, a completion, a hint or a teacher; names file and line.
        """
        prompt, teacher = encode(record, self.tokenizer), self._teacher(record)
        other, completion = self.tokenizers[teacher], []
        if self.completions:
            ids, mask, *_ = packing.encode(record, self.tokenizer, vocab_size=self.vocab_size)[-1]
            end = len(mask) - mask[::-1].index(1) if 1 in mask else 0  # of the last answer
            start = end - mask[:end][::-1].index(0) if 0 in mask[:end] else 0
            prompt, completion = prompt._replace(ids=ids[:start]), ids[start:end]
        if self.hint is None and other is None:
            return Question(prompt, teacher, prompt.ids, completion)
        reader = other or self.tokenizer
        asked = record if self.hint is None else hinted(record, self.hint, prompt, reader)
        return Question(prompt, teacher, encode(asked, reader).ids, completion)

    def fits(self, question: Question) -> bool:
        """Whether both prompts leave room for a completion."""
        return max(len(question.prompt.ids), len(question.its_prompt)) <= self.room

    def padding(self, rows: int) -> dict[str, Shaped[np.ndarray, "rows seq"]]:
        """Makes a batch of padding: so many rows of the largest length."""
        names = ["tokens", "targets", "loss_mask", "segments", "positions"]
        names += ["teacher"] * (len(self.teachers) > 1)
        names += ["teacher_tokens", "teacher_segments", "teacher_positions", "teacher_at"] * self._has_views
        return {name: np.zeros((rows, self.seq_len), np.int32) for name in names}

    def batch(
        self, questions: Sequence[Question], completions: Sequence[Sequence[int]]
    ) -> tuple[dict[str, Shaped[np.ndarray, "rows ..."]], float]:
        """Packs prompts with completions into rows. Also returns the share of the completions' tokens to learn."""
        texts = []
        for n, (question, drawn) in enumerate(zip(questions, completions, strict=True)):
            tokens, end = [*question.prompt.ids, *drawn], self.seq_len + 1
            logprobs = [None] * len(question.prompt.ids) + [0.0] * len(drawn)  # 0: of drawn tokens, and unused
            texts.append(Text(tokens[:end], logprobs[:end], float(n)))  # "advantages" then say whose target it is
        rows = self._packed(texts, [question.teacher for question in questions])
        number = rows.pop("advantages").astype(np.int32)
        del rows["old"]
        if len(self.teachers) > 1:
            rows["teacher"] = np.array([question.teacher for question in questions], np.int32)[number]
        if self._has_views:
            rows |= self._views(questions, completions, np.where(rows["loss_mask"] != 0, number, -1))
        return rows, int(rows["loss_mask"].sum()) / max(1, sum(map(len, completions)))

    def _packed(self, texts: Sequence[Text], teachers: Sequence[int]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        """Packs texts into rows. With several teachers each microbatch gets texts of few, with about as many tokens."""
        if len(self.teachers) == 1:
            return packed(texts, self.rows, self.tokenizer)
        order = np.argsort(teachers, kind="stable")
        sizes = np.array([len(texts[n].tokens) for n in order])
        sizes = sizes + sizes.mean() / 4  # so that no part gets more short texts than its rows may have
        ends = np.cumsum(sizes)
        part = ((ends - sizes / 2) * self.parts / ends[-1]).astype(int)
        found = [
            packed([texts[n] for n in order[part == k]], self.rows // self.parts, self.tokenizer)
            for k in range(self.parts)
        ]
        longest = max(each["tokens"].shape[1] for each in found)
        wide = [{name: _padded(a, longest) for name, a in each.items()} for each in found]
        # `train.step.microbatches.split` gives a part every so many rows.
        return {name: np.stack([each[name] for each in wide], axis=1).reshape(self.rows, -1) for name in wide[0]}

    @property
    def _has_views(self) -> bool:
        """Whether teachers need rows of their own."""
        return self.hint is not None or any(self.tokenizers)

    def _views(
        self, questions: Sequence[Question], completions: Sequence[Sequence[int]], number: Int[np.ndarray, "rows seq"]
    ) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        """Makes the teachers' rows, which have the same texts as the student's, and the mask of what both predict.

        Args:
            number: the number of the text whose target this is; -1: it was not drawn.
        """
        read: list[list[list[int]]] = [[] for _ in number]
        mask, at = np.zeros(number.shape, np.int32), np.zeros(number.shape, np.int32)
        for n, (question, drawn) in enumerate(zip(questions, map(list, completions), strict=True)):
            own, places = np.nonzero(number == n)
            if not len(places):
                continue
            row, other = own[0], self.tokenizers[question.teacher]
            found, pairs = drawn, [(k, k) for k in range(len(drawn))]
            if other is not None:
                found, pairs = alignment.matches(self.tokenizer, question.prompt.ids, drawn, other, question.its_prompt)
            tokens, start = (question.its_prompt + found)[: self.seq_len], len(question.its_prompt) - 1
            for ours, theirs in pairs:
                if ours < len(places) and start + theirs < len(tokens):
                    mask[row, places[ours]] = 1
                    at[row, places[ours]] = sum(map(len, read[row])) + start + theirs
            read[row].append(tokens)
        views = np.zeros((3, len(read), few(max(sum(map(len, row)) for row in read))), np.int32)
        for row, texts in enumerate(read):
            end = 0
            for segment, tokens in enumerate(texts, 1):
                here, end = slice(end, end + len(tokens)), end + len(tokens)
                views[:, row, here] = tokens, [segment] * len(tokens), np.arange(len(tokens))
        names = ("teacher_tokens", "teacher_segments", "teacher_positions")
        return dict(zip(names, views, strict=True)) | {"teacher_at": at, "loss_mask": mask}

    def _teacher(self, record: Record) -> int:
        if len(self.teachers) == 1:
            return 0
        name = record.fields.get("teacher") or pathlib.Path(record.where.rpartition(", ")[0]).stem
        if name not in self.teachers:
            raise ValueError(
                f"{record.where}: no --teacher is named {name!r}; a record's field `teacher`, or the name of its file, "
                f"is one of {', '.join(self.teachers)}."
            )
        return self.teachers.index(name)


def _padded(array: Shaped[np.ndarray, "rows seq"], seq: int) -> Shaped[np.ndarray, "rows longer"]:
    """Pads rows to the length `seq`."""
    return np.pad(array, ((0, 0), (0, seq - array.shape[1])))


def hinted(record: Record, field: str, prompt: Prompt, tokenizer: Tokenizer) -> Record:
    """Returns a record whose question begins with the text of a field."""
    hint = prompt.record.get(field)
    if not isinstance(hint, str):
        raise ValueError(f"{record.where}: there is no text in the field {field!r}, which --hint names.")
    if isinstance(text := record.fields.get("prompt"), str):
        return record._replace(fields={"prompt": f"{hint}\n\n{text}"})
    turns = next(value for name in ("prompt", "messages", "conversations") if (value := record.fields.get(name)))
    turns = list(packing.messages(turns, tokenizer))
    turns = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    last = max((n for n, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)
    turns[last] = dict(turns[last]) | {"content": f"{hint}\n\n{turns[last]['content']}"}
    return record._replace(fields=dict(record.fields) | {"messages": turns, "prompt": turns})


def rollout(
    model: AbstractModel,
    questions: Sequence[Question],
    n: int,
    folder: pathlib.Path | None,
    *,
    options: OnPolicyOptions,
    temperature: float,
    rows: Rows,
    measure: Callable[[AbstractModel, Mapping[str, np.ndarray]], dict[str, float]],
    mesh: Mesh,
    dtype: str,
    seed: int,
) -> Rolled:
    """Makes the batch of step `n`: the student's own completions or, in other steps than `on_policy`, the data's.

    Args:
        folder: that of the run. None: in evaluations, which have the student's completions, and `measure` them.
        measure: returns the metrics of a batch.
        dtype: the dtype in which the student samples.
    """
    if folder is not None and np.random.RandomState([seed, n]).rand() >= options.on_policy:
        batch, _ = rows.batch(questions, [question.completion for question in questions])
        return Rolled([batch], {"on_policy": 0.0})
    how = RolloutOptions(group=1, max_new_tokens=options.max_new_tokens, temperature=temperature)
    prompts = [question.prompt for question in questions]
    drawn = sampled(model, prompts, options=how, tokenizer=rows.tokenizer, mesh=mesh, dtype=dtype, seed=seed + n)
    completions = [completion for (completion,) in drawn]
    batch, learnt = rows.batch(questions, [completion.tokens for completion in completions])
    numbers = {
        "length": float(np.mean([len(completion.tokens) for completion in completions])),
        "ended": float(np.mean([completion.ended for completion in completions])),
    }
    numbers |= {"on_policy": 1.0} if options.on_policy < 1 else {}
    numbers |= {"aligned": learnt} if any(rows.tokenizers) else {}
    return Rolled([batch], numbers | (measure(model, batch) if folder is None else {}))
