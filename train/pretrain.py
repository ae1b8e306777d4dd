"""A script that trains a model from random weights on text: `python -m train.pretrain --help`.

The model is a configuration with a tokenizer: any zoo name, or a folder with config.json and tokenizer.json, such as
`python -m train.tiny` writes.
"""

import dataclasses
from typing import ClassVar

import jax

import zoo
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.packing import TEXT, PackingOptions
from train.data.sets import DataOptions, open_data
from train.run import card, folder, loop, report
from train.run.defaults import resolve, resolve_steps
from train.run.options import Options
from train.run.start import start
from train.state import state
from train.state.mesh import abstract_model
from train.state.optim import OptimizerOptions
from train.step.language import LanguageModelingOptions
from train.step.router import RouterOptions
from train.step.task import Task
from zoo.mesh import make_mesh
from zoo.registry import family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(Options):
    """Pre-train a model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.MODEL
    name: ClassVar[str] = "pretrain"

    model: str = option(dataclasses.MISSING, identity=False)
    """A zoo name, a Hub repository org/name, or a folder with config.json and tokenizer.json; weights are not used."""
    data: tuple[str, ...] = option(dataclasses.MISSING, group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs, hf:NAME, or prepared stores; docs/data.md lists the formats. A record has
    text or tokens, or the keys of train.sft."""
    mixture: Flat[DataOptions] = DataOptions(hold_out=0.01)
    rows: Flat[PackingOptions] = PackingOptions(packing="concat")
    language: Flat[LanguageModelingOptions] = LanguageModelingOptions()
    optim: Flat[OptimizerOptions] = OptimizerOptions(steps=1000)
    router: Flat[RouterOptions] = RouterOptions(router_balance=0.01)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.language.parts


def main(o: PretrainOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.step.mesh)
    o.refuse_vision("texts have no images")
    tokenizer = zoo.tokenizer(o.model, **o.chat.arguments)
    config = dataclasses.replace(o.source.open(o.model).config, source=tokenizer.folder)
    o = resolve(o, config, width_lr=3e-4)

    # ----------------------------------------------------------------------------------------------------------- data
    whole = o.phase(o.data, o.mixture.weights)
    opened = open_data(
        o.mixture, whole, o.reading(), mesh, tokenizer, TEXT, o.rows.settings(config.vocab_size)
    )  # fmt: skip
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)
    task = Task(opened.data, o.language.objective(), validation=opened.validation, prompts=opened.prompts)

    # ----------------------------------------------------------------------------------------------------------- train
    o, family = resolve_steps(o, opened.steps), family_of(config)
    places = jax.tree.map(lambda a: a.sharding, abstract_model(config, family, mesh, o.parts))
    make = lambda: family.init_model(config, key=jax.random.key(o.seed), parts=o.parts)
    with jax.set_mesh(mesh):
        trained = state.prepare(
            jax.jit(make, out_shardings=places), o.model, config, mesh, o.step, o.state, freeze=o.freeze, parts=o.parts
        )
        identity = folder.identity(o.model, config, opened.source, o.parts, tokenizer.other_template)
        if started := start(o, trained, task, mesh, tokenizer, identity):
            card.write(loop.train(started), o, started, None)


if __name__ == "__main__":
    command(main, PretrainOptions)
