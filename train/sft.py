"""Fine-tunes a model on chats, on prompts with completions, or on text: `python -m train.sft --help`.

Without arguments it teaches the embedded model `tiny`, pre-trained on Python's documentation, to answer questions about
Python; that takes a minute or two on two CPU cores. Give `--model` and `--data` for your own; with `--lora.rank` only
adapters are trained.
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import train.tiny
import zoo
from train import finetune, loop, report
from train.command import command
from train.data.packing import batches, count, fingerprint, prompts_of, survey
from train.data.records import open_records, weighted
from train.defaults import resolve_steps, width_lr
from train.options import LanguageModelingOptions
from zoo.mesh import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTOptions(LanguageModelingOptions, finetune.FineTuningOptions):
    """Fine-tune a model. Run again with the same options, it goes on from the last checkpoint."""

    name: ClassVar[str] = "sft"

    data: tuple[str, ...] = (str(train.tiny.INSTRUCTIONS),)
    """Files (.jsonl, .json, .parquet, .txt, .array_record), or folders of them, with train and valid files if they have
    any. The keys of a record say what it is: messages, conversations, prompt and completion, or text."""
    weights: tuple[float, ...] = ()
    """Share of each --data among the records, such as 0.7 0.3. An epoch has every record, and repeats those of which
    there are too few. Without weights it has each record once."""
    hold_out: float = 0.05
    """Fraction of the records to validate on, from the end, where the data has no validation files."""
    completions_only: bool = True
    """Learn completions and what the assistant says, but not prompts."""
    packing: Literal["fit", "off"] = "fit"
    """How examples are put into rows. fit: several in a row, which do not see each other. off: one in a row."""
    epochs: int = 0
    """Number of times through the data, if --steps is 0. 0: 3, but 8 for the embedded instructions."""
    neftune: float = 0.0
    """Size of the noise on the embeddings of tokens (NEFTune's alpha), such as 5 to 15. 0: no noise."""


def main(o: SFTOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, parts=o.parts, **vars(o.chat))
    config = zoo.config(tokenizer.folder)
    embedded = o.data == (str(train.tiny.INSTRUCTIONS),)  # short and few, for a small model: other numbers do well
    rate = width_lr(o.lora)
    epochs, lr = o.epochs or (8 if embedded else 3), o.lr or (100 * rate if embedded else 0.0)
    o = finetune.resolve(dataclasses.replace(o, epochs=epochs, lr=lr), config, width_lr=rate)

    # ----------------------------------------------------------------------------------------------------------- data
    shape: dict[str, Any] = dict(
        vocab_size=config.vocab_size, seq_len=o.seq_len, packing=o.packing, completions_only=o.completions_only
    )
    sets, held_out = [], []
    for path in o.data:
        records, held = open_records(path, o.hold_out)
        sets.append(records)
        held_out += [held] if held else []
        found = survey(records, tokenizer, **shape)
        report.data(path, found, tokenizer, vocab_size=config.vocab_size, seq_len=o.seq_len, dry_run=o.dry_run)
    shape["batch"] = o.batch
    order: dict[str, Any] = dict(seed=o.seed, epochs=None if o.steps else o.epochs, **shape)
    data = batches(weighted(sets, o.weights), tokenizer, **order)
    validation = batches(weighted(held_out), tokenizer, epochs=1, **shape) if held_out else None
    prompts = prompts_of(itertools.chain(*(held_out or sets)), tokenizer, vocab_size=config.vocab_size)
    sources = {"sets": [fingerprint(path, tokenizer) for path in o.data], "weights": o.weights, "hold_out": o.hold_out}

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, o.steps or count(batches(weighted(sets, o.weights), tokenizer, patches=False, **order)))
    task = loop.Task(data, o.objective(), validation=validation, prompts=prompts, neftune=o.neftune)
    source = sources | {"seed": o.seed} | shape
    finetune.run(o, config, mesh, tokenizer, task, source=source)


if __name__ == "__main__":
    command(main, SFTOptions)
