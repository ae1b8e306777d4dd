"""Check a checkpoint: list everything that is read from it, and compare the model's numbers with those of transformers.

`python -m zoo verify` prints this report and saves it as HTML. The comparison needs transformers and torch; without
them everything else is still checked.
"""

import dataclasses
import hashlib
import importlib
import json
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.markup
import rich.table
from jaxtyping import Array, Float, Int

import convert.files
import convert.tensors
import zoo
from kernels import Tokens
from zoo.config import standard_form
from zoo.nn.block import run_block
from zoo.nn.fields import NOT_CARRIED, is_ignorable
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.nn.stack import Reports, Stack
from zoo.source import Source
from zoo.surgery import modules
from zoo.weights import checkpoint


TOLERANCE = 1e-4  # relative to the largest magnitude


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the summary."""

    what: str
    found: str
    passed: bool | None  # None: not checked


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two arrays; `largest` is the largest magnitude in the reference."""

    maximum: float
    mean: float
    largest: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray) -> "Difference":
        distance = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        return cls(float(distance.max()), float(distance.mean()), float(np.abs(theirs).max()))

    @property
    def relative(self) -> float:
        return self.maximum / max(self.largest, 1e-30)


class Recorder(eqx.Module):
    """A `Stack` that runs layer by layer and reports the output of each."""

    stack: Stack

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        cache: None,
        at: Tokens,
        own_inputs: Float[Array, "layers batch seq dim"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], None, Reports]:
        run = eqx.filter_jit(lambda block, x, own_input, shared: run_block(block, x, cache, at, own_input, shared))
        outputs, shared = [], {}
        for n, block in enumerate(self.blocks()):
            x, _, _, handed_on = run(block, x, None if own_inputs is None else own_inputs[n], shared)
            shared |= handed_on
            outputs.append(x)
        return x, None, (tuple(outputs),)

    def blocks(self) -> Iterator[Any]:
        """Yield every layer, in order."""
        yield from self.stack.head
        for _, blocks, repeats in self.stack.scans():
            for i in range(repeats):
                for block in self.stack.period[blocks.start : blocks.stop]:
                    yield jax.tree.map(lambda a, i=i: a[i], block)
        yield from self.stack.tail


def verify(
    source: str, *, tokens: int, seed: int, ignore: Sequence[str] = ()
) -> tuple[list[Check], list[rich.table.Table]]:
    """Run all checks of a checkpoint; the second result is tables with the details."""
    opened = Source.open(source, weights=True, ignore=ignore)
    folder, family, config = opened.folder, opened.family, opened.config
    stored = checkpoint.standard_names(opened.tensors(), family)
    model = zoo.load(opened, dtype="float32")
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (1, tokens))
    wanted = {name for parameter in checkpoint.parameters(model, family) for name in parameter.names.flat}
    tables = [config_table(opened), tensor_table(wanted, stored, config, family)]
    # These two have passed: otherwise loading would have refused the checkpoint.
    used = f"{len(wanted):,} used, {len(stored) - len(wanted):,} skipped as known to be redundant"
    checks = [Check("config.json", "every key is read, or has no effect", True), Check("tensors", used, True)]
    if (folder / convert.files.MANIFEST).exists():
        checks.insert(0, Check("files", "each has the hash with which it was exported", True))

    try:
        packed = not all(isinstance(tensor, convert.tensors.Tensor) for tensor in stored.values())
        theirs = reference(opened, ids, packed=packed or opened.gguf is not None)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # transformers fails in many ways
        checks.append(Check("logits", f"not compared: {str(error).splitlines()[0]}", None))
    else:
        more, compared = compare(model, jnp.asarray(ids), *theirs)
        checks, tables = checks + more, [*tables, *compared]
    checks += [decoding(model, jnp.asarray(ids)), round_trip(opened, stored)]
    return checks, tables


def config_table(source: Source) -> rich.table.Table:
    """List each key of config.json, and how it was used."""
    table = new_table("config.json", "key", "value", "is")
    family, fields = source.family, {field.name for field in dataclasses.fields(source.family.Config)}
    for key, value in standard_form(family, source.config_json).items():
        if key in fields or key in ("rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"):
            kind = "read"
        elif key in family.implied:
            kind = "the only value that is implemented"
        elif key in NOT_CARRIED:
            kind = "not the model's; how it is stored"
        else:
            kind = "not the model's; carried along" if is_ignorable(key) else "skipped"
        table.add_row(key, rich.markup.escape(json.dumps(value)[:60]), kind)
    return table


def tensor_table(wanted: set[str], stored: dict[str, Any], config: AbstractConfig, family: Family) -> rich.table.Table:
    """Count the tensors that are used, by dtype, and list each that is not."""
    table = new_table("tensors", "what", "number", "GB")
    groups: dict[str, list[Any]] = {}
    for name, tensor in stored.items():
        if name in wanted:
            kind = f"used, stored as {getattr(tensor, 'codes', tensor).dtype}"
        else:
            twin = checkpoint.redundant(name, config, family)[1]
            kind = f"skipped: {name}" + (f", the same as {twin}" if twin else "")
        groups.setdefault(kind, []).append(tensor)
    for kind, tensors in groups.items():
        table.add_row(kind, f"{len(tensors):,}", f"{sum(t.nbytes for t in tensors) / 1e9:.3f}")
    return table


def reference(source: Source, ids: np.ndarray, *, packed: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return transformers' logits in float32, and each layer's output (for the last layer, after the final norm).

    transformers reads the formats of a `packed` checkpoint on GPUs only, so it gets their weights unpacked. So it does
    those of a GGUF file, of which it ignores Llama 3's scaling of rotary positions.

    Raises:
        ImportError: if transformers or torch is not installed.
        ValueError: if transformers does not know the model, or finds no weights for a part of it.
    """
    if packed:
        with tempfile.TemporaryDirectory() as plain:
            zoo.save(zoo.load(source, dtype="float32", verify=False), plain)
            return reference(Source.open(plain), ids, packed=False)
    folder = source.folder
    # Imported like this because they are not dependencies of zoo.
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    # Choose the class by its name: transformers may not know the model_type (kimi_k2) of a class that it has, and then
    # would not find all weights.
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    kind = getattr(transformers, architectures[0], None)
    if kind is None:
        raise ValueError(f"transformers has no {architectures[0]!r}.")
    config = kind.config_class.from_pretrained(folder)
    config.model_type = type(config).model_type
    theirs, info = kind.from_pretrained(
        folder, config=config, dtype="float32", attn_implementation="eager", output_loading_info=True
    )
    if missing := info["missing_keys"]:
        raise ValueError(f"transformers finds no weights for {sorted(missing)[0]}, so its logits would say nothing.")
    theirs.eval()
    with torch.no_grad():
        out = theirs(torch.tensor(ids), output_hidden_states=True)
    return out.logits.numpy(), [h.numpy() for h in out.hidden_states[1:]]


def compare(
    model: AbstractModel, ids: Int[Array, "batch seq"], logits: np.ndarray, layers: Sequence[np.ndarray]
) -> tuple[list[Check], list[rich.table.Table]]:
    """Compare our logits, and the output of each of our layers, with those of transformers."""
    where = lambda m: [stack for _, stack in modules(m, Stack)]
    hidden, _, (ours,) = eqx.tree_at(where, model, [Recorder(stack) for stack in where(model)]).hidden(ids)
    ours = [*map(np.asarray, ours[:-1]), np.asarray(hidden)]
    table = new_table("after each layer", "layer", "largest difference", "mean", "largest value", "relative")
    first = None
    for n, (mine, theirs) in enumerate(zip(ours, layers, strict=True)):
        d = Difference.of(mine, theirs)
        name = f"{n}" if n < len(ours) - 1 else f"{n}, and the final norm"
        first = name if first is None and not d.relative < TOLERANCE else first
        table.add_row(name, *(f"{x:.2e}" for x in (d.maximum, d.mean, d.largest, d.relative)))

    mine = np.asarray(model.unembed(hidden))
    d = Difference.of(mine, logits)
    log_p, log_q = (log_softmax(x.astype(np.float64)) for x in (logits, mine))
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
    top = lambda x, k: np.sort(np.argsort(-x, axis=-1)[..., :k], axis=-1)
    same = lambda k: float(np.mean(top(mine, k) == top(logits, k)))
    return [
        Check(
            "logits",
            f"largest difference {d.maximum:.2e}, mean {d.mean:.2e}, of logits up to {d.largest:.1f}: {d.relative:.1e}",
            d.relative < TOLERANCE,
        ),
        Check("Kullback-Leibler divergence", f"{kl:.1e} nats a token", kl < TOLERANCE),
        Check(
            "likeliest tokens", f"the first agrees in {same(1):.1%}, the first five in {same(5):.1%}", same(1) > 0.99
        ),
        Check("first layer that diverges", first or "none", first is None),
    ], [table]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def decoding(model: AbstractModel, ids: Int[Array, "batch seq"]) -> Check:
    """Compare a prefill of half the tokens, then decoding one by one, with one forward pass over all."""
    full, cut = eqx.filter_jit(lambda model, ids: model(ids))(model, ids), ids.shape[1] // 2
    decode = eqx.filter_jit(lambda model, ids, cache, at: model.decode(ids, cache, positions=at))
    logits, cache = decode(model, ids[:, :cut], model.init_cache(1, ids.shape[1], jnp.float32), jnp.arange(cut)[None])
    parts = [logits]
    for n in range(cut, ids.shape[1]):
        logits, cache = decode(model, ids[:, n : n + 1], cache, jnp.array([[n]]))
        parts.append(logits)
    d = Difference.of(np.asarray(jnp.concatenate(parts, axis=1)), np.asarray(full))
    return Check("decoding", f"differs from the full forward by at most {d.relative:.1e}", d.relative < TOLERANCE)


def round_trip(source: Source, stored: dict[str, Any]) -> Check:
    """Compare the hash of every tensor before and after loading and saving; quantized tensors are dequantized first."""
    with tempfile.TemporaryDirectory() as saved:
        zoo.save(zoo.load(source, verify=False), saved)
        again = convert.tensors.open_tensors(saved)
        digest = lambda tensor: hashlib.sha256(tensor.part((), tensor.dtype).tobytes()).digest()
        changed = [name for name, tensor in again.items() if digest(tensor) != digest(stored[name])]
        found = f"{len(again) - len(changed):,} of {len(again):,} tensors have the same hash"
    return Check("round trip", found + (f"; not {', '.join(changed[:3])}" if changed else ""), not changed)


def new_table(title: str, *columns: str) -> rich.table.Table:
    return rich.table.Table(*columns, title=title, box=rich.box.SIMPLE, title_justify="left", title_style="bold")


def report(source: str, html: pathlib.Path | None, *, tokens: int, seed: int, ignore: Sequence[str] = ()) -> bool:
    """Print the checks of a checkpoint, save them as `html` if given, and return whether none failed."""
    console = rich.console.Console(record=True, width=None if html is None else 120)
    with console.status(f"Verifying {source}"), jax.default_matmul_precision("highest"):
        checks, tables = verify(source, tokens=tokens, seed=seed, ignore=ignore)
    marks = {True: "[green]yes[/]", False: "[red]NO[/]", None: "[yellow]not checked[/]"}
    summary = new_table(f"Verifying {source}", "check", "found", "passed")
    for check in checks:
        summary.add_row(check.what, rich.markup.escape(check.found), marks[check.passed])
    for table in (*tables, summary):
        console.print(table)
    if html:
        console.save_html(str(html))
        console.print(f"Written to {html}.")
    return all(check.passed is not False for check in checks)
