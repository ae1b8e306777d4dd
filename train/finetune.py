"""What the scripts share that begin with a model's weights: which one, whether adapters are trained, where it goes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import rich
from jax.sharding import Mesh

import convert.hub
import zoo
from train import loop, options
from zoo import lora
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
class Options(options.Options):
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


def resolved(o: Any) -> Any:
    """`o` with numbers for what adapters leave to us. A repository to upload to is made now, not after the training.

    Raises:
        ValueError: if weights are to be both quantised and trained.
        OSError: if there can be no such repository.
    """
    if o.quantize != "none" and not o.lora.rank:
        raise ValueError(f"--quantize {o.quantize} keeps weights that are not trained; it needs --lora.rank.")
    if o.push_to_hub and not o.dry_run and jax.process_index() == 0:
        convert.hub.create(o.push_to_hub)
    decay = 0.0 if o.weight_decay < 0 and o.lora.rank else o.weight_decay
    adapters = dataclasses.replace(o.lora, alpha=o.lora.alpha or 2.0 * o.lora.rank)
    return dataclasses.replace(o, lora=adapters, weight_decay=decay)


def load(o: Any, mesh: Mesh, *, mtp: bool = False) -> Any:
    """The model that the options name, placed on the mesh; with new adapters if they are asked for."""
    if not o.lora.rank:
        return zoo.load(o.model, revision=o.revision, mesh=mesh, mtp=mtp)
    model = frozen(o, mesh, mtp=mtp)
    model = lora.add(model, rank=o.lora.rank, alpha=o.lora.alpha, where=o.lora.where, key=jax.random.key(o.seed))
    return jax.device_put(model, shardings(model, family_of(model).partition_rules, mesh))


def frozen(o: Any, mesh: Mesh, *, mtp: bool = False) -> Any:
    """The model that the options name, to be used and not to be trained: in --compute-dtype, or quantised."""
    quantize = None if o.quantize == "none" else o.quantize
    return zoo.load(o.model, revision=o.revision, dtype=o.compute_dtype, quantize=quantize, mesh=mesh, mtp=mtp)


def weights_hash(source: str, revision: str | None = None) -> str:
    """`zoo.fingerprint`, in process 0, which alone compares it with a checkpoint's."""
    if jax.process_index():
        return ""
    with rich.get_console().status(f"Hashing the weights of {source}"):
        return zoo.fingerprint(source, revision=revision)


def width_lr(o: Any) -> float:
    """The learning rate of a model of width 4,096, if none is given: adapters do well with ten times that of weights
    (QLoRA, arXiv:2305.14314, table 9)."""
    return 2e-4 if o.lora.rank else 2e-5


def run(
    o: Any,
    config: Any,
    mesh: Mesh,
    tokenizer: Tokenizer,
    *,
    source: Mapping[str, Any],
    mtp: bool = False,
    **parts: Any,
) -> None:
    """`train.loop.run` of the model that the options name, with adapters if they say so, and the upload of its result.

    `source` is what must not change of the data while the run is not at its end; `parts` are the loop's.
    """
    rank, alpha, where = o.lora.rank, o.lora.alpha, o.lora.where
    adapters = {"rank": rank, "scale (alpha / rank)": alpha / max(rank, 1), "where": where}
    family = family_of(config)
    identity = loop.identity(o, config, family, source) | {"lora": adapters, "quantize": o.quantize, "mtp": mtp}
    identity["revision"] = o.revision
    if rank or parts.get("others") is not None:  # the model that the run begins with is read again when it goes on
        identity["weights"] = weights_hash(o.model, o.revision)
    with jax.set_mesh(mesh):
        exported = loop.run(
            o, config=config, family=family, mesh=mesh, tokenizer=tokenizer, identity=identity, mtp=mtp,
            make_model=lambda: load(o, mesh, mtp=mtp), adapters=o.lora.rank > 0, **parts,
        )  # fmt: skip
    if exported and o.push_to_hub and jax.process_index() == 0:
        rich.print(f"Uploaded: {convert.hub.push(exported, o.push_to_hub)}")
