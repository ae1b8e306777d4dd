"""Ahead-of-time compiling of a training or decoding step for devices that are not attached; its bytes and traffic."""

import math
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.backends.compile_options import compile_options
from kernels.mesh import BATCH, EXPERT
from train.base.places import explicit, forgotten
from train.planning.breakdown import Kernel, kernels
from train.planning.hlo import Collective, activations, collectives
from train.state.mesh import keeps_order, token_sharding
from train.state.offload import is_on_host
from train.state.optim import OptimizerOptions, make_optimizer
from train.state.remat import remat_of
from train.state.state import Lora, StateOptions, abstract_state
from train.step.clip import check_qk_clip
from train.step.language import cross_entropy
from train.step.step import Objective, Recipe, jit_train_step
from zoo import lora, quantized
from zoo.generation.decoding import init_caches, layout_of
from zoo.nn.cache import partition_specs
from zoo.nn.heads import AbstractHead
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.nn.moe import FIRST
from zoo.quantized import Format
from zoo.surgery import cast, shardings, with_head
from zoo.vision.model import AbstractVisionConfig
from zoo.weights.checkpoint import skeleton


NONE = Lora()  # no adapters
USUAL = OptimizerOptions(lr=1e-4, steps=1000, warmup=30, decay=200)


class Pieces(NamedTuple):
    """A number of pieces of texts. Each has the tokens of a text from place `first` up to place `last`, without it.

    A text is one piece. Of texts that share their beginning a row has two kinds: the beginning, which it has once, and
    the rest of each.
    """

    number: float
    first: int
    last: int


class Rows(NamedTuple):
    """The rows of a step, of all devices together."""

    count: float = 0
    length: int = 0  # in tokens, with padding
    pieces: tuple[Pieces, ...] = ()  # those of all rows
    branches: bool = False  # whether texts of a row share beginnings

    @property
    def tokens(self) -> float:
        """Counts the tokens of all rows, without padding."""
        return sum(number * (last - first) for number, first, last in self.pieces)

    def mean(self, of: Callable[[int], float]) -> float:
        """Averages over all tokens `of`(length), the mean over the tokens of a causal text of some length."""
        up_to = lambda place: place * of(place) if place else 0.0  # the sum over a text's tokens before this place
        return sum(number * (up_to(last) - up_to(first)) for number, first, last in self.pieces) / self.tokens

    def times(self, factor: float) -> "Rows":
        """Returns `factor` times as many rows."""
        pieces = tuple(each._replace(number=each.number * factor) for each in self.pieces)
        return self._replace(count=self.count * factor, pieces=pieces)


class Program(NamedTuple):
    """A function to compile, and its arguments (`jax.ShapeDtypeStruct` with shardings)."""

    function: Any
    arguments: tuple[Any, ...]
    kinds: dict[str, Any]  # the arguments by kind: "parameters", "optimizer", "batch", "cache"
    gradients: Any = None  # shapes of gradients and of copies of the weights in bfloat16, as one float32 for both
    seen: float = 1.0  # the share of all pairs of a row's tokens that attention computes
    rows: Rows = Rows()  # those of a step


class Compiled(NamedTuple):
    """A compiled program, with bytes of one device."""

    arguments: int
    temporaries: int  # everything that is there only while the program runs, such as gradients and activations
    activations: int  # arrays that layers save for the backward pass
    results: int
    reused: int  # results that are written over donated arguments
    host: int  # arguments and temporaries in the host's memory
    collectives: list[Collective]
    kernels: list[Kernel]
    seconds: float  # duration of compiling

    @property
    def needed(self) -> int:
        return self.arguments + self.temporaries + self.results - self.reused


class TooLarge(Exception):
    """An error for a program that XLA refuses, since it needs more bytes of a device than are available."""

    def __init__(self, needed: float, available: float):
        super().__init__(needed, available)
        self.needed, self.available = needed, available


def training(
    model: AbstractModel,
    mesh: Mesh,
    *,
    batch: int,
    seq: int,
    remat: str,
    microbatches: int,
    optimization: OptimizerOptions = USUAL,
    kept: StateOptions = StateOptions(),  # noqa: B008 (is frozen)
    images: int = 0,
    patches: int = 1024,
    objective: Objective = cross_entropy,
    reference: Any = None,
    more: Sequence[str] = (),
    pieces: tuple[Pieces, ...] | None = None,
    branches: bool = False,
) -> Program:
    """Makes the step of `train.run.loop`, with products in bfloat16. If the model has adapters, only they are trained.

    Args:
        model: shapes with their places, of `train.state.mesh.abstract_model` or `abstract_frozen`.
        batch: number of rows.
        seq: number of tokens of a row.
        images: number of images in a row; above 0 the model must have its vision tower.
        patches: number of patches of an image, if the tower takes images of any shape.
        reference: shapes of another model that the objective gets.
        more: names of float32 arrays that the objective reads from a batch, beside the usual ones.
        pieces: those of all rows' texts. None: each row is a text.
        branches: whether texts of a row are branches of documents (`kernels.Tokens`).
    """
    config, (transform, schedule) = model.config, make_optimizer(optimization)
    trained, frozen_weights = lora.split(model)
    state = abstract_state(trained, transform, kept)
    rows = jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=token_sharding(mesh))
    in_order = keeps_order(mesh, model, reference) and not branches
    names = ("tokens", "targets", "loss_mask", "segments", *(() if in_order else ("positions",)))
    names += ("branches",) * branches
    data = dict.fromkeys(names, rows)
    data |= dict.fromkeys(more, jax.ShapeDtypeStruct(rows.shape, jnp.float32, sharding=rows.sharding))
    if images:
        of_rows = lambda dtype, *shape: jax.ShapeDtypeStruct((batch, images, *shape), dtype, sharding=of_batch)
        assert isinstance(config, AbstractVisionConfig) and config.vision is not None, "the model has its tower"
        of_batch, tower = NamedSharding(mesh, P(BATCH)), config.vision.tower
        size = (tower.patches or patches), tower.pixels
        data |= dict(patches=of_rows(jnp.float32, *size), grids=of_rows(jnp.int32, 2), image=rows, feature=rows)
    state, data, rest, reference = explicit((state, data, frozen_weights, reference))
    with jax.set_mesh(mesh):
        check_qk_clip(optimization.qk_clip, trained, frozen_weights)
        recipe = Recipe(
            optimizer=transform, schedule=schedule, compute_dtype=jnp.bfloat16, objective=objective,
            remat=remat_of(remat), microbatches=microbatches, qk_clip=optimization.qk_clip,
        )  # fmt: skip
        step = jit_train_step(state, recipe)
    kinds = {"parameters": lora.combine(state.model, rest), "optimizer": state.opt_state, "batch": data}
    kinds |= {"reference": reference} if reference is not None else {}
    one = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=a.sharding)  # whole in each replica
    packed = Rows(batch, seq, pieces or (Pieces(batch, 0, seq),), branches)
    gradients = jax.tree.map(one, trained)
    return Program(step, (state, data, rest, reference), kinds, gradients, seen_pairs(config, packed), packed)


def parts_of(images: int) -> tuple[str, ...]:
    """Returns the optional parts of a model whose rows have `images` images each."""
    return ("vision",) if images else ()


def seen_pairs(config: AbstractConfig, rows: Rows) -> float:
    """Returns the share of all pairs of a row's tokens that its attention computes; 1 for a model without attention."""
    products = config.attention_products
    layers = [n for n in range(config.num_hidden_layers) if products(n, 2) > products(n, 1)]  # without recurrent layers
    pairs = lambda seq: sum(products(n, seq) for n in layers)  # pairs of one token; alone, a token sees half of itself
    return rows.tokens * rows.mean(pairs) / (rows.count * rows.length**2 * 2 * pairs(1)) if layers else 1.0


def abstract_frozen(
    config: AbstractConfig,
    family: Family,
    mesh: Mesh,
    *,
    quantize: Literal["none"] | Format,
    adapters: Lora = NONE,
    parts: Sequence[str] = (),
    head: AbstractHead | None = None,
) -> AbstractModel:
    """Makes the shapes of a model with frozen weights, in bfloat16 or quantized, and of its adapters, if any.

    A `head` stands in the place of the output embeddings.
    """

    def make(model: AbstractModel) -> AbstractModel:
        model = cast(model, jnp.bfloat16)
        model = model if quantize == "none" else quantized.quantize(model, quantize)
        if adapters.rank:
            alpha = adapters.alpha or 2.0 * adapters.rank
            model = lora.add(model, rank=adapters.rank, alpha=alpha, where=adapters.where, key=jax.random.key(0))
        return model

    whole = skeleton(family, config, parts)
    whole = whole if head is None else with_head(whole, eqx.filter_eval_shape(lambda: head))
    model = eqx.filter_eval_shape(make, whole)
    places = shardings(model, family.partition_rules, mesh)
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), model, places)


def decoding(
    config: AbstractConfig,
    family: Family,
    mesh: Mesh,
    *,
    batch: int,
    seq: int,
    quantize: Literal["none"] | Format = "none",
    images: int = 0,
    cache_tokens: int = 0,
) -> Program:
    """Makes the step that decodes one token a row, in bfloat16, with a cache of `seq` positions, updated in place.

    With `images` the model has its vision tower, too, which the step does not use. With `cache_tokens` the cache lies
    in pages, as `zoo.generation.engine.Engine` has it, for so many tokens of all rows together.

    Raises:
        ValueError: for `cache_tokens`, if the mesh splits the rows.
    """
    model = abstract_frozen(config, family, mesh, quantize=quantize, parts=parts_of(images))
    layout = layout_of(model, None, batch, seq, mesh.shape, 1, cache_tokens=cache_tokens) if cache_tokens else None
    if cache_tokens and layout is None:
        raise ValueError("A mesh that splits rows has no pages: leave out --cache-tokens, or take tensor=-1.")
    shapes = eqx.filter_eval_shape(lambda m: init_caches(m, None, batch, seq, jnp.bfloat16, layout)[0], model)
    place = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    cache = jax.tree.map(place, shapes, partition_specs(shapes, mesh.shape))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=NamedSharding(mesh, P(BATCH)))
    decode = lambda model, cache, tokens, positions: model.decode(tokens, cache, positions=positions)
    with jax.set_mesh(mesh):
        step = jax.jit(decode, donate_argnums=1, compiler_options=compile_options("decode"))
    kinds = {"parameters": model, "cache": cache}
    return Program(step, (model, cache, tokens, tokens), kinds, rows=Rows(batch, seq, (Pieces(batch, 0, seq),)))


def device_bytes(tree: Any) -> int:
    """Counts the bytes of a tree of arrays, or of their shapes, in the memory of each device."""
    return _bytes_of(a for a in jax.tree.leaves(tree) if not is_on_host(a))


def host_bytes(tree: Any) -> int:
    """Counts the bytes of a tree of arrays, or of their shapes, that each device has in the memory of its host."""
    return _bytes_of(a for a in jax.tree.leaves(tree) if is_on_host(a))


def _bytes_of(arrays: Iterable[Any]) -> int:
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)


def compile_ahead(program: Program, mesh: Mesh) -> Compiled:
    """Compiles the program for the devices of the mesh.

    Raises:
        TooLarge: XLA reports that the program does not fit the devices' memory.
    """
    with tempfile.TemporaryDirectory() as dump, jax.set_mesh(mesh):
        lowered, start = program.function.lower(*program.arguments), time.monotonic()
        try:
            with forgotten():
                executable = lowered.compile({"xla_dump_to": dump})
        except jax.errors.JaxRuntimeError as error:
            raise _explained(error) from error
        seconds = time.monotonic() - start
        (file,) = pathlib.Path(dump).glob("*.jit_*after_optimizations.txt")
        text = file.read_text()
    m = executable.memory_analysis()
    return Compiled(
        m.argument_size_in_bytes, m.temp_size_in_bytes, round(activations(text)),
        m.output_size_in_bytes, m.alias_size_in_bytes, m.host_argument_size_in_bytes + m.host_temp_size_in_bytes,
        collectives(text, mesh.size),
        kernels(text, program.seen, filled=1 / FIRST if mesh.shape[EXPERT] > 1 else 1.0), seconds,
    )  # fmt: skip


def _explained(error: Exception) -> Exception:
    """Turns a compiler's error into `TooLarge` if it is about memory."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    sizes = re.findall(r"([\d.]+)([KMGT])\b", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or len(sizes) < 2:
        return error
    needed, available = (float(number) * units[unit] for number, unit in sizes[:2])
    return TooLarge(needed, available)
