"""The data of a run: data sets, each of records or a prepared store; mixtures of them; and phases of a run.

opened = open_data(o.mixture, whole, reading, mesh, tokenizer, TEXT, settings)
opened.data, opened.validation, opened.prompts, opened.source
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import grain
import jax
import numpy as np
import rich
import tyro
import yaml
from jax.sharding import Mesh

from kernels.mesh import BATCH, CONTEXT
from train.base.options import Flat, OptionGroup
from train.base.source import SourceOptions
from train.data import pictures, store
from train.data.naming import ColumnOptions
from train.data.packing import TEXT, Chat, Example, PackingOptions, RecordKind, Survey, fingerprint, prompt_of
from train.data.preferences import PREFERENCES
from train.data.records import Record, open_records
from train.data.rows import Row, Rows, batches, concatenated, in_memory, order, read_ahead
from train.data.rows import held_out as held_out_of
from zoo.generation.generate import Encoded
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """Options for the shares of each data set, in a run and in its phases, and for the data to validate on."""

    weights: tuple[float, ...] = ()
    """Share of each --data among the rows of every step, such as 0.7 0.3. An epoch has every row, and repeats rows of
    data sets that are too small for their shares. Without weights, an epoch has each row once."""
    hold_out: float = 0.05
    """Fraction of the records, or of a prepared store's rows, to validate on, from the end, if the data has no
    validation files."""
    phases: pathlib.Path | None = None
    """YAML file with a list of phases of the run, one after another. Each phase has steps, and may have data, weights,
    seq_len and batch, which default to the options; a list of batches is a ramp. See docs/data.md."""
    naming: Flat[ColumnOptions] = ColumnOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptions(OptionGroup):
    """Options for data, and for how rows are made of it."""

    data: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders of them, globs, URLs, or hf:NAME, as for train.sft and train.pretrain."""
    model: str
    """Model whose tokenizer and template are used: a zoo name, a Hub repository org/name, or a folder."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    source: Flat[SourceOptions] = SourceOptions()
    seq_len: int = 2048
    """Number of tokens in a row."""
    kind: Literal["text", "preferences", "kto"] = "text"
    """Kind of records. text: texts, chats, and prompts with completions, for pretrain, sft and distill. preferences:
    chosen and rejected, for dpo. kto: completions with a label, or pairs, for dpo with --loss kto."""
    rows: Flat[PackingOptions] = PackingOptions()
    completions_only: bool = True
    """Learn completions and the assistant's messages, but not prompts."""
    naming: Flat[ColumnOptions] = ColumnOptions()
    chat: Chat = Chat()

    def how(self, vocab_size: int) -> tuple[RecordKind, dict[str, Any]]:
        """Returns the kind of these records, and the arguments of its `pack`."""
        if self.kind == "text":
            settings = self.rows.settings(vocab_size, completions_only=self.completions_only)
            return TEXT, settings | {"seq_len": self.seq_len}
        return PREFERENCES, {"vocab_size": vocab_size, "unpaired": self.kind == "kto", "seq_len": self.seq_len}


@dataclasses.dataclass(frozen=True)
class OpenedSet:
    """The rows of one --data, with one length of rows, and the content of the table that `train.run.report` prints."""

    path: str
    seq_len: int
    rows: Rows
    held_out: grain.MapDataset[Row] | None
    source: Mapping[str, Any]  # the data's identity, which must not change until the run has ended
    prompts: Sequence[Encoded]
    records: tuple[grain.MapDataset[Record], grain.MapDataset[Record] | None] | None  # None: the data is a store
    found: Survey | Mapping[str, str]  # the survey of records, or the summary of a store
    examples: Sequence[Example]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a run reads its data."""

    epochs: int  # used where a phase has no number of steps
    seed: int  # of the order of the rows
    validation_rows: int  # the largest number of rows that are held out from records
    dry_run: bool  # whether only one batch will be read


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run that have the same data. The whole run is one, unless --phases has others."""

    steps: int  # 0: the number of steps in --epochs
    data: tuple[str, ...]
    weights: tuple[float, ...]
    seq_len: int
    batch: int


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The opened data of a run, for `train.step.task.Task`."""

    data: grain.IterDataset
    validation: grain.IterDataset | None
    prompts: Sequence[Encoded]
    source: Mapping[str, Any]
    steps: int  # of all phases, or of all epochs
    sets: Sequence[OpenedSet]


def open_data(
    options: DataOptions, whole: Phase, reading: Reading, mesh: Mesh, tokenizer: Tokenizer, kind: RecordKind,
    settings: Mapping[str, Any],
) -> TrainingData:  # fmt: skip
    """Opens all data of a run, and puts its rows in order.

    A run validates on the held-out rows of the last phase's sets.

    Args:
        whole: the run, if it had no --phases.
        settings: arguments of the kind's `pack`, without `seq_len`.

    Raises:
        ValueError, OSError: the data, or a phase, cannot be learnt from.
    """
    phases = read_phases(options.phases, whole) if options.phases else [whole]
    for phase in phases if options.phases else ():
        _check(phase, mesh)
    limit = _most_rows(phases)
    if reading.dry_run and limit:  # without a limit the number of rows decides the number of steps, which is printed
        limit = whole.batch
    sets: dict[tuple[str, int], OpenedSet] = {}
    for path, seq_len in dict.fromkeys((path, phase.seq_len) for phase in phases for path in phase.data):
        shape, seed = {**settings, "seq_len": seq_len}, reading.seed + len(sets)
        sets[path, seq_len] = open_set(
            options, path, tokenizer, kind, shape, seed=seed, limit=limit, validation_rows=reading.validation_rows
        )
    if tokenizer.processor:
        sets = dict(zip(sets, with_records_of_all(list(sets.values())), strict=True))

    opening = functools.partial(_opening, sets.values(), tokenizer=tokenizer, kind=kind)
    parts = _in_phases(phases, sets, reading.epochs, mesh, opening(0))
    last = [sets[path, phases[-1].seq_len] for path in phases[-1].data]
    held_out, validation = [each.held_out for each in last if each.held_out], None
    if held_out:
        validation = read_ahead(batches(concatenated(held_out), phases[-1].batch, mesh=mesh, finish=opening(1)))
    source: dict[str, Any] = {"sets": [each.source for each in sets.values()], "hold_out": options.hold_out}
    source["seed"] = reading.seed
    source |= {"columns": " ".join(options.naming.columns)} if options.naming.columns else {}
    source |= {**settings, **_mixture(phases, list(sets), is_whole=not options.phases)}
    data = grain.MapDataset.concatenate(parts) if len(parts) > 1 else parts[0]
    prompts = next((each.prompts for each in last if each.prompts), [])
    return TrainingData(read_ahead(data), validation, prompts, source, sum(map(len, parts)), list(sets.values()))


def _most_rows(phases: Sequence[Phase]) -> int | None:
    """Returns the number of rows that a run can reach, so that no more are made.

    None: all are made, since a phase without weights takes its shares from the sets' sizes, and one without a number of
    steps takes every row.
    """
    if all(phase.steps and (len(phase.data) == 1 or phase.weights) for phase in phases):
        return sum(phase.steps * phase.batch for phase in phases)
    return None


def _in_phases(
    phases: Sequence[Phase],
    sets: Mapping[tuple[str, int], OpenedSet],
    epochs: int,
    mesh: Mesh,
    finish: Callable[[Any], Any] | None,
) -> list[grain.MapDataset[Any]]:
    """Puts rows in order, phase by phase. A set goes on in a later phase after the rows that it has given before.

    Args:
        sets: (path, number of tokens of a row) -> set.
        finish: is called with each batch.

    Returns the batches of each phase.
    """
    parts, used = [], dict.fromkeys(sets, 0)
    for phase in phases:
        keys = [(path, phase.seq_len) for path in phase.data]
        rows = order(
            [sets[key].rows for key in keys], weights=phase.weights, epochs=None if phase.steps else epochs,
            begun=[used[key] for key in keys],
        )  # fmt: skip
        made = batches(rows, phase.batch, mesh=mesh, finish=finish)
        parts.append(made[: phase.steps] if phase.steps else made)
        used |= dict(zip(keys, rows.used(phase.steps * phase.batch), strict=True))
    return parts


def open_set(
    options: DataOptions,
    path: str,
    tokenizer: Tokenizer,
    kind: RecordKind,
    shape: Mapping[str, Any],
    *,
    seed: int,
    limit: int | None,
    validation_rows: int,
) -> OpenedSet:
    """Opens one --data. If it has records, at most `limit` rows are made of them, and kept in memory.

    Args:
        shape: arguments of the kind's `pack`.
        validation_rows: the largest number of rows that are made of the records to validate on.

    Raises:
        ValueError, OSError: the data cannot be read or learnt from; or it is a store of other rows.
    """
    if store.is_store(path):
        return _open_store(options, path, tokenizer, kind, shape, seed)
    records, held = open_records(path, options.hold_out, options.naming.columns)
    found = kind.survey(records, tokenizer, **shape)
    make = functools.partial(kind.pack, tokenizer=tokenizer, **shape)
    rows = in_memory(make(records, seed=seed), shape["seq_len"], limit=limit)
    assert rows is not None, "the survey has found some"
    held_out = None if held is None else in_memory(make(held), shape["seq_len"], limit=validation_rows)
    prompts = kind.prompts_of(held or records, tokenizer, vocab_size=shape["vocab_size"])
    return OpenedSet(
        path, shape["seq_len"], Rows(rows, seed, as_packed=True), held_out, fingerprint(path, tokenizer), prompts,
        (records, held), found, found.examples,
    )  # fmt: skip


def _open_store(
    options: DataOptions, path: str, tokenizer: Tokenizer, kind: RecordKind, shape: Mapping[str, Any], seed: int
) -> OpenedSet:
    folder = pathlib.Path(path)
    refuse_columns(options.naming, path)
    content = store.read(folder)
    store.refuse_other(folder, content, store.identity(kind.name, tokenizer, shape))
    if jax.process_index() == 0:
        with rich.get_console().status(f"Hashing {folder}"):
            store.verify(folder)
    rows, held_out = store.rows(folder, content, "train"), store.rows(folder, content, "valid")
    if rows is None:
        raise ValueError(f"{folder} has no rows to train on.")
    if held_out is None and (held := held_out_of(options.hold_out, len(rows))):
        rows, held_out = rows[:-held], rows[-held:]
    examples = [next(documents(row)) for row in rows[:3] if row]
    prompts = [Encoded(prompt_of(example)) for example in examples]
    source = {"store": store.fingerprint(folder)}
    summary = dict(store.summary(content, "train"))
    return OpenedSet(path, shape["seq_len"], Rows(rows, seed), held_out, source, prompts, None, summary, examples)


def refuse_columns(options: ColumnOptions, path: str) -> None:
    """Raises a ValueError if --columns is given for a store, which has rows and no columns."""
    if options.columns:
        raise ValueError(f"--columns: {path} is prepared already and has no columns; give it to train.prepare.")


def documents(row: Row) -> Iterator[Example]:
    """Yields the documents of a row, as they were before packing."""
    for number in range(1, int(row["segments"].max()) + 1):
        here = row["segments"] == number
        learnt = row["loss_mask"][here].tolist()
        ids = [int(row["tokens"][here][0]), *row["targets"][here].tolist()]
        yield Example(ids, [learnt[0], *learnt], whole=True)


# ======================================================================================================================
# Images.
# ======================================================================================================================


def with_records_of_all(sets: Sequence[OpenedSet]) -> list[OpenedSet]:
    """Offsets each set's record numbers, so that they stay unique when sets are mixed.

    Raises:
        ValueError: a set is a store, which has no images.
    """
    if any(each.records is None for each in sets):
        raise ValueError("--vision: prepared stores have no images; give the files that it was made of.")
    starts = np.cumsum([[0, 0], *([len(records or ()) for records in each.records or ()] for each in sets)], axis=0)
    moved = lambda rows, by: rows and rows.map(lambda row: row | {"record": row["record"] + np.int32(by)})
    return [
        dataclasses.replace(
            each,
            rows=dataclasses.replace(each.rows, rows=moved(each.rows.rows, start[0])),
            held_out=moved(each.held_out, start[1]),
        )
        for each, start in zip(sets, starts[:-1], strict=True)
    ]


def _opening(sets: Any, split: int, tokenizer: Tokenizer, kind: RecordKind) -> Callable[[Any], Any] | None:
    """Returns a function that opens the images of a batch: of the sets' records to train on (0) or held out (1)."""
    if not tokenizer.processor:
        return None
    records = [each.records[split] for each in sets if each.records[split]]
    return functools.partial(
        pictures.with_patches, records=concatenated(records), processor=tokenizer.processor, chat_of=kind.chat_of
    )


# ======================================================================================================================
# Phases.
# ======================================================================================================================


def read_phases(path: pathlib.Path, whole: Phase) -> list[Phase]:
    """Reads the phases of a run from the file of --phases. Keys that a phase lacks have the values of `whole`.

    Raises:
        ValueError: the file is no list of phases, or a phase has a wrong key or value; names the phase and the key.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path} must have a list of phases, each with steps.")
    parts = (_parts(f"{path}, phase {number}", entry, whole) for number, entry in enumerate(found, 1))
    return list(itertools.chain(*parts))


def _parts(where: str, entry: Any, whole: Phase) -> list[Phase]:
    """Returns the phase that an entry describes; or several, with equal shares of the steps, if it lists batches."""
    kinds = dict(steps=int, data=list, weights=list, seq_len=int, batch=int | list)
    if not isinstance(entry, dict) or "steps" not in entry:
        raise ValueError(f"{where} must have steps.")
    for key, value in entry.items():
        if key not in kinds:
            raise ValueError(f"{where} has {key}, and may have {', '.join(kinds)}.")
        value = [value] if key == "data" and isinstance(value, str) else value
        of = dict(data=str, weights=int | float, batch=int).get(key)  # type of the elements of a list
        elements = value if of and isinstance(value, list) else [value]
        right = isinstance(value, kinds[key]) and all(isinstance(e, of or int) and e is not True for e in elements)
        small = key != "weights" and any(isinstance(e, int) and e < 1 for e in elements)
        if not right or (key in ("data", "batch") and not elements) or small:
            kind = {"data": "a list of names", "weights": "a list of numbers", "batch": "a number above 0, or a list"}
            what = kind.get(key, "a number above 0")
            raise ValueError(f"{where} has {key}: {value}, which must be {what}.")
        entry = entry | {key: tuple(value) if isinstance(value, list) else value}
    weights = tuple(map(float, entry.get("weights", () if "data" in entry else whole.weights)))
    batch = entry.get("batch", whole.batch)
    batches = batch if isinstance(batch, tuple) else (batch,)
    phase = dataclasses.replace(whole, **entry | {"weights": weights, "batch": max(batches)})
    if phase.seq_len > whole.seq_len or phase.batch * phase.seq_len > whole.batch * whole.seq_len:
        raise ValueError(
            f"{where} has {phase.batch} rows of {phase.seq_len} tokens, and --batch {whole.batch} --seq-len "
            f"{whole.seq_len} must be at least the largest of all phases."
        )
    if phase.steps < len(batches):
        raise ValueError(f"{where} has {phase.steps} steps, which are too few for {len(batches)} batches.")
    ends = [phase.steps * n // len(batches) for n in range(len(batches) + 1)]
    lengths = (end - start for start, end in itertools.pairwise(ends))
    return [dataclasses.replace(phase, batch=b, steps=n) for b, n in zip(batches, lengths, strict=True)]


def _mixture(phases: Sequence[Phase], sets: Sequence[Any], *, is_whole: bool) -> dict[str, Any]:
    """Returns the data mixture as JSON, which a checkpoint is compared with. Phases have the numbers of their sets.

    Without --phases (`is_whole`) the number of steps is left out, as the run may be made longer.
    """
    if is_whole:
        return {"weights": phases[0].weights, "seq_len": phases[0].seq_len, "batch": phases[0].batch}
    numbers = lambda phase: [sets.index((path, phase.seq_len)) for path in phase.data]
    return {"phases": [dataclasses.asdict(phase) | {"data": numbers(phase)} for phase in phases]}


def _check(phase: Phase, mesh: Mesh) -> None:
    """Raises a ValueError if the mesh does not divide the batches of a phase."""
    shares, parts = math.prod(mesh.shape[axis] for axis in BATCH), mesh.shape[CONTEXT]
    if phase.batch % shares or phase.seq_len % (2 * parts if parts > 1 else 1):
        raise ValueError(
            f"--phases: {phase.batch} rows of {phase.seq_len} tokens can't be split over {shares} devices, and over "
            f"twice context={parts}."
        )
