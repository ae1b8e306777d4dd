"""A script that fine-tunes a model on chats, prompts with completions, or text: `python -m train.sft --help`.

Without arguments it teaches the embedded model `tiny`, pre-trained on Python's documentation, to answer questions about
Python; that takes a minute or two on two CPU cores. Give `--model` and `--data` for your own. With `--lora.rank` only
adapters are trained.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import train.tiny
import zoo
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.packing import TEXT, PackingOptions
from train.data.sets import DataOptions, open_data
from train.run import finetune, report
from train.run.defaults import resolve_steps, width_lr
from train.step.language import LanguageModelingOptions
from train.step.task import Task
from zoo.mesh import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTOptions(finetune.FineTuningOptions):
    """Fine-tune a model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "sft"

    data: tuple[str, ...] = option((str(train.tiny.INSTRUCTIONS),), group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs, hf:NAME, or prepared stores; docs/data.md lists the formats. The keys of a
    record decide its kind: messages, conversations, prompt and completion, text, or tokens. With DATA@file.py:function
    your function makes the record."""
    completions_only: bool = True
    """Learn completions and the assistant's messages, but not prompts."""
    epochs: int = option(0, group=Group.STEP)
    """Number of times through the data, if --steps is 0. 0: 3 epochs, but 8 for the embedded instructions."""
    mixture: Flat[DataOptions] = DataOptions()
    rows: Flat[PackingOptions] = PackingOptions()
    language: Flat[LanguageModelingOptions] = LanguageModelingOptions()
    retired: ClassVar[Mapping[str, str]] = {"neftune": "embeddings get no noise while a model is trained."}

    @property
    def parts(self) -> tuple[str, ...]:
        return ("vision",) * self.vision + self.language.parts


def main(o: SFTOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.step.mesh)
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, parts=o.parts, **o.chat.arguments), model.config
    embedded = o.data == (str(train.tiny.INSTRUCTIONS),)  # few, short records and a small model: other defaults do well
    rate = width_lr(o.lora)
    epochs, lr = o.epochs or (8 if embedded else 3), o.optim.lr or (100 * rate if embedded else 0.0)
    o = finetune.resolve(o.changed(epochs=epochs, lr=lr), config, width_lr=rate)

    # ----------------------------------------------------------------------------------------------------------- data
    settings = o.rows.settings(config.vocab_size, completions_only=o.completions_only)
    whole = o.phase(o.data, o.mixture.weights)
    opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, TEXT, settings)
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, opened.steps)
    task = Task(opened.data, o.language.objective(), validation=opened.validation, prompts=opened.prompts)
    finetune.run(o, model, mesh, tokenizer, task, data=opened.source)


if __name__ == "__main__":
    command(main, SFTOptions)
