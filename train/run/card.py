"""The model card of an export: its README.md, with the metadata that the Hub, transformers and PEFT expect."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import huggingface_hub
import jax
import rich
import yaml

from convert.files import CARD
from convert.private import public
from train.base import writing
from train.base.listing import plain
from train.run import report
from train.run.options import Options
from train.run.start import Run
from train.watch.metrics import read_metrics
from train.watch.page import RUN, flat
from zoo.nn.heads import Kind
from zoo.registry import is_local
from zoo.source import Source
from zoo.weights import peft


# The Hub's name for the use of a model, by its head; None: output embeddings.
PIPELINES: dict[Kind | None, str] = {
    None: "text-generation", "embedding": "feature-extraction", "classification": "text-classification",
    "reward": "text-classification",
}  # fmt: skip
LICENSE = ("license", "license_name", "license_link")
NAMED = 8  # files of data that a card names


def write(exported: pathlib.Path, options: Options, run: Run, base: Source | None) -> None:
    """Writes the card of an exported model or adapter into its folder. Only process 0 does so.

    Args:
        base: the checkpoint that the run began with; None: random weights.
    """
    if jax.process_index():
        return
    head = run.trained.abstract.head
    kind, adapters, data = head.kind if head else None, run.trained.adapters, plain(options)["data"]
    names = [data] if isinstance(data, str) else data
    library = "peft" if adapters else "sentence-transformers" if kind == "embedding" else "transformers"
    metadata = huggingface_hub.ModelCardData(
        **(of_base(base) if base else {}),
        datasets=[name.split(":")[1] for name in names if name.startswith("hf:")] or None,
        library_name=library,
        pipeline_tag="image-text-to-text" if "vision" in options.parts else PIPELINES[kind],
        tags=["equinox-zoo", options.name, *["lora"] * adapters],
    )
    text = "\n".join(_lines(exported, options, run, base))
    writing.write(exported / CARD, public(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"))


def of_base(base: Source) -> dict[str, Any]:
    """Returns the metadata that the base gives: its name on the Hub, and the license of its own card.

    A folder has no name on the Hub. For a folder with a card, such as one that a run has exported, it is the base of
    that card.
    """
    path, theirs = base.folder / CARD, {}
    try:
        theirs = (huggingface_hub.metadata_load(path) if path.exists() else None) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        rich.print(f"WARNING: {path} has no metadata that can be read ({error}), so the new card names no license.")
    found = {name: theirs[name] for name in LICENSE if name in theirs}
    repository = peft.base_name(base.name)
    name = theirs.get("base_model") if is_local(repository) else repository
    return found | ({"base_model": name} if name else {})


def _lines(exported: pathlib.Path, options: Options, run: Run, base: Source | None) -> Iterator[str]:
    adapter, named = run.trained.adapters, pathlib.Path(run.trained.name)
    shown = named.name if is_local(str(named)) else str(named)  # no path of this machine is published
    yield f"# {run.out.resolve().name}\n"
    begun = f"from {shown}" if base else f"from random weights, in the shape of {shown}"
    what = "LoRA adapters" if adapter else "A model"
    yield f"{what} trained by `train.{options.name}` of equinox-zoo, {begun}.\n"
    head = run.trained.abstract.head
    loaded = f'zoo.load("{exported.name}"' + (f', head="{head.kind}")' if head and not adapter else ")")
    if adapter:
        loaded = f'zoo.peft.load(zoo.load("{shown}"), "{exported.name}")'
    yield f"```python\nimport zoo\n\nmodel = {loaded}\n```\n"
    yield f"{'PEFT' if adapter else 'transformers'} reads the same files.\n"
    if numbers := dict(compared(read_metrics(run.watch.path), run.n)):
        yield f"## Numbers\n\n| metric | before | after {run.n:,} steps |\n|---|---|---|"
        yield from (f"| {metric} | {before:.4g} | {after:.4g} |" for metric, (before, after) in numbers.items())
    yield "\n## Training\n\n| | |\n|---|---|"
    start = json.loads((run.out / RUN).read_text())["starts"][-1]
    told = report.overview(options, run.trained, run.mesh)
    told["model"] = f"{shown}, {run.trained.parameters:,} parameters"
    told["versions"] = ", ".join(f"{package} {version}" for package, version in start["versions"].items())
    told |= {"commit": start["commit"]} if start["commit"] else {}
    yield from (f"| {name} | {value} |" for name, value in told.items())
    yield "\n## Data\n\n| | SHA-256 |\n|---|---|"
    files = dict(hashes(run.manifest["identity"]["data"]))
    yield from (f"| {name} | {digest} |" for name, digest in list(files.items())[:NAMED])
    if len(files) > NAMED:
        yield f"| and {len(files) - NAMED:,} more | |"


def compared(lines: list[dict[str, Any]], step: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yields each metric of the evaluations with its first value and that of `step`, or else the training loss."""
    seen = [line for line in lines if line["step"] <= step]
    metrics = dict.fromkeys(name for line in seen for name in line if name.startswith(("validation_", "eval_")))
    for metric in metrics or ("loss",):
        values = [line[metric] for line in seen if isinstance(line.get(metric), int | float)]
        if len(values) > 1:
            yield metric, (values[0], values[-1])


def hashes(identity: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and the hash of each file or store of a run's data, from the identity of the data."""
    for key, value in flat(identity).items():
        if found := re.search(r"(?:^|\.)(?:files\.(.+)|store)$", key):
            yield found[1] or "a store of train.prepare", value
