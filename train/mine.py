"""A script that finds hard negatives by a model that embeds, to train on: `python -m train.mine --help`.

    python -m train.mine pairs.jsonl --model qwen3-embedding-0.6b --out mined.jsonl
    python -m train.embed --data mined.jsonl --negatives 4

A hard negative of an anchor is a text that is near to it and not its positive. The texts are those of all records.
"""

import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import rich
import tyro
from jaxtyping import Float

import zoo
from convert.private import public, warn_of_secrets
from train.base import runfile, writing
from train.base.options import Flat, OptionGroup
from train.base.source import SourceOptions
from train.data.groups import Group, group
from train.data.naming import ColumnOptions
from train.data.records import open_records


TOGETHER = 1024  # anchors that are compared at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class MineOptions(OptionGroup):
    """Add hard negatives to pairs, as lists under `negative`."""

    data: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders of them, globs, URLs or hf:NAME, as for train.embed."""
    model: str
    """Model that embeds: a zoo name, a Hub repository org/name, or a folder."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    source: Flat[SourceOptions] = SourceOptions()
    out: pathlib.Path
    """File of JSON lines to write."""
    negatives: int = 4
    """Number of negatives of a pair, the nearest first."""
    margin: float = 0.05
    """A text counts as a right answer, and is left out, if its cosine exceeds the positive's without this fraction;
    0.05 in NV-Retriever (arXiv:2407.15831)."""
    mesh: str = "fsdp=-1"
    """Number of devices along each axis, as for training."""
    naming: Flat[ColumnOptions] = ColumnOptions()


def mine(
    groups: Sequence[Group],
    texts: list[str],
    anchors: Float[np.ndarray, "groups width"],
    vectors: Float[np.ndarray, "texts width"],
    *,
    negatives: int,
    margin: float,
) -> Iterator[list[str]]:
    """Yields the negatives of each group, the nearest first; fewer if the texts have no more.

    Args:
        texts: distinct texts, the groups' positives among them.
        anchors: embeddings of the groups' anchors, of length 1.
        vectors: embeddings of the texts, of length 1.
    """
    number, right = {text: n for n, text in enumerate(texts)}, collections.defaultdict(list)
    for each in groups:
        right[each.anchor].append(number[each.positive])
    for start in range(0, len(groups), TOGETHER):
        cosines = anchors[start : start + TOGETHER] @ vectors.T
        for each, row in zip(groups[start : start + TOGETHER], cosines, strict=True):
            limit = row[number[each.positive]]
            row[row > limit - margin * abs(limit)] = -np.inf
            row[right[each.anchor]] = -np.inf
            most = min(negatives, np.count_nonzero(row > -np.inf))
            nearest = np.argsort(-row, kind="stable")[:most]
            yield [texts[n] for n in nearest]


def records_of(groups: Sequence[Group], found: Iterable[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yields the records to write. Negatives that a group had before come first."""
    for each, own in zip(groups, found, strict=True):
        more = [text for text in own if text not in each.negatives]
        yield {"anchor": each.anchor, "positive": each.positive, "negative": [*each.negatives, *more]}


def main(o: MineOptions) -> None:
    """Writes the records with their negatives.

    Raises:
        ValueError, OSError: the records are no pairs, or the model cannot be read.
    """
    groups = [group(record) for path in o.data for record in open_records(path, 0.0, o.naming.columns)[0]]
    texts = list(dict.fromkeys(text for each in groups for text in (each.positive, *each.negatives)))
    source = o.source.open(o.model, o.revision)
    model, tokenizer = zoo.load(source, head="embedding", mesh=o.mesh), zoo.tokenizer(source)
    named = lambda name: name if name in tokenizer.prompts else None
    with rich.get_console().status(f"Embedding {len(groups):,} anchors and {len(texts):,} texts"):
        anchors = zoo.embed(model, tokenizer, [each.anchor for each in groups], prompt_name=named("query"))
        vectors = zoo.embed(model, tokenizer, texts, prompt_name=named("document"))
    unit = lambda a: a / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-12)
    found = list(mine(groups, texts, unit(anchors), unit(vectors), negatives=o.negatives, margin=o.margin))
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records_of(groups, found)]
    writing.write(o.out, "".join(lines))
    rich.print(
        f"{o.out} has {len(groups):,} pairs, each with {np.mean(list(map(len, found))):.1f} negatives on average."
    )


if __name__ == "__main__":
    warn_of_secrets(sys.argv)
    try:
        main(runfile.parse(MineOptions))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(public(f"{type(error).__name__}: {error}")) from error
