"""A script that fine-tunes a model on chats, prompts with completions, or text: `python -m train.sft --help`.

Without arguments it teaches the embedded model `tiny`, pre-trained on Python's documentation, to answer questions about
Python; that takes a minute or two on two CPU cores. Give `--model` and `--data` for your own. With `--lora.rank` only
adapters are trained.
"""

import dataclasses
from typing import ClassVar

import train.tiny
import zoo
from train.base.command import command
from train.base.help import Group, option
from train.data.packing import TEXT
from train.data.sets import TextOptions, open_data, text_settings
from train.run import finetune, loop, report
from train.run.defaults import resolve_steps, width_lr
from train.run.options import LanguageModelingOptions
from zoo.mesh import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTOptions(TextOptions, LanguageModelingOptions, finetune.FineTuningOptions):
    """Fine-tune a model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "sft"

    data: tuple[str, ...] = (str(train.tiny.INSTRUCTIONS),)
    """Files, folders of them, globs, URLs, hf:NAME, or prepared stores; docs/data.md lists the formats. The keys of a
    record decide its kind: messages, conversations, prompt and completion, text, or tokens. With DATA@file.py:function
    your function makes the record."""
    completions_only: bool = True
    """Learn completions and the assistant's messages, but not prompts."""
    epochs: int = option(0, group=Group.STEP)
    """Number of times through the data, if --steps is 0. 0: 3 epochs, but 8 for the embedded instructions."""
    neftune: float = 0.0
    """Size of the noise on the embeddings of tokens (NEFTune's alpha), such as 5 to 15. 0: no noise."""


def main(o: SFTOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, parts=o.parts, **o.chat.arguments)
    config = zoo.config(tokenizer.folder)
    embedded = o.data == (str(train.tiny.INSTRUCTIONS),)  # few, short records and a small model: other defaults do well
    rate = width_lr(o.lora)
    epochs, lr = o.epochs or (8 if embedded else 3), o.lr or (100 * rate if embedded else 0.0)
    o = finetune.resolve(dataclasses.replace(o, epochs=epochs, lr=lr), config, width_lr=rate)

    # ----------------------------------------------------------------------------------------------------------- data
    settings = text_settings(o, config.vocab_size, completions_only=o.completions_only)
    learnt = open_data(o, mesh, tokenizer, TEXT, settings)
    report.opened(learnt.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, learnt.steps)
    task = loop.Task(
        learnt.data, o.objective(), validation=learnt.validation, prompts=learnt.prompts, neftune=o.neftune
    )
    finetune.run(o, config, mesh, tokenizer, task, source=learnt.source)


if __name__ == "__main__":
    command(main, SFTOptions)
