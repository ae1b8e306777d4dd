"""A script that trains a model from random weights on text: `python -m train.pretrain --help`.

The model is a configuration with a tokenizer: any zoo name, or a folder with config.json and tokenizer.json, such as
`python -m train.tiny` writes.
"""

import dataclasses
from typing import ClassVar

import jax

import zoo
from train.base.command import command
from train.base.help import Group
from train.data.packing import TEXT, Packing
from train.data.pictures import refuse_vision
from train.data.sets import TextOptions, open_data, text_settings
from train.run import folder, loop, report
from train.run.defaults import resolve, resolve_steps
from train.run.options import LanguageModelingOptions
from train.state import state
from train.state.mesh import abstract_model
from zoo.mesh import make_mesh
from zoo.registry import family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TextOptions, LanguageModelingOptions):
    """Pre-train a model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.MODEL
    name: ClassVar[str] = "pretrain"

    model: str
    """A zoo name, a Hub repository org/name, or a folder with config.json and tokenizer.json; weights are not used."""
    data: tuple[str, ...]
    """Files, folders of them, globs, URLs, hf:NAME, or prepared stores; docs/data.md lists the formats. A record has
    text or tokens, or the keys of train.sft."""
    hold_out: float = 0.01
    packing: Packing = "concat"
    steps: int = 1000
    router_balance: float = 0.01


def main(o: PretrainOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    refuse_vision(o, "texts have no images")
    tokenizer = zoo.tokenizer(o.model, **o.chat.arguments)
    config = dataclasses.replace(zoo.config(o.model), source=tokenizer.folder)
    o = resolve(o, config, width_lr=3e-4)

    # ----------------------------------------------------------------------------------------------------------- data
    learnt = open_data(o, mesh, tokenizer, TEXT, text_settings(o, config.vocab_size))
    report.opened(learnt.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)
    task = loop.Task(learnt.data, o.objective(), validation=learnt.validation, prompts=learnt.prompts)

    # ----------------------------------------------------------------------------------------------------------- train
    o, family = resolve_steps(o, learnt.steps), family_of(config)
    places = jax.tree.map(lambda a: a.sharding, abstract_model(config, family, mesh, o.parts))
    make = lambda: family.init_model(config, key=jax.random.key(o.seed), parts=o.parts)
    with jax.set_mesh(mesh):
        trained = state.to_train(jax.jit(make, out_shardings=places), o, o.model, config, mesh, parts=o.parts)
        identity = folder.identity(o.model, config, learnt.source, o.parts, tokenizer.other_template)
        loop.run(o, trained, task, mesh, tokenizer, identity)


if __name__ == "__main__":
    command(main, PretrainOptions)
