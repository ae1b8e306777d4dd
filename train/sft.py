"""Fine-tunes a model on chats, on prompts with completions, or on text: `python -m train.sft --help`.

Without arguments it teaches the embedded model `tiny`, pre-trained on Python's documentation, to answer questions about
Python; that takes a minute or two on two CPU cores. Give `--model` and `--data` for your own.
"""

import dataclasses
import itertools
import pathlib
from typing import Any, Literal

import jax

import train.tiny
import zoo
from train import loop, report
from train.data import batches, encode, fingerprint, survey
from train.mesh import make_mesh
from train.records import open_records
from zoo.registry import family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(loop.Options):
    """Fine-tune a model. Run again with the same options, it goes on from the last checkpoint in --out."""

    model: str = "tiny"
    """A zoo name, a Hub repository org/name, or a folder in the Hub's layout."""
    revision: str | None = None
    """Branch, tag or commit of the repository."""
    data: pathlib.Path = train.tiny.INSTRUCTIONS
    """A file (.jsonl, .json, .parquet, .txt, .array_record), or a folder of them, with train and valid files if it has
    any. The keys of a record say what it is: messages, conversations, prompt and completion, or text."""
    hold_out: float = 0.05
    """Fraction of the records to validate on, from the end, if the data has no validation files."""
    completions_only: bool = True
    """Learn what the assistant says and completions, not prompts."""
    packing: Literal["fit", "off"] = "fit"
    """Put several examples in a row, which do not see each other, or one each."""
    epochs: int = 0
    """Times through the data, if --steps is 0. 0: 3, but 8 for the embedded instructions."""
    out: pathlib.Path = pathlib.Path("runs/sft")


def main(o: Options) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    tokenizer = zoo.tokenizer(o.model, revision=o.revision)
    config = zoo.config(tokenizer.folder)
    family = family_of(config)
    embedded = o.data == train.tiny.INSTRUCTIONS  # short and few, for a model that is small: other numbers do well
    o = dataclasses.replace(
        o,
        seq_len=loop.row_length(o, config),
        epochs=o.epochs or (8 if embedded else 3),
        lr=o.lr or (2e-3 if embedded else 0.0),
    )

    # ----------------------------------------------------------------------------------------------------------- data
    records, held_out = open_records(o.data, o.hold_out)
    shape: dict[str, Any] = dict(
        vocab_size=config.vocab_size, seq_len=o.seq_len, packing=o.packing, completions_only=o.completions_only
    )
    found = survey(records, tokenizer, **shape)
    report.data(o.data, found, tokenizer, vocab_size=config.vocab_size, seq_len=o.seq_len)
    if o.dry_run:
        report.examples(found, tokenizer, seq_len=o.seq_len)
    shape["batch"] = o.batch
    data = batches(records, tokenizer, seed=o.seed, epochs=None if o.steps else o.epochs, **shape)
    validation = batches(held_out, tokenizer, epochs=1, **shape) if held_out else None
    shown = [
        encode(record, tokenizer, vocab_size=config.vocab_size) for record in itertools.islice(held_out or records, 3)
    ]

    # ----------------------------------------------------------------------------------------------------------- train
    o = loop.resolve(o, config, o.steps or loop.count(data), width_lr=2e-5)
    with jax.set_mesh(mesh):
        loop.run(
            o,
            config=config,
            family=family,
            mesh=mesh,
            tokenizer=tokenizer,
            make_model=lambda: zoo.load(o.model, revision=o.revision, mesh=mesh, mtp=o.mtp_weight > 0),
            data=data,
            validation=validation,
            prompts=[loop.prompt_of(example) for example in shown],
            identity=loop.identity(
                o, config, family, fingerprint(o.data, tokenizer, seed=o.seed, hold_out=o.hold_out, **shape)
            ),
        )


if __name__ == "__main__":
    loop.command(main, Options)
