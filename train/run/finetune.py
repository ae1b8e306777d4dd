"""Code for scripts that start from a model's weights: options, loading the model, and adapters."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import jax
from jax.sharding import Mesh

from train.base.options import Group, option
from train.run import card, defaults, folder, headed, loop
from train.run.options import Options
from train.run.start import start
from train.state import state
from train.state.state import Lora
from train.step.task import Task
from zoo.nn.heads import AbstractHead
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.source import Source
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningOptions(Options):
    help_group: ClassVar[Group] = Group.MODEL

    model: str = option("tiny", identity=False)
    """Model to begin with: a zoo name, a Hub repository org/name, or a folder in the Hub's layout."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    lora: Lora = Lora()
    quantize: Literal["none", "int8", "fp8", "nf4", "stored"] = "none"
    """Format of the weights under adapters, which are not trained. none: --compute-dtype. int8 and fp8: eight bits.
    nf4: four bits (QLoRA). stored: as the checkpoint has them (docs/weights.md#as-stored), else --compute-dtype."""
    retired: ClassVar[Mapping[str, str]] = {
        "push-to-hub": "`hf upload ORG/NAME RUN/model --private` uploads the result of a run."
    }


O = TypeVar("O", bound=FineTuningOptions)


def resolve(options: O, config: AbstractConfig, *, width_lr: float) -> O:
    """Calls `train.run.defaults.resolve` with the defaults of adapters.

    Raises:
        ValueError: weights are to be both quantized and trained, or the model has fewer positions than --seq-len.
    """
    if options.quantize != "none" and not options.lora.rank:
        raise ValueError(f"--quantize {options.quantize} keeps weights that are not trained; it needs --lora.rank.")
    options = options.changed(lora=options.lora.changed(alpha=options.lora.alpha or 2.0 * options.lora.rank))
    return defaults.resolve(options, config, width_lr=width_lr, weight_decay=0.0 if options.lora.rank else 0.1)


def load(options: FineTuningOptions, model: Source, mesh: Mesh, head: AbstractHead | None = None) -> AbstractModel:
    """Loads the model that the options name, placed on the mesh; with new adapters if --lora.rank is given.

    `head` is that of `train.run.headed.load`.
    """
    if options.lora.rank:
        frozen = load_frozen(options, model, mesh, head)
        return state.add_adapters(frozen, options.lora, mesh, seed=options.seed)
    return headed.load(model, mesh, head, parts=options.parts)


def load_frozen(
    options: FineTuningOptions, model: Source, mesh: Mesh, head: AbstractHead | None = None
) -> AbstractModel:
    """Loads the model that the options name, for use without training it: in --compute-dtype, or quantized."""
    quantize, dtype = None if options.quantize == "none" else options.quantize, options.step.compute_dtype
    return headed.load(model, mesh, head, dtype=dtype, quantize=quantize, parts=options.parts)


def run(
    options: FineTuningOptions,
    model: Source,
    mesh: Mesh,
    tokenizer: Tokenizer,
    task: Task,
    *,
    data: Mapping[str, Any],
    head: AbstractHead | None = None,
) -> pathlib.Path | None:
    """Trains the model that the options name, or its adapters. Returns the folder of the result; None after a dry run.

    `data` is the identity of the data, which must not change until the run has ended. `head` is that of `load`.
    """
    identity = folder.identity(options.model, model.config, data, options.parts, tokenizer.other_template, head)
    identity |= {"lora": options.lora.identity(), "quantize": options.quantize, "revision": options.revision}
    if options.lora.rank or options.freeze or task.reference is not None:  # a resumed run reads its first model again
        identity["weights"] = folder.weights_hash(model)
    with jax.set_mesh(mesh):
        trained = state.prepare(
            functools.partial(load, options, model, mesh, head), options.model, model.config, mesh, options.step,
            options.state, freeze=options.freeze, adapters=options.lora.rank > 0, parts=options.parts, head=head,
        )  # fmt: skip
        if started := start(options, trained, task, mesh, tokenizer, identity):
            exported = loop.train(started)
            card.write(exported, options, started, model)
            return exported
    return None
