"""Printed reports: on a run before it begins (data, lengths, examples, memory, mesh, disk), and on its result."""

import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import rich
from jax.sharding import Mesh
from rich.table import Table
from rich.text import Text

from convert.private import public
from train.base.listing import plain
from train.base.runfile import DerivedSteps
from train.data.packing import Example, Survey
from train.data.records import find_files
from train.data.sets import OpenedSet
from train.evaluate.validation import Validation, best
from train.run.options import Options
from train.state.state import Trained
from train.watch import page
from train.watch.plot import plot_losses
from zoo.nn.heads import AbstractHead
from zoo.text.tokenizer import Tokenizer


def rows(title: str, content: dict[str, Any]) -> None:
    """Prints a table of two columns."""
    table = Table(title=public(title), title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in content.items():
        table.add_row(name, public(str(value)))
    rich.print(table)


def opened(sets: Sequence[OpenedSet], tokenizer: Tokenizer, *, vocab_size: int, dry_run: bool) -> None:
    """Prints a table for each --data of a run; in a dry run, three examples of each, too."""
    for each in sets:
        if isinstance(each.found, Survey):
            data(each.path, each.found, tokenizer, vocab_size=vocab_size, seq_len=each.seq_len, dry_run=dry_run)
            continue
        rows(f"Data: {each.path}", dict(each.found))
        if dry_run:
            examples(each.examples, tokenizer, seq_len=each.seq_len)


def data(path: str, survey: Survey, tokenizer: Tokenizer, *, vocab_size: int, seq_len: int, dry_run: bool) -> None:
    """Prints files, keys, lengths and packing, and records with nothing to learn; in a dry run, three examples, too."""
    percent = lambda n: f"{n:,} of {survey.sampled:,} looked at ({100 * n / survey.sampled:.1f} %)"
    names = lambda files: (
        ", ".join(str(file) for file in files[:3]) + (f" and {len(files) - 3} more" if files[3:] else "")
    )
    train, valid = find_files(path)
    why = "the template writes an answer differently once the chat goes on, so each is learnt where the chat ends there"
    several = {"several examples": f"{percent(survey.several)}: {why}"} if survey.several else {}
    rows(
        "Data",
        {
            "files": names(train),
            "validation": names(valid) or "the last of the records",
            "records": f"{survey.records:,}",
            "keys": ", ".join(f"{key} ({percent(n)})" for key, n in survey.keys.items()),
            "tokens a record": ", ".join(f"{name} {n:,}" for name, n in survey.lengths.items()),
            "cut at the row's end": f"{percent(survey.shortened)} are longer than the {seq_len:,} tokens of a row",
            "nothing to learn in": percent(survey.unlearnt),
            **several,
            "filled": f"{100 * survey.fill:.1f} % of the rows is not padding",
            "vocabulary": f"{tokenizer.vocab_size:,} of the tokenizer, {vocab_size:,} of the model",
        },
    )
    if dry_run:
        examples(survey.examples, tokenizer, seq_len=seq_len)


def examples(examples: Sequence[Example], tokenizer: Tokenizer, *, seq_len: int) -> None:
    """Prints examples as the model sees them. Text that is not learnt is dimmed."""
    for number, example in enumerate(examples, 1):
        parts = decoded(example.ids[: seq_len + 1], example.mask, tokenizer)
        text = Text.assemble(*((part, "" if learnt else "dim") for part, learnt in parts))
        rich.print(f"\n[bold]Example {number}[/bold], {len(example.ids):,} tokens, {sum(example.mask):,} to be learnt")
        rich.print(text)


def decoded(ids: Sequence[int], marks: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yields the text of the ids in parts, with their marks. All tokens of a part have the same mark."""
    whole, shown = tokenizer.decode(ids, special=True), 0  # decoded alone, parts would lose spaces and half characters
    for at in range(1, len(ids) + 1):
        if at == len(ids) or marks[at] != marks[at - 1]:
            part = tokenizer.decode(ids[:at], special=True)  # may end within a character
            end = next((i for i, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), len(part))
            yield whole[shown:end], marks[at - 1]
            shown = end


def parameters(trained: Trained) -> dict[str, int]:
    """Returns the numbers of parameters of the model, without adapters, and of what is trained."""
    return {"all": trained.parameters, "trained": sum(array.size for array in jax.tree.leaves(trained.abstract))}


def overview(options: Options, trained: Trained, mesh: Mesh) -> dict[str, str]:
    """Returns what a run trains, on which devices, and how long: the first table that it prints."""
    count = parameters(trained)["trained"]
    share = f"{count:,} parameters of adapters" if trained.adapters else f"{count:,} of its parameters"
    step, derived = options.step, isinstance(options.optim.steps, DerivedSteps)
    epochs = plain(options).get("epochs", 0) if derived else 0  # some scripts count steps alone
    return {
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "model": f"{trained.name}, {trained.parameters:,} parameters",
        "trained": "all of them" if count == trained.parameters else share,
        "steps": f"{options.optim.steps:,}" + (f", which are {epochs:,} epochs" if epochs else ""),
        "tokens a step": f"{step.batch * step.seq_len:,}, in {step.batch:,} rows of {step.seq_len:,}",
        "peak learning rate": f"{options.optim.lr:.3g}, by {options.optim.optimizer}",
        "precision": step.compute_dtype,
    }


def run(options: Options, out: pathlib.Path, mesh: Mesh, state: Any, step: Any, *arguments: Any) -> None:
    """Prints the memory of a device that a step with this state and arguments needs, and the disk space of the run."""
    rows("Memory of a device", memory(step, state, *arguments))
    rows("Disk", disk(out, state, options.checkpoints.keep + options.validation.keeps_best))
    rows("Mesh", devices(mesh))


def result(
    exported: pathlib.Path, step: int, validation: Validation, metrics: pathlib.Path, *, head: AbstractHead | None
) -> None:
    """Prints the validation metric, and how to load the model or adapter exported from `step`; plots the losses.

    Only process 0 does so.
    """
    if jax.process_index():
        return
    kind, curve = exported.name, metrics.with_name("loss.png")
    if len(found := validation.evaluations) > 1:
        at = {step: value for step, value in found}
        own = f", {at[step]:.3f} of the {kind} that is exported" if step in at else ""
        name = {"validation_loss": "Validation loss"}.get(validation.metric, validation.metric)
        rich.print(f"{name}: {found[0][1]:.3f} at first, {best(validation.metric, found)[1]:.3f} at best{own}.")
    plot_losses(metrics, curve)
    headed = f', head="{head.kind}"' if head else ""
    how = f'zoo.peft.load(model, "{exported}")' if kind == "adapter" else f'zoo.load("{exported}"{headed})'
    rich.print(f"The loss curve is {curve}, the report {curve.with_name(page.REPORT)}. The {kind} loads with {how}.")


def memory(step: Any, *arguments: Any) -> dict[str, str]:
    """Returns the memory that a device needs for a compiled training step, as XLA reports it."""
    used = step.lower(*arguments).compile().memory_analysis()
    size = lambda n: f"{n / 2**20:,.0f} MiB"
    return {
        "state and batch": size(used.argument_size_in_bytes),
        "while a step runs": size(used.temp_size_in_bytes),
        "in all": size(used.argument_size_in_bytes + used.temp_size_in_bytes),
        "the device has": size(limit) if (limit := device_bytes()) else "an unknown amount",
    }


def disk(out: pathlib.Path, state: Any, keep: int) -> dict[str, str]:
    """Returns the size of a checkpoint, and of `keep` + 1 of them, and the free space of the disk."""
    checkpoint = sum(
        leaf.nbytes if hasattr(leaf, "nbytes") else leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )
    existing = next(path for path in (out, *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    size = lambda n: f"{n / 2**20:,.0f} MiB"
    return {"a checkpoint": size(checkpoint), f"{keep + 1} of them": size((keep + 1) * checkpoint), "free": size(free)}


def devices(mesh: Mesh) -> dict[str, str]:
    device = mesh.devices.flat[0]
    return {"devices": f"{mesh.size} x {device.device_kind}"} | {axis: str(size) for axis, size in mesh.shape.items()}


def device_bytes() -> int | None:
    """Returns the bytes of a device that JAX may use. None if JAX does not report them, as on CPUs."""
    statistics = jax.local_devices()[0].memory_stats()
    return statistics and statistics.get("bytes_limit")
