"""What the scripts share that start from a model's weights: its options, loading it, adapters, and the upload."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import rich
from jax.sharding import Mesh

import convert.hub
import zoo
from train import folder, loop, options
from zoo import lora
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.registry import family_of
from zoo.surgery import shardings
from zoo.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters: small matrices beside those of the model, which stay as they are."""

    rank: int = 0
    """Of the adapters; 8 to 64 is usual. 0: none, and every weight is trained."""
    alpha: float = 0.0
    """What an adapter adds is multiplied by alpha / rank. 0: twice the rank."""
    where: str = lora.LAYERS
    """Over which linear maps, as a pattern of their paths, such as *.[qv]_proj for queries and values. The default is
    all of the layers, experts' too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningOptions(options.Options):
    model: str = "tiny"
    """A zoo name, a Hub repository org/name, or a folder in the Hub's layout."""
    revision: str | None = None
    """Branch, tag or commit of the repository."""
    lora: Lora = Lora()
    quantize: Literal["none", "int8", "fp8", "nf4"] = "none"
    """How the weights are kept that adapters leave as they are: in --compute-dtype, or rounded to eight or four bits
    (QLoRA)."""
    push_to_hub: str | None = None
    """A repository org/name on the Hub to upload the result to, made if it is missing; private. Needs HF_TOKEN."""


O = TypeVar("O", bound=FineTuningOptions)


def resolve(o: O, config: Any, *, width_lr: float) -> O:
    """`train.options.resolve`, with the defaults of adapters. Also creates the repository on the Hub, so that a wrong
    name fails before the training.

    Raises:
        ValueError: if weights are to be both quantized and trained, or the model has fewer positions than --seq-len.
        OSError: if the repository cannot be created.
    """
    if o.quantize != "none" and not o.lora.rank:
        raise ValueError(f"--quantize {o.quantize} keeps weights that are not trained; it needs --lora.rank.")
    if o.push_to_hub and not o.dry_run and jax.process_index() == 0:
        convert.hub.create(o.push_to_hub)
    decay = 0.0 if o.weight_decay < 0 and o.lora.rank else o.weight_decay
    adapters = dataclasses.replace(o.lora, alpha=o.lora.alpha or 2.0 * o.lora.rank)
    return options.resolve(dataclasses.replace(o, lora=adapters, weight_decay=decay), config, width_lr=width_lr)


def width_lr(o: FineTuningOptions) -> float:
    """The default learning rate of a model of width 4,096: adapters do well with ten times that of weights (QLoRA,
    arXiv:2305.14314, table 9)."""
    return 2e-4 if o.lora.rank else 2e-5


def load(o: FineTuningOptions, mesh: Mesh, parts: Sequence[str] = ()) -> AbstractModel:
    """The model that the options name, placed on the mesh; with new adapters if they are asked for."""
    if not o.lora.rank:
        return zoo.load(o.model, revision=o.revision, mesh=mesh, parts=parts)
    model = frozen(o, mesh, parts)
    model = lora.add(model, rank=o.lora.rank, alpha=o.lora.alpha, where=o.lora.where, key=jax.random.key(o.seed))
    return jax.device_put(model, shardings(model, family_of(model).partition_rules, mesh))


def frozen(o: FineTuningOptions, mesh: Mesh, parts: Sequence[str] = ()) -> AbstractModel:
    """The model that the options name, for what is not trained: in --compute-dtype, or quantized."""
    quantize = None if o.quantize == "none" else o.quantize
    return zoo.load(o.model, revision=o.revision, dtype=o.compute_dtype, quantize=quantize, mesh=mesh, parts=parts)


def weights_hash(source: str, revision: str | None = None) -> str:
    """`zoo.fingerprint`, in process 0, which alone compares it with a checkpoint's."""
    if jax.process_index():
        return ""
    with rich.get_console().status(f"Hashing the weights of {source}"):
        return zoo.fingerprint(source, revision=revision)


def run(
    o: FineTuningOptions,
    config: AbstractConfig,
    mesh: Mesh,
    tokenizer: Tokenizer,
    task: loop.Task,
    *,
    source: Mapping[str, Any],
    parts: Sequence[str] = (),
) -> None:
    """`train.loop.run` of the model that the options name, or of its adapters, and the upload of the result.

    `source` says what the data is, which must not change until the run has ended.
    """
    rank, alpha, where = o.lora.rank, o.lora.alpha, o.lora.where
    adapters = {"rank": rank, "scale (alpha / rank)": alpha / max(rank, 1), "where": where}
    identity = folder.identity(o.model, config, source, parts) | {"lora": adapters, "quantize": o.quantize}
    identity["revision"] = o.revision
    if rank or task.reference is not None:  # a resumed run reads the model that it began with again
        identity["weights"] = weights_hash(o.model, o.revision)
    with jax.set_mesh(mesh):
        model = functools.partial(load, o, mesh, parts)
        trained = loop.to_train(model, o, o.model, config, mesh, adapters=rank > 0, parts=parts)
        exported = loop.run(o, trained, task, mesh, tokenizer, identity)
    if exported and o.push_to_hub and jax.process_index() == 0:
        rich.print(f"Uploaded: {convert.hub.push(exported, o.push_to_hub)}")
