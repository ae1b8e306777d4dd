"""Converts between the Hub's layout and Orbax checkpoints: `python -m zoo to-hub` and `to-orbax`.

    python -m zoo to-hub runs/sft model/ --step 400     # any checkpoint of a training run, as a Hub folder
    python -m zoo to-orbax qwen3-0.6b checkpoint/       # a Hub model, as an Orbax checkpoint

An Orbax checkpoint is a folder with the arrays (arrays/, a pytree with the model under "model"), the model's name and
config.json (in meta.json), and the hash of every file (manifest.json). A training run's checkpoints hold more.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
from tyro.conf import Positional

import zoo
from convert import machine, manifest
from zoo.config import read, write
from zoo.registry import FAMILIES, family_of
from zoo.source import Source
from zoo.surgery import cast, with_head
from zoo.text.tokenizer import Tokenizer
from zoo.weights import heads
from zoo.weights.checkpoint import skeleton


def to_hub(checkpoint: Positional[pathlib.Path], out: Positional[pathlib.Path], step: int = -1) -> None:
    """Writes the model of an Orbax checkpoint as a Hub folder, in the dtype of the model that the run began with.

    Args:
        checkpoint: a run's folder, or a single checkpoint.
        out: folder to write config.json, safetensors and tokenizer files to.
        step: step of the run's checkpoint to write. -1: the newest.
    """
    import orbax.checkpoint.experimental.v1 as ocp  # here, since the other commands of zoo need none of it

    folder = find(checkpoint, step)
    manifest.verify(folder)
    identity = json.loads((folder / "meta.json").read_text())["identity"]
    family = FAMILIES[identity["config"]["model_type"]]
    # zoo.save copies the tokenizer's files from the folder that the run began with.
    source = Source.open(identity["model"], identity.get("revision")).folder
    tokenizer = Tokenizer(source, chat_template=identity.get("template"))
    config = read(family, identity["config"], source)
    abstract = skeleton(family, config, [part for part in family.parts if identity.get(part)])
    if kind := identity.get("head"):
        abstract = with_head(abstract, heads.described(kind, identity["config"], config))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), abstract)
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # the model without the optimizer's state
    with context:
        model = ocp.load(str(folder.resolve() / "arrays"), {"model": abstract})["model"]
    dtype = jnp.dtype(identity["config"].get("dtype") or identity["config"]["torch_dtype"])
    zoo.save(cast(model, dtype), out)
    tokenizer.save_changes(out)
    print(f'{folder} is now {out}; it loads with zoo.load("{out}").')


def to_orbax(
    model: Positional[str],
    out: Positional[pathlib.Path],
    revision: str | None = None,
    ignore_keys: tuple[str, ...] = (),
) -> None:
    """Writes a model of the Hub's layout as an Orbax checkpoint.

    Args:
        model: a zoo name, a Hub repository org/name, a folder, or a GGUF file.
        out: folder to write; it must not exist yet.
        revision: branch, tag or commit of the repository.
        ignore_keys: keys of config.json to skip where they would be refused (docs/config.md).
    """
    import orbax.checkpoint.experimental.v1 as ocp

    if machine.path("out", out).exists():
        raise FileExistsError(f"{out} exists already; name a folder that does not.")
    loaded = zoo.load(model, revision=revision, ignore=ignore_keys)
    dtype = jax.tree.leaves(loaded)[0].dtype
    identity = {"model": model, "config": write(loaded.config, family_of(loaded), dtype)}
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    ocp.save(str(unfinished.resolve() / "arrays"), {"model": loaded})
    (unfinished / "meta.json").write_text(json.dumps({"identity": identity}))
    manifest.write(unfinished)
    unfinished.rename(out)
    print(f"{model} is now {out}.")


def find(checkpoint: pathlib.Path, step: int) -> pathlib.Path:
    """Returns a checkpoint's folder: `checkpoint` itself, or, in a run's folder, that of `step` (-1: the newest)."""
    if (checkpoint / "arrays").is_dir():
        return checkpoint
    steps = sorted(int(path.name) for path in (checkpoint / "checkpoints").glob("*") if path.name.isdigit())
    if not steps or (step >= 0 and step not in steps):
        raise FileNotFoundError(f"{checkpoint} has no checkpoint{f' of step {step}, but {steps}' if steps else ''}.")
    return checkpoint / "checkpoints" / str(steps[-1] if step < 0 else step)
