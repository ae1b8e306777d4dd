"""Trains a model from random weights on text: `python -m train.pretrain --help`.

The model is a configuration with a tokenizer: any zoo name, or a folder with config.json and tokenizer.json, such as
`python -m train.tiny` writes.
"""

import dataclasses
import itertools
import pathlib
from typing import Any, ClassVar

import jax

import zoo
from train import loop, report
from train.data.packing import batches, encode, fingerprint, survey
from train.data.records import open_records
from train.options import LanguageModeling
from zoo.mesh import make_mesh
from zoo.registry import family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(LanguageModeling):
    """Pre-train a model. Run again with the same options, it goes on from the last checkpoint."""

    name: ClassVar[str] = "pretrain"

    model: str
    """A zoo name, a Hub repository org/name, or a folder with config.json and tokenizer.json; weights are not used."""
    data: pathlib.Path
    """A file (.txt, .jsonl, .json, .parquet, .array_record), or a folder of them, with train and valid files if it has
    any. Documents are put one after another into rows, and do not see each other."""
    hold_out: float = 0.01
    """Fraction of the records to validate on, from the end, if the data has no validation files."""
    steps: int = 1000
    router_balance: float = 0.01


def main(o: Options) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    tokenizer = zoo.tokenizer(o.model, **vars(o.chat))
    config = dataclasses.replace(zoo.config(o.model), source=tokenizer.folder)
    family = family_of(config)
    o = dataclasses.replace(o, seq_len=loop.row_length(o, config))
    parts = {"mtp": True} if o.mtp_weight else {}
    places = jax.tree.map(lambda a: a.sharding, loop.abstract_model(config, family, mesh, mtp=o.mtp_weight > 0))

    # ----------------------------------------------------------------------------------------------------------- data
    records, held_out = open_records(o.data, o.hold_out)
    shape: dict[str, Any] = dict(vocab_size=config.vocab_size, seq_len=o.seq_len, packing="cut")
    found = survey(records, tokenizer, **shape)
    report.data(o.data, found, tokenizer, vocab_size=config.vocab_size, seq_len=o.seq_len)
    if o.dry_run:
        report.examples(found, tokenizer, seq_len=o.seq_len)
    shape["batch"] = o.batch
    shown = [
        encode(record, tokenizer, vocab_size=config.vocab_size)[-1]
        for record in itertools.islice(held_out or records, 3)
    ]

    # ----------------------------------------------------------------------------------------------------------- train
    o = loop.resolve(o, config, o.steps, width_lr=3e-4)
    with jax.set_mesh(mesh):
        loop.run(
            o,
            config=config,
            family=family,
            mesh=mesh,
            tokenizer=tokenizer,
            make_model=lambda: jax.jit(
                lambda: family.Model(config, key=jax.random.key(o.seed), **parts), out_shardings=places
            )(),
            data=batches(records, tokenizer, seed=o.seed, **shape),
            validation=batches(held_out, tokenizer, epochs=1, **shape) if held_out else None,
            prompts=[loop.prompt_of(example) for example in shown],
            identity=loop.identity(
                o, config, family, fingerprint(o.data, tokenizer, seed=o.seed, hold_out=o.hold_out, **shape)
            )
            | {"mtp": o.mtp_weight > 0},
            objective=o.objective(),
            mtp=o.mtp_weight > 0,
        )


if __name__ == "__main__":
    loop.command(main, Options)
