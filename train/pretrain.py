"""Trains a model from random weights on text: `python -m train.pretrain --help`.

The model is a configuration with a tokenizer: any zoo name, or a folder with config.json and tokenizer.json, such as
`python -m train.tiny` writes.
"""

import dataclasses
from typing import Any, ClassVar

import jax

import zoo
from train import folder, loop, report, state
from train.command import command
from train.data.packing import batches, fingerprint, prompts_of, survey
from train.data.pictures import refuse_vision
from train.data.records import open_records
from train.defaults import resolve, resolve_steps
from train.mesh import abstract_model
from train.options import LanguageModelingOptions
from zoo.mesh import make_mesh
from zoo.registry import family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(LanguageModelingOptions):
    """Pre-train a model. Run again with the same options, it goes on from the last checkpoint."""

    name: ClassVar[str] = "pretrain"

    model: str
    """A zoo name, a Hub repository org/name, or a folder with config.json and tokenizer.json; weights are not used."""
    data: str
    """A file (.txt, .jsonl, .json, .parquet, .array_record), or a folder of them, with train and valid files if it has
    any. Documents are put one after another into rows, and do not see each other."""
    hold_out: float = 0.01
    """Fraction of the records to validate on, from the end, if the data has no validation files."""
    steps: int = 1000
    router_balance: float = 0.01


def main(o: PretrainOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    refuse_vision(o, "texts have no images")
    tokenizer = zoo.tokenizer(o.model, **vars(o.chat))
    config = dataclasses.replace(zoo.config(o.model), source=tokenizer.folder)
    o = resolve(o, config, width_lr=3e-4)

    # ----------------------------------------------------------------------------------------------------------- data
    records, held_out = open_records(o.data, o.hold_out)
    shape: dict[str, Any] = dict(vocab_size=config.vocab_size, seq_len=o.seq_len, packing="cut")
    found = survey(records, tokenizer, **shape)
    report.data(o.data, found, tokenizer, vocab_size=config.vocab_size, seq_len=o.seq_len, dry_run=o.dry_run)
    shape["batch"] = o.batch
    task = loop.Task(
        batches(records, tokenizer, seed=o.seed, **shape),
        o.objective(),
        validation=batches(held_out, tokenizer, epochs=1, **shape) if held_out else None,
        prompts=prompts_of(held_out or records, tokenizer, vocab_size=config.vocab_size),
    )
    source = fingerprint(o.data, tokenizer, seed=o.seed, hold_out=o.hold_out, **shape)

    # ----------------------------------------------------------------------------------------------------------- train
    o, family = resolve_steps(o, o.steps), family_of(config)
    places = jax.tree.map(lambda a: a.sharding, abstract_model(config, family, mesh, o.parts))
    make = lambda: family.init_model(config, key=jax.random.key(o.seed), parts=o.parts)
    with jax.set_mesh(mesh):
        trained = state.to_train(jax.jit(make, out_shardings=places), o, o.model, config, mesh, parts=o.parts)
        loop.run(o, trained, task, mesh, tokenizer, folder.identity(o.model, config, source, o.parts))


if __name__ == "__main__":
    command(main, PretrainOptions)
