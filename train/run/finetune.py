"""Code for scripts that start from a model's weights: options, loading the model, adapters, and the upload."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import jax
import rich
from jax.sharding import Mesh

import convert.hub
import zoo
from train.base.options import Group, option
from train.run import defaults, folder, loop
from train.run.options import Options
from train.state import state
from train.state.state import Lora
from train.step.task import Task
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningOptions(Options):
    help_group: ClassVar[Group] = Group.MODEL

    model: str = option("tiny", identity=False)
    """Model to begin with: a zoo name, a Hub repository org/name, or a folder in the Hub's layout."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    lora: Lora = Lora()
    quantize: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Format of the weights under adapters, which are not trained. none: --compute-dtype. int8 and fp8: eight bits.
    nf4: four bits (QLoRA)."""
    push_to_hub: str | None = option(None, group=Group.RUN, rare=True, identity=False)
    """Repository org/name on the Hub that the result is uploaded to. A missing repository is created as a private one.
    Needs HF_TOKEN."""


O = TypeVar("O", bound=FineTuningOptions)


def resolve(o: O, config: AbstractConfig, *, width_lr: float) -> O:
    """Calls `train.run.defaults.resolve` with the defaults of adapters.

    It also creates the repository on the Hub, so that a wrong name fails before the training.

    Raises:
        ValueError: weights are to be both quantized and trained, or the model has fewer positions than --seq-len.
        OSError: the repository cannot be created.
    """
    if o.quantize != "none" and not o.lora.rank:
        raise ValueError(f"--quantize {o.quantize} keeps weights that are not trained; it needs --lora.rank.")
    if o.push_to_hub and not o.dry_run and jax.process_index() == 0:
        convert.hub.create(o.push_to_hub)
    o = o.changed(lora=o.lora.changed(alpha=o.lora.alpha or 2.0 * o.lora.rank))
    return defaults.resolve(o, config, width_lr=width_lr, weight_decay=0.0 if o.lora.rank else 0.1)


def load(o: FineTuningOptions, mesh: Mesh) -> AbstractModel:
    """Loads the model that the options name, placed on the mesh; with new adapters if --lora.rank is given."""
    if o.lora.rank:
        return state.add_adapters(load_frozen(o, mesh), o.lora, mesh, seed=o.seed)
    return zoo.load(o.model, revision=o.revision, mesh=mesh, parts=o.parts)


def load_frozen(o: FineTuningOptions, mesh: Mesh) -> AbstractModel:
    """Loads the model that the options name, for use without training it: in --compute-dtype, or quantized."""
    quantize, dtype = None if o.quantize == "none" else o.quantize, o.step.compute_dtype
    return zoo.load(o.model, revision=o.revision, dtype=dtype, quantize=quantize, mesh=mesh, parts=o.parts)


def run(
    o: FineTuningOptions,
    config: AbstractConfig,
    mesh: Mesh,
    tokenizer: Tokenizer,
    task: Task,
    *,
    source: Mapping[str, Any],
) -> None:
    """Trains the model that the options name, or its adapters, by `train.run.loop.run`, and uploads the result.

    `source` is the identity of the data, which must not change until the run has ended.
    """
    identity = folder.identity(o.model, config, source, o.parts, tokenizer.other_template)
    identity |= {"lora": o.lora.identity(), "quantize": o.quantize, "revision": o.revision}
    if o.lora.rank or o.freeze or task.reference is not None:  # a resumed run reads its first model again
        identity["weights"] = folder.weights_hash(o.model, o.revision)
    with jax.set_mesh(mesh):
        model = functools.partial(load, o, mesh)
        trained = state.prepare(
            model, o.model, config, mesh, o.step, o.state, freeze=o.freeze, adapters=o.lora.rank > 0, parts=o.parts
        )
        exported = loop.run(o, trained, task, mesh, tokenizer, identity)
    if exported and o.push_to_hub and jax.process_index() == 0:
        rich.print(f"Uploaded: {convert.hub.push(exported, o.push_to_hub)}")
