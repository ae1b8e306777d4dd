"""Inspection of data, or of a prepared store, as a model would learn from it: counts, histograms, and marked samples.

Only a few numbers of each inspected record are kept in memory. `train.inspect` is the command.
"""

import array
import dataclasses
import hashlib
import html
import itertools
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import rich
import rich.bar
import rich.progress
import tyro
from jaxtyping import Int
from rich.table import Table
from rich.text import Text

import zoo
from convert.private import public
from train.data import store
from train.data.packing import TEXT, Example, Packing, encode, fill, max_length, tokenizer_hash
from train.data.preferences import PAIRS, encode_pairs, is_learnt, shorten
from train.data.record import PLACES, Problems
from train.data.records import Record, open_records
from train.data.sets import RowOptions, documents, refuse_columns
from train.run import report
from zoo.text.tokenizer import Tokenizer


SHOWN = 2000  # tokens of a sample's document
UNLEARNT, LEARNT, CUT = range(3)  # marks of tokens
STYLES = {UNLEARNT: "dim", LEARNT: "", CUT: "red strike"}
CLASSES = {UNLEARNT: "unlearnt", LEARNT: "learnt", CUT: "cut"}  # in the page
TEMPLATE = pathlib.Path(__file__).with_name("inspect.html")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(RowOptions):
    """Look at data before a model learns from it. For a prepared store, the store's own options are used."""

    data: tyro.conf.Positional[tuple[str, ...]]
    """Prepared stores; or files, folders of them, globs, URLs, or hf:NAME, as for train.sft and train.pretrain."""
    model: str = ""
    """Model whose tokenizer and template are used: a zoo name, a Hub repository org/name, or a folder. The default is
    the model that a store was prepared for, and tiny for other data."""
    records: int = 4000
    """Largest number of records, or rows of a store, to look at, evenly spread. 0: all."""
    samples: int = 5
    """Number of records, or rows of a store, to show."""
    verify: bool = False
    """Read all of a store, and compare the SHA-256 of its files."""
    html: pathlib.Path | None = None
    """File for the same report as a page, which needs no network. None: no page."""


# ======================================================================================================================
# Entries: records as they are put into rows, or rows of a store.
# ======================================================================================================================


class Document(NamedTuple):
    name: str
    example: Example
    end: int  # number of its ids that are in rows; the last one is only a target

    @property
    def tokens(self) -> int:
        return max(0, self.end - 1)

    @property
    def learnt(self) -> int:
        return sum(self.example.mask[1 : self.end])


Unit = list[Document]  # documents that stay together in a row: one, or a pair


class Entry(NamedTuple):
    where: str
    units: list[Unit]
    own: list[Unit]  # units that are compared with those of other entries, to find duplicates
    learnt: bool


class Sample(NamedTuple):
    where: str
    documents: list[tuple[str, list[tuple[str, int]]]]  # title, and text in parts with their marks


@dataclasses.dataclass(frozen=True)
class Summary:
    """The report on one data set, or on one split of a store."""

    title: str
    table: dict[str, str]
    unit: str  # name of the units that the histogram counts
    bars: list[tuple[int, int, int]]  # see `bars`
    longest: int  # largest number of ids of a unit that fits into a row
    samples: list[Sample]
    problems: Sequence[str] = ()  # problems of records that cannot be learnt from


def of_text(record: Record, before: Record, tokenizer: Tokenizer, shape: Mapping[str, Any]) -> Entry:
    """Makes an entry of a record, as `train.data.packing.pack` puts it into rows."""
    options = {name: shape[name] for name in ("vocab_size", "completions_only")}
    how = {name: shape[name] for name in ("seq_len", "packing", "long_texts")}
    examples = encode(record, tokenizer, **options)
    units = [[Document("", each, min(len(each.ids), max_length(each.whole, **how)))] for each in examples]
    return Entry(record.where, units, [list(itertools.chain(*units))], any(unit[0].learnt for unit in units))


def of_pairs(record: Record, before: Record, tokenizer: Tokenizer, shape: Mapping[str, Any]) -> Entry:
    """Makes an entry of a record, as `train.data.preferences.pack` puts it into rows."""
    unpaired, units = shape["unpaired"], []
    for pair in encode_pairs(record, before, tokenizer, vocab_size=shape["vocab_size"], unpaired=unpaired):
        short = shorten(pair, shape["seq_len"] + 2)
        names = ("desirable" if pair.desirable else "undesirable", "another's") if unpaired else ("chosen", "rejected")
        ends = [len(each.ids) if is_learnt(short) else 0 for each in short[:2]]
        units.append([Document(*each) for each in zip(names, pair[:2], ends, strict=True)])
    own = [document for unit in units for document in (unit[:1] if unpaired else unit)]
    return Entry(record.where, units, [own], all(unit[0].end for unit in units))


def of_row(number: int, row: Mapping[str, Any], together: int) -> Entry:
    """Makes an entry of a row of a store. `together` is the number of documents in a unit."""
    found = [Document(f"document {n}", each, len(each.ids)) for n, each in enumerate(documents(dict(row)), 1)]
    units = [found[n : n + together] for n in range(0, len(found), together)]
    return Entry(f"row {number + 1:,}", units, units, any(document.learnt for document in found))


# ======================================================================================================================
# Reports on entries.
# ======================================================================================================================


def of_records(options: InspectOptions, path: str) -> Summary:
    """Inspects the records of files."""
    if options.verify:
        raise ValueError(f"--verify: {path} is no prepared store, so there is no SHA-256 to compare.")
    model = options.source.open(options.model or "tiny", options.revision)
    tokenizer = zoo.tokenizer(model, **options.chat.arguments)
    kind, shape = options.how(model.config.vocab_size)
    records, valid = open_records(path, 0.0, options.naming.columns)
    numbers, is_text = spread(len(records), options.records).tolist(), kind is TEXT

    def entries(chosen: Iterable[int], problems: Problems) -> Iterator[tuple[int, Entry]]:
        for n in chosen:
            entry = None
            with problems.noted():  # KTO's other record is the record before
                record = records[numbers[n]]
                before = record if is_text else records[numbers[n - 1]]
                entry = (of_text if is_text else of_pairs)(record, before, tokenizer, shape)
            if entry:
                yield n, entry

    problems, unit = Problems(), "document" if is_text else "pair"
    tally = count(entries(range(len(numbers)), problems), len(numbers), public(path))
    longest, part = options.seq_len + (1 if is_text else 2), fills(tally, is_text, shape)
    table = {
        "records": f"{len(records):,}, of which {len(numbers):,} are looked at",
        "cannot be learnt from": percent(problems.count, len(numbers)) + " records",
        **({"validation": f"{len(valid):,} records, which are not looked at"} if valid else {}),
        "documents": f"{tally.documents:,}",
        "tokens": f"{tally.tokens:,} in rows, of which {tally.learnt:,} are learnt",
        f"tokens of a {unit}": lengths(tally.sizes),
        **notes(tally, lambda n: public(records[numbers[n]].where), "records", "records"),
        "filled": ", ".join(f"{name} {100 * full:.1f} %" for name, full in part.items()) + " of the rows' tokens",
    }
    samples = [sample(entry, tokenizer) for _, entry in entries(some(len(numbers), options.samples), Problems())]
    bad = [public(str(problem)) for problem in problems.found.values()]
    return Summary(public(path), table, unit, bars(tally.sizes, longest), longest, samples, bad)


def of_store(options: InspectOptions, folder: pathlib.Path) -> list[Summary]:
    """Inspects the rows of each split of a prepared store."""
    refuse_columns(options.naming, str(folder))
    content, found = store.read(folder), []
    if options.verify:
        store.verify(folder, anew=True)
    tokenizer = zoo.tokenizer(options.model or content["model"], revision=options.revision, **options.chat.arguments)
    store.refuse_other(folder, content, {"tokenizer": tokenizer_hash(tokenizer)})
    unit, together = ("document", 1) if content["kind"] == TEXT.name else ("pair", 2)
    for split in content["splits"]:
        if (rows := store.rows(folder, content, split)) is None:
            continue
        numbers, longest = spread(len(rows), options.records).tolist(), content["settings"]["seq_len"] + together
        entries = lambda chosen, rows=rows, numbers=numbers: (
            (n, of_row(numbers[n], rows[numbers[n]], together)) for n in chosen
        )
        tally = count(entries(range(len(numbers))), len(numbers), f"{folder}, {split}")
        noted = notes(tally, lambda n, numbers=numbers: f"row {numbers[n] + 1:,}", "rows", f"{unit}s")
        table = {
            **dict(store.summary(content, split)),
            "looked at": f"{len(numbers):,} rows",
            f"tokens of a {unit}": lengths(tally.sizes),
            **{name: noted[name] for name in ("nothing to learn in", "the same again")},
            **({"SHA-256": "as written"} if options.verify else {}),
        }
        samples = [sample(entry, tokenizer) for _, entry in entries(some(len(numbers), options.samples))]
        found.append(Summary(f"{folder}, {split}", table, unit, bars(tally.sizes, longest), longest, samples))
    if not found:
        raise ValueError(f"{folder} has no rows: prepare data in which there is something to learn.")
    return found


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts over the inspected entries."""

    entries: int
    documents: int
    tokens: int  # tokens in rows
    learnt: int
    cut: list[int]  # number of entries that lose an end, then the numbers of the first few such entries
    unlearnt: list[int]  # the same for entries with nothing to learn
    sizes: Int[np.ndarray, " units"]  # ids, before anything is cut
    whole: Int[np.ndarray, " units"]  # 1: must not be cut into pieces
    columns: Int[np.ndarray, " units"]  # tokens in rows
    copies: list[int]  # number of units with the ids of an earlier unit, then the numbers of the first few entries
    most: tuple[int, int]  # number of copies of the most frequent unit, and the number of its first entry
    compared: int  # number of units that were compared


def count(entries: Iterable[tuple[int, Entry]], number: int, title: str) -> Counts:
    """Counts over entries, keeping only a few numbers of each.

    Args:
        entries: each entry with its number.
        number: the largest number of entries there can be, for the progress bar and the shares.
    """
    sizes, columns, whole, digests, places = (array.array(kind) for kind in "QQQQQ")
    found, learnt, cut, unlearnt = 0, 0, [0], [0]
    for n, entry in rich.progress.track(entries, f"Looking at {title}", number, transient=True):
        for unit in entry.units:
            sizes.append(sum(len(document.example.ids) for document in unit))
            columns.append(sum(document.tokens for document in unit))
            whole.append(unit[0].example.whole)
        inside = list(itertools.chain(*entry.units))
        found += len(inside)
        learnt += sum(document.learnt for document in inside)
        for what, it_is in (
            (cut, any(0 < document.end < len(document.example.ids) for document in inside)),
            (unlearnt, not entry.learnt),
        ):
            what[0] += it_is
            what += [n] if it_is and len(what) <= PLACES else []
        for unit in entry.own:
            digest = hashlib.blake2b(digest_size=8)
            for document in unit:
                digest.update(np.array([len(document.example.ids), *document.example.ids], np.int64).tobytes())
            digests.append(int.from_bytes(digest.digest(), "little"))
            places.append(n)
    _, first, times = np.unique(np.array(digests), return_index=True, return_counts=True)
    top = int(np.argmax(times)) if len(times) else 0
    most = (int(times[top]), places[int(first[top])]) if len(times) else (0, 0)
    again = sorted(np.delete(np.array(places), first).tolist())
    as_array = lambda values: np.array(values, np.int64)
    return Counts(
        number, found, sum(columns), learnt, cut, unlearnt, as_array(sizes), as_array(whole), as_array(columns),
        [len(again), *list(dict.fromkeys(again))[:PLACES]], most, len(digests),
    )  # fmt: skip


def spread(length: int, number: int) -> Int[np.ndarray, " chosen"]:
    """Returns `number` indices spread evenly over `range(length)`; every index if `number` is 0."""
    return np.linspace(0, length - 1, min(number or length, length)).astype(int)


def some(length: int, number: int) -> list[int]:
    """Returns `number` indices spread evenly over `range(length)`; none if `number` is 0."""
    return spread(length, number).tolist() if number else []


def percent(number: int, of: int) -> str:
    return f"{number:,} ({100 * number / max(1, of):.1f} %)"


def lengths(sizes: Int[np.ndarray, " units"]) -> str:
    """Describes sizes in words: the shortest, median, 95th percentile and longest."""
    found = np.quantile(sizes, [0, 0.5, 0.95, 1], method="nearest").tolist() if len(sizes) else [0] * 4
    return ", ".join(f"{name} {size:,}" for name, size in zip(("min", "median", "95%", "max"), found, strict=True))


def notes(tally: Counts, where: Callable[[int], str], entries: str, compared: str) -> dict[str, str]:
    """Describes what may be wrong with entries: cut ends, nothing to learn, duplicates; each with the first places."""
    such = lambda found: f", such as {'; '.join(map(where, found[1:]))}" if found[0] else ""
    of = lambda found: percent(found[0], tally.entries) + f" {entries}" + such(found)
    times, first = tally.most
    often = f"; {where(first)} is there {times:,} times" if times > 1 else ""
    return {
        "cut at the row's end": of(tally.cut),
        "nothing to learn in": of(tally.unlearnt),
        "the same again": f"{percent(tally.copies[0], tally.compared)} {compared} have the tokens of one before"
        f"{such(tally.copies)}{often}",
    }


def fills(tally: Counts, is_text: bool, shape: Mapping[str, Any]) -> dict[str, float]:
    """Returns packing -> fraction of the rows that is not padding, with entries in order. Pairs have one packing."""
    seq_len, found = shape["seq_len"], {}
    for packing in typing.get_args(Packing) if is_text else ("fit",):
        columns = tally.columns
        if is_text:
            how = dict(seq_len=seq_len, packing=packing, long_texts=shape["long_texts"])
            most = np.where(tally.whole > 0, max_length(True, **how), max_length(False, **how))
            columns = np.minimum(tally.sizes, most) - 1
        source: Any = columns[columns > 0]
        empty = grain.MapDataset.source(source).map(lambda length: [{"columns": np.zeros(length, np.int8)}])
        rows = sum(1 for _ in fill(empty, seq_len=seq_len, packing=packing, most=None if is_text else PAIRS))
        found[packing] = float(source.sum()) / max(1, rows * seq_len)
    return found


def bars(sizes: Int[np.ndarray, " units"], longest: int) -> list[tuple[int, int, int]]:
    """Makes a histogram of sizes, with two bars for each doubling. A bar is (least size, largest size, number).

    One bar ends at `longest`.
    """
    edges = {0, 1, *(size for n in range(1, 60) for size in (2**n, 3 * 2 ** (n - 1)))}
    edges = sorted({edge for edge in edges if not 0.8 * longest < edge < 1.25 * longest} | {longest + 1})
    numbers = np.histogram(sizes, edges)[0].tolist()
    filled = np.flatnonzero(numbers)
    return [(edges[n], edges[n + 1] - 1, numbers[n]) for n in range(filled[0], filled[-1] + 1)] if len(filled) else []


# ======================================================================================================================
# Output: samples, the terminal and the page.
# ======================================================================================================================


def sample(entry: Entry, tokenizer: Tokenizer) -> Sample:
    """Makes a sample of an entry: the first `SHOWN` tokens of each document, with their marks."""
    found = []
    for document in itertools.chain(*entry.units):
        ids, mask, _, _ = document.example
        marks = [*mask[: document.end], *[CUT] * (len(ids) - document.end)]
        more = f", of which the first {SHOWN:,} are shown" if len(ids) > SHOWN else ""
        title = f"{document.name + ', ' if document.name else ''}{len(ids):,} tokens, {document.learnt:,} learnt{more}"
        found.append((title, list(report.decoded(ids[:SHOWN], marks, tokenizer))))
    return Sample(public(entry.where), found)


def show(found: Summary) -> None:
    """Prints the table, the problems, the histogram of lengths, and the samples."""
    report.rows(found.title, found.table)
    for problem in found.problems:
        rich.print(Text(problem, style="red"))
    table = Table(
        title=f"\nTokens of a {found.unit}", title_justify="left", box=None, show_header=False, padding=(0, 2)
    )
    highest = max((number for *_, number in found.bars), default=0)
    for low, high, number in found.bars:
        color = "red" if low > found.longest else "blue"
        table.add_row(
            Text(f"{low:,} to {high:,}"), rich.bar.Bar(highest, 0, number, width=40, color=color), f"{number:,}"
        )
    rich.print(table)
    for where, parts in found.samples:
        rich.print(Text(f"\n{where}", style="bold"))
        for title, text in parts:
            rich.print(Text(title, style="italic blue"))
            rich.print(Text.assemble(*((part, STYLES[mark]) for part, mark in text)))


def page(found: Sequence[Summary]) -> str:
    """Returns the reports as an HTML page."""
    escape, written = html.escape, []
    for each in found:
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in each.table.items())
        written.append(f"<h2>{escape(each.title)}</h2>\n<table>{rows}</table>\n")
        written += [f"<p>{escape(problem)}</p>\n" for problem in each.problems]
        written.append(f"<h3>Tokens of a {each.unit}</h3>\n{picture(each)}\n")
        for where, parts in each.samples:
            written.append(f"<h3>{escape(where)}</h3>\n")
            for title, text in parts:
                spans = "".join(f'<span class="{CLASSES[mark]}">{escape(part)}</span>' for part, mark in text)
                written.append(f'<div class="document"><p>{escape(title)}</p><pre>{spans}</pre></div>\n')
    title = escape(", ".join(each.title for each in found))
    return TEMPLATE.read_text(encoding="utf-8").replace("{{title}}", title).replace("{{content}}", "".join(written))


def picture(found: Summary) -> str:
    """Draws the histogram as SVG."""
    width, height, highest = 36, 160, max((number for *_, number in found.bars), default=1)
    drawn = []
    for n, (low, high, number) in enumerate(found.bars):
        tall, kind, middle = height * number / highest, "long" if low > found.longest else "bar", width * (n + 0.5)
        drawn.append(
            f'<rect class="{kind}" x="{width * n + 2}" y="{height + 16 - tall:.1f}" width="{width - 4}" '
            f'height="{tall:.1f}"><title>{low:,} to {high:,} tokens: {number:,}</title></rect>'
            f'<text x="{middle}" y="{height + 12 - tall:.1f}">{number:,}</text>'
            f'<text x="{middle}" y="{height + 30}">{low:,}</text>'
        )
    size = (max(1, width * len(found.bars)), height + 36)
    return f'<svg width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">{"".join(drawn)}</svg>'
