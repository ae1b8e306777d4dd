"""Plans of runs: computing from `Options` a `Plan` of memory and time, and searching for faster options."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

import zoo
from kernels.mesh import BATCH, CONTEXT, EXPERT, FSDP, REPLICA, STAGE, TENSOR
from train.base.chips import Chip, ring_rate, slowest_link
from train.base.flops import flops_per_token, products_of_image, products_per_token
from train.base.options import Flat, Group, OptionGroup, option
from train.base.source import SourceOptions
from train.planning.ahead import (
    NONE,
    Compiled,
    Program,
    Rows,
    TooLarge,
    compile_ahead,
    decoding,
    device_bytes,
    parts_of,
)
from train.planning.breakdown import ASIDE, Part, parts
from train.planning.fit import REMATS, recomputed, recomputed_of, saved_bytes
from train.planning.hlo import RINGS, Collective
from train.planning.sampling import sampling, shapes_on
from train.state.mesh import check_mesh, check_sampling, meshes
from train.state.offload import is_on_host
from train.state.optim import OptimizerOptions
from train.state.state import Lora, StateOptions
from zoo.generation.pages import Layout
from zoo.nn.layers import AbstractExpertLinear
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig, AbstractModel, Family
from zoo.nn.moe import FIRST
from zoo.nn.pipeline import rounds_of
from zoo.registry import family_of
from zoo.surgery import modules
from zoo.weights.checkpoint import skeleton


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(OptionGroup):
    """Plan a run: compile its step for devices that are not at hand, and print what it needs of each."""

    help_group: ClassVar[Group] = Group.STEP

    model: tyro.conf.Positional[str] = option(dataclasses.MISSING, group=Group.MODEL)
    """A zoo name, a folder with a config.json, or a Hub repository org/name; weights are not read."""
    source: Flat[SourceOptions] = SourceOptions()
    topology: str = option(dataclasses.MISSING, group=Group.DEVICES)
    """TPUs by their slice's shape in chips, v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:4x4 or tpu7x:2x2x2, or by Google Cloud's
    names, v6e-8, v5litepod-16 or v5p-128; GPUs by their number, t4:1, l4:8, 4090:2, a100-40gb:8, a100:8, h100:8,
    h200:16 or b200:64."""
    mesh: str = option("fsdp=-1", group=Group.DEVICES)
    """Number of devices along each axis, as for training."""
    batch: int
    """Number of rows of a step, on all devices together; where completions are sampled, their number in an update, in
    which they share rows."""
    seq: int
    """Number of tokens of a row; where completions are sampled, those of a prompt with its completion; with --decode,
    number of positions of the cache."""
    remat: str = "full"
    """Values that the backward pass recomputes, as for training, but for auto."""
    microbatches: int = 1
    """Number of parts in which a step computes its rows, one after another."""
    method: Literal["sft", "dpo", "grpo", "distill", "reward", "classify", "embed"] = option("sft", group=Group.METHOD)
    """Method of training. sft: predicting tokens. dpo: preferences, beside a reference in bfloat16; with --lora.rank
    the reference is the model without its adapters. grpo: rewards; a device needs the larger of an update's memory and
    sampling's. distill: beside a --teacher; with --max-new-tokens on policy, which samples, too. reward, classify (with
    2 labels) and embed: heads."""
    teacher: str = option("", group=Group.METHOD, rare=True)
    """Teacher of distill, in bfloat16: a zoo name, a folder with a config.json, or a Hub repository."""
    judge: str = option("", group=Group.METHOD, rare=True)
    """Reward model beside grpo, as in --reward model:NAME: a zoo name, a folder with a config.json, or a Hub
    repository. It is held in bfloat16."""
    kl: float = option(0.0, group=Group.METHOD, rare=True)
    """Weight of the divergence from the reference, as in train.grpo. 0: no reference."""
    max_new_tokens: int = option(0, group=Group.METHOD, rare=True)
    """Largest number of tokens of a completion, or of a reply, for grpo and distill; prompts, and what stands between
    replies, have the rest of --seq. 0: half of --seq for all replies, and no completions for distill."""
    turns: int = option(1, group=Group.METHOD, rare=True)
    """Number of replies in a conversation, as in train.grpo with an --environment."""
    prompt_tokens: int = option(0, group=Group.METHOD, rare=True)
    """Number of tokens of a conversation before its first reply, which its group shares. Those between replies, such as
    results of tools, are each conversation's own. 0: there are equally many before each reply."""
    one_step_off: bool = option(False, group=Group.METHOD, rare=True)
    """Sample beside an update, as in train.grpo: a device needs the memory of both at once."""
    sampling_mesh: str | None = option(None, group=Group.METHOD, rare=True)
    """Mesh of other devices to sample on, as in train.grpo with --one-step-off; --mesh is of the rest of them."""
    rollout_batch: int = option(64, group=Group.METHOD, rare=True)
    """Number of completions that are sampled at a time, each with a cache, as in train.grpo."""
    group: int = option(8, group=Group.METHOD, rare=True)
    """Number of completions of each prompt, as in train.grpo."""
    cache_dtype: Literal["auto", "int8"] = option("auto", group=Group.METHOD, rare=True)
    """Data type of cached keys and values while sampling, as in train.grpo. auto: bfloat16."""
    lora: Lora = NONE
    optim: Flat[OptimizerOptions] = OptimizerOptions()
    state: Flat[StateOptions] = StateOptions()
    quantize: Literal["none", "int8", "fp8", "nf4"] = option("none", group=Group.MODEL)
    """Format of the weights that are not trained, under adapters or with --decode. none: bfloat16. int8 and fp8: eight
    bits. nf4: four bits."""
    images: int = option(0, rare=True)
    """Number of images of a row. Above 0 the model has its vision tower, which is trained like the rest, and which MFU
    counts. 0: the text model."""
    patches: int = option(1024, rare=True)
    """Number of patches of an image, for towers that take any shape; other towers have a fixed number. 1,024 are 512 x
    512 pixels of Qwen3-VL or 448 x 448 of Mistral Small 3."""
    decode: bool = False
    """Plan the decoding step, which adds a token to each row, with weights in bfloat16, instead of training."""
    cache_tokens: int = option(0, rare=True)
    """Number of tokens of all rows together for which a decoding step has memory, in pages, as `zoo.Engine` has it. 0:
    --seq for each row."""
    search: bool = False
    """Also try other meshes, batches, microbatches and remats: estimate many, compile the best three, and rank them by
    the sum of their kernels and collectives."""

    @property
    def reference(self) -> bool:
        """Whether a step has one more forward pass, through a reference model."""
        return self.method in ("dpo", "distill") or (self.method == "grpo" and self.kl > 0)

    @property
    def samples(self) -> bool:
        """Whether completions are sampled between updates."""
        return self.method == "grpo" or (self.method == "distill" and self.max_new_tokens > 0)

    @property
    def completions(self) -> int:
        """Counts the completions of a prompt in a step that samples."""
        return self.group if self.method == "grpo" else 1

    @property
    def new(self) -> int:
        """Counts the tokens that are drawn in a row of --seq tokens."""
        return min(self.turns * (self.max_new_tokens or max(1, self.seq // 2 // self.turns)), self.seq)

    @property
    def prompt(self) -> int:
        """Counts the tokens before the first reply in a row of --seq tokens, whose last one is only a target."""
        return self.prompt_tokens or math.ceil((self.seq + 1 - self.new) / self.turns)

    @property
    def headed(self) -> bool:
        """Whether a head of few weights stands in the place of the output embeddings."""
        return self.method in ("reward", "classify", "embed")

    def tokens(self, rows: Rows) -> float:
        """Counts the tokens of a training step with these rows, or those that a decoding step adds."""
        return self.batch if self.decode else rows.tokens


JUDGE = "reward model"  # among a plan's kinds of bytes
Step = Callable[[Options, AbstractConfig, Family, Mesh], Program]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The needs of the sampling of a step: bytes of one device, and lower bounds of seconds."""

    needed: float  # bytes, with all else that the device holds meanwhile
    caches: int  # bytes of the caches of all rows
    layout: Layout | None  # the caches' pages; None: each row has memory for all of its tokens
    most: int  # tokens of a row
    copying: float  # seconds in which the weights are copied; 0: they are on these devices
    prompts: float  # seconds in which prompts are read, and what stands between replies
    steps: int  # number of decoding steps
    bounds: dict[str, float]  # seconds by "compute", "HBM", "interconnect": a decoding step takes at least the longest

    @property
    def seconds(self) -> float:
        """Returns a lower bound of the seconds of all sampling of a step."""
        return self.copying + self.prompts + self.steps * max(self.bounds.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The needs of a run with these options: bytes of one device, seconds of one step."""

    options: Options
    mesh: Mesh
    rows: Rows
    kinds: dict[str, int]  # bytes held before a step, by kind
    gradients: int  # bytes, with the copies of weights in bfloat16
    compiled: Compiled | None  # None if the step does not fit
    updating: float  # bytes that an update needs
    sampling: Sampled | None  # None: nothing is sampled, or the update alone does not fit
    available: float
    bounds: dict[str, float]  # seconds by "compute", "HBM", "interconnect": a step takes at least the longest of them
    flops: float  # FLOPs of one token, as MFU counts them
    mfu: float  # an upper bound, from 0 to 1
    chip: Chip

    @property
    def tokens(self) -> float:
        """Counts the tokens of a step."""
        return self.options.tokens(self.rows)

    @property
    def needed(self) -> float:
        """Returns the bytes that an update needs, or sampling if that is more."""
        return max(self.updating, self.sampling.needed if self.sampling else 0.0)

    @property
    def parts(self) -> dict[str, Part]:
        """Sums the kernels of a step by kind."""
        return parts(self.compiled.kernels, self.chip) if self.compiled else {}

    @property
    def sending(self) -> float:
        """Estimates the seconds in which all collectives send; 0 if the step does not fit."""
        return sending(self.compiled.collectives, self.chip, self.mesh) if self.compiled else 0.0

    @property
    def seconds(self) -> tuple[float, float]:
        """Estimates the seconds of a step (not a bound), in two cases.

        First: collectives, and copies that are started ahead, run beside kernels. Second: they run between kernels. A
        decoding step is limited by memory as a whole, so there copies beside kernels save no time. Routers are taken to
        choose all experts equally often.
        """
        found, sent = self.parts, self.sending
        kernels = sum(part.seconds for part in found.values())
        aside = found[ASIDE].seconds if ASIDE in found and not self.options.decode else 0.0
        return max(kernels - aside, sent), kernels + sent

    def reached(self, seconds: float) -> float:
        """Returns the MFU, from 0 to 1, of a step that takes so many seconds."""
        return self.flops * self.tokens / self.mesh.size / self.chip.flops / seconds

    @property
    def tokens_per_second(self) -> float:
        """Returns an upper bound of the tokens per second of all devices together."""
        return self.tokens / max(self.bounds.values())

    @property
    def estimated_speed(self) -> float:
        """Estimates the tokens per second of all devices together, with nothing beside kernels; 0: it does not fit."""
        return self.tokens / self.seconds[1] if self.compiled else 0.0


def refuse(options: Options, config: AbstractConfig, chip: Chip, count: int, step: Step) -> None:
    """Raises a ValueError if the run cannot fit `count` such devices. Needs no compiler for them.

    A device of this machine stands in for each. With --search only the size of the whole state is checked, since the
    search may find a mesh that needs less than --mesh.
    """
    mesh, _ = _meshes(options, config, jax.devices()[:1] * count)
    program = _fitting(options, _program(options, config, mesh, step), chip, mesh.size)
    held = {kind: size for kind, size in _bytes(program)[0].items() if kind != "batch"}
    if sum(held.values()) > chip.memory and not options.search:
        each = " and ".join(f"{gb(size)} of {kind}" for kind, size in held.items())
        raise ValueError(
            f"{options.model} does not fit: with --mesh {options.mesh} a device holds {each} before a step, and one "
            f"of {options.topology} has {gb(chip.memory)}; split them over more devices, or train less of it "
            "(--lora.rank)."
        )


def plan(options: Options, config: AbstractConfig, chip: Chip, devices: list[Any], step: Step) -> Plan:
    """Compiles the step that the options describe, unless its arguments alone exceed a device's memory.

    `step` makes the training step of the options' method.

    Raises:
        ValueError: the mesh does not divide model and batch, or the model is larger than all devices together.
    """
    mesh, there = _meshes(options, config, devices)
    program = _fitting(options, _program(options, config, mesh, step), chip, mesh.size)
    kinds, gradients = _bytes(program)
    if there != mesh:
        kinds.pop(JUDGE, None)
    compiled, needed, sampled, available = None, float(sum(kinds.values())), None, float(chip.memory)
    if needed <= available:
        try:
            compiled = compile_ahead(program, mesh)
            needed = float(compiled.needed + kinds.get(JUDGE, 0))
        except TooLarge as error:
            needed, available = error.needed, error.available
    if compiled and options.samples and needed <= available:
        sampled = _sampled(options, config, chip, program, compiled, mesh, there)
    of_token = functools.partial(
        flops_per_token, config, frozen=bool(options.lora.rank), headed=options.headed,
        images=0 if options.decode else options.images, patches=options.patches,
    )  # fmt: skip
    rows = program.rows
    flops = rows.mean(of_token) / (3 if options.decode else 1)
    bounds = _bounds(options, rows, program.kinds["parameters"], chip, mesh, compiled)
    mfu = flops * options.tokens(rows) / mesh.size / chip.flops / max(bounds.values())
    made = Plan(options, mesh, rows, kinds, gradients, compiled, needed, sampled, available, bounds, flops, mfu, chip)
    return made if made.needed <= available else dataclasses.replace(made, compiled=None)


def _meshes(options: Options, config: AbstractConfig, devices: Sequence[Any]) -> tuple[Mesh, Mesh]:
    """Makes the meshes of the step and of sampling. Raises a ValueError if that of sampling can't split the model."""
    mesh, there = meshes(options.mesh, options.sampling_mesh, devices)
    if options.sampling_mesh:
        check_sampling(there, skeleton(family_of(config), config), family_of(config))
    return mesh, there


def _sampled(
    options: Options, config: AbstractConfig, chip: Chip, update: Program, compiled: Compiled, mesh: Mesh, there: Mesh
) -> Sampled:
    """Compiles the two programs of sampling, on the mesh `there`. `compiled` is the update."""
    group, rows = options.completions, min(options.batch, options.rollout_batch)
    s = sampling(
        config, there, update, seq=options.seq, prompt=options.prompt, new=options.new, rows=options.rollout_batch,
        group=group, turns=options.turns, cache_dtype=options.cache_dtype,
    )  # fmt: skip
    if there != mesh:
        beside = device_bytes(shapes_on(update.kinds.get(JUDGE), there))
    elif options.one_step_off:  # beside all that an update needs, which shares only the frozen weights
        beside = compiled.needed - (s.weights - s.trained) + device_bytes(update.kinds.get(JUDGE))
    else:
        beside = s.beside + device_bytes(update.kinds.get(JUDGE))
    bounds = {"HBM": (s.weights + s.filled * rows / options.rollout_batch) / chip.bandwidth}
    p, peak = products_per_token(config, options.seq), chip.flops * there.size
    bounds["compute"] = 2 * sum(p) * rows / peak
    try:
        advance = compile_ahead(s.advance, there)
        needed = max(compile_ahead(s.prefill, there).needed, advance.needed)
        bounds["interconnect"] = sending(advance.collectives, chip, there)  # its loop over tokens counts once
    except TooLarge as error:
        needed = error.needed
    between = options.seq + 1 - options.new - options.prompt  # tokens of a conversation that are each row's own
    read = options.batch * (options.prompt / group + between)
    link = slowest_link(chip, [*mesh.devices.flat, *there.devices.flat])
    return Sampled(
        float(beside + needed), device_bytes(s.advance.kinds["cache"]), s.layout, s.most,
        copying=0.0 if there == mesh else s.trained / link,
        prompts=2 * (p.layers + p.attention) * read / peak,
        steps=math.ceil(options.batch * options.new / rows),
        bounds=bounds,
    )  # fmt: skip


def _fitting(options: Options, program: Program, chip: Chip, count: int) -> Program:
    """Returns the program. Raises a ValueError if its arguments are larger than the memory of all devices together."""
    whole = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(program.arguments) if not is_on_host(a))
    if whole > chip.memory * count:
        raise ValueError(
            f"{options.model} is larger than the fleet: its state takes {gb(whole)}, and {options.topology} has "
            f"{gb(chip.memory * count)}; take at least {math.ceil(whole / chip.memory):,} such devices."
        )
    return program


def _bytes(program: Program) -> tuple[dict[str, int], int]:
    """Counts the bytes that one device holds before a step, by kind, and those of its gradients and weights' copies."""
    return {kind: device_bytes(tree) for kind, tree in program.kinds.items()}, device_bytes(program.gradients)


def _program(options: Options, config: AbstractConfig, mesh: Mesh, step: Step) -> Program:
    _check(options, config, mesh)
    if options.decode:
        return decoding(
            config, family_of(config), mesh, batch=options.batch, seq=options.seq, quantize=options.quantize,
            images=options.images, cache_tokens=options.cache_tokens,
        )  # fmt: skip
    return step(options, config, family_of(config), mesh)


def _check(options: Options, config: AbstractConfig, mesh: Mesh) -> None:
    """Raises a ValueError if options contradict one another, or the mesh does not divide model and batch."""
    family = family_of(config)
    if options.decode and options.method != "sft":
        raise ValueError(f"--decode plans no training: leave out --method {options.method}.")
    if options.judge and options.method != "grpo":
        raise ValueError(f"--judge {options.judge} rewards completions: it needs --method grpo.")
    if (options.turns > 1 or options.one_step_off) and options.method != "grpo":
        raise ValueError("--turns and --one-step-off are of rollouts: they need --method grpo.")
    if options.prompt_tokens and options.turns == 1:
        raise ValueError(
            f"--prompt-tokens {options.prompt_tokens} is of conversations: add --turns, or leave it out. The prompt of "
            "one reply is all of --seq but --max-new-tokens."
        )
    if options.prompt_tokens > (most := options.seq + 1 - options.new):
        raise ValueError(
            f"--prompt-tokens {options.prompt_tokens}: replies leave {most} of --seq {options.seq} to a prompt; raise "
            "--seq, or take fewer --max-new-tokens."
        )
    if options.sampling_mesh and not options.one_step_off:
        raise ValueError(f"--sampling-mesh {options.sampling_mesh} is for sampling beside updates: add --one-step-off.")
    if bool(options.teacher) != (options.method == "distill"):
        raise ValueError("--method distill needs a --teacher, and no other method has one.")
    if options.images and options.headed:
        raise ValueError(f"--images: --method {options.method} reads texts alone.")
    if options.images and options.method in ("grpo", "distill"):
        raise ValueError(f"Prompts with images are not planned: leave out --images or --method {options.method}.")
    if options.cache_tokens and not options.decode:
        raise ValueError(f"--cache-tokens {options.cache_tokens} is of decoding: add --decode.")
    if options.decode and options.lora.rank:
        raise ValueError("--decode is of a model without adapters, or with merged ones: leave out --lora.rank.")
    if options.quantize != "none" and not (options.decode or options.lora.rank):
        raise ValueError(
            f"--quantize {options.quantize} keeps weights that are not trained; it needs --lora.rank or --decode."
        )
    check_mesh(
        mesh,
        skeleton(family, config, parts_of(options.images)),
        family,
        batch=options.batch // options.microbatches,
        seq_len=options.seq,
    )


def _bounds(
    options: Options, rows: Rows, model: AbstractModel, chip: Chip, mesh: Mesh, compiled: Compiled | None
) -> dict[str, float]:
    """Computes lower bounds of a step in seconds, one for each limit. Without a compiled step only "compute" is known.

    The limits are "compute", "HBM" and "interconnect".
    """
    teacher = zoo.inspect(options.teacher, ignore=options.source.ignore_keys) if options.teacher else None

    def of_token(seq: int) -> float:
        """Counts the multiply-adds of a token, on average over a text."""
        p = products_per_token(model.config, seq)
        p = p._replace(head=0.0) if options.headed else p
        if options.decode:
            return sum(p)
        other = products_per_token(teacher, seq) if teacher else p
        weights = (2 if options.lora.rank else 3) * (p.layers + p.head)  # frozen weights have no gradient
        again = recomputed(model.config, seq, options.remat)
        return 3 * p.attention + weights + again + options.reference * sum(other)

    products = rows.mean(of_token)
    if options.images and not options.decode:
        image = products_of_image(model.config, options.patches)
        passes, remat = 1 if options.lora.rank else 3, options.remat if options.remat in REMATS else "full"
        tower = (passes + options.reference) * sum(image) + recomputed_of(image, remat) * (passes > 1)
        products += options.images * tower / options.seq
    computing = 2 * products * options.tokens(rows) / mesh.size / chip.flops
    bounds = {"compute": computing * _ticks(options, rows, model, mesh)}
    if compiled:
        # A step reads its arguments, writes its results, and writes and reads its temporaries.
        written = compiled.results - (
            compiled.reused if options.decode else 0
        )  # decoding writes one position of the cache
        bounds["HBM"] = (compiled.arguments + written + 2 * compiled.temporaries) / chip.bandwidth
        bounds["interconnect"] = sending(compiled.collectives, chip, mesh)
    return bounds


def sending(collectives: Sequence[Collective], chip: Chip, mesh: Mesh) -> float:
    """Computes the seconds in which the collectives send their bytes, one after another."""
    rate = lambda each: (ring_rate if each.kind in RINGS else slowest_link)(chip, mesh.devices.flat[list(each.group)])
    return sum(each.sent * each.times / rate(each) for each in collectives)


def _ticks(options: Options, rows: Rows, model: AbstractModel, mesh: Mesh) -> float:
    """Returns the factor by which a step is longer because stages idle while the pipeline fills and drains."""
    if (stages := mesh.shape[STAGE]) == 1:
        return 1.0
    microbatches = rows.count // options.microbatches // math.prod(mesh.shape[axis] for axis in BATCH if axis != STAGE)
    busy = microbatches * _rounds(model, stages)
    return (busy + stages - 1) / busy


def _rounds(model: AbstractModel, stages: int) -> int:
    """Returns how often a token goes through all stages."""
    return rounds_of(max(repeats for _, repeats in model.layers.runs if repeats % stages == 0) // stages)


def held(
    kinds: Mapping[str, int], gradients: int, config: AbstractConfig, mesh: Mesh, options: Options, rows: Rows
) -> float:
    """Estimates the bytes of a device during a step: arguments, gradients with weights' copies, and activations."""
    saved = functools.partial(saved_bytes, config, mesh, seq=rows.length, remat=options.remat)
    activations = 0.0 if options.decode else saved(rows=rows.count / options.microbatches)
    return sum(kinds.values()) + gradients + activations


def suggestion(made: Plan, config: AbstractConfig) -> str:
    """Proposes the first change that saves the missing bytes: remat, fsdp, the batch, or more devices."""
    o, mesh = made.options, made.mesh
    if made.sampling and made.sampling.needed > made.available:
        return (
            f"--rollout-batch {max(1, o.rollout_batch // 2)}, or --cache-dtype int8: it is sampling that does not fit."
        )
    missing, state = made.needed - made.available, sum(made.kinds.values())
    # Scales the compiler's figure by the ratio of our estimates, which leave out many short-lived arrays.
    ours = lambda o: held(made.kinds, made.gradients, config, mesh, o, made.rows)
    needs = lambda remat: made.needed * ours(dataclasses.replace(o, remat=remat)) / ours(o)
    fixed = state - made.kinds.get("cache", 0)
    fits = fixed < made.available  # then the batch is too large
    less_kept = REMATS[REMATS.index(o.remat) + 1 :] if o.remat in REMATS else ()
    for remat in less_kept if fits and not o.decode else ():
        if needs(remat) <= made.available:
            return f"--remat {remat}, with which a device needs about {gb(needs(remat))}."
    replicas = mesh.shape[REPLICA]
    copied = made.kinds["parameters"] if o.decode or o.lora.rank else made.gradients  # in each replica
    if (less := copied * (1 - 1 / replicas)) >= missing:
        fsdp = mesh.shape[FSDP] * replicas
        return f"fsdp={fsdp} instead of replica={replicas}, which takes {gb(less)} off each device."
    shards = math.prod(mesh.shape[axis] for axis in BATCH) * o.microbatches
    rows = int((made.available - fixed) / (made.needed - fixed) * o.batch) // shards * shards if fits else 0
    if 0 < rows < o.batch:
        return f"--batch {rows}, since what grows with the batch takes {gb(made.needed - fixed)} now."
    more = math.ceil(made.needed / made.available * mesh.size)
    return f"a larger fsdp over at least {more:,} devices, if all that is held is split over them."


def candidates(options: Options, config: AbstractConfig, chip: Chip, devices: list[Any], step: Step) -> list[Options]:
    """Lists other meshes, batches, microbatches and remats that should fit, fastest first, by rough estimates."""
    found, sizes = [], (1, 2, 4, 8, 16, 32, 64)
    axes = (TENSOR, EXPERT, CONTEXT) if options.decode else (TENSOR, EXPERT, CONTEXT, STAGE)
    split = [{}, *({axis: n} for axis in axes for n in sizes[1:5])]
    remats = [options.remat] if options.decode else [options.remat, *(each for each in REMATS if each != options.remat)]
    meshes = [{REPLICA: replicas} | other for replicas in sizes for other in split]
    batches = [*([options.batch // 2] if options.batch > 1 else []), *(options.batch * n for n in (1, 2, 4))]
    grows = ("batch",) if options.cache_tokens else ("batch", "cache")  # with the rows
    parts = [options.microbatches] if options.decode else [options.microbatches * n for n in (1, 2, 4)]
    for each in meshes:
        text = ",".join([*(f"{axis}={n}" for axis, n in each.items() if n > 1), f"{FSDP}=-1"])
        try:
            mesh, _ = _meshes(dataclasses.replace(options, mesh=text), config, devices)
            largest = dataclasses.replace(options, mesh=text, batch=max(batches))
            program = _program(largest, config, mesh, step)
        except ValueError:  # the mesh does not divide model or batch
            continue
        shares = math.prod(mesh.shape[axis] for axis in BATCH)
        kinds, gradients = _bytes(program)
        for batch, n, remat in itertools.product(batches, parts, remats):
            if batch % (n * shares):
                continue
            other = dataclasses.replace(largest, batch=batch, microbatches=n, remat=remat)
            own = {kind: size * batch // largest.batch if kind in grows else size for kind, size in kinds.items()}
            rows = program.rows.times(batch / largest.batch)
            if (needed := held(own, gradients, config, mesh, other, rows)) < 0.9 * chip.memory:
                seconds = _seconds(other, rows, own, program.kinds["parameters"], chip, mesh)
                found.append((seconds / batch, needed, other))
    return [other for *_, other in sorted(found, key=lambda each: each[:2])]


def _seconds(
    options: Options, rows: Rows, kinds: Mapping[str, int], model: AbstractModel, chip: Chip, mesh: Mesh
) -> float:
    """Estimates the seconds of a step: the sum of computing, of reading and writing, and of sending.

    `kinds` has the bytes of a device before the step.
    """
    size, c, passes = mesh.shape, model.config, 1 if options.decode else 3 + (options.remat != "none")
    dense, experts, count = _weights(c)
    chosen = c.num_experts_per_tok if isinstance(c, AbstractMixtureConfig) else 0
    # Each result of a product is written and read once, and those of experts with the room that their buffers have.
    by_experts, room = experts * chosen / count / c.hidden_size, FIRST if size[EXPERT] > 1 else 1
    results = products_per_token(c, rows.length).layers / c.hidden_size + by_experts * (room - 1)
    all_tokens = options.tokens(rows)
    moved = 2 * sum(kinds.values()) + 2 * 2 * passes * results * all_tokens / mesh.size
    # Numbers sent for each token in each layer: partial sums of attention and MLP; a row to each expert and back; keys
    # and values.
    tokens = 2 * passes * c.num_hidden_layers * all_tokens * size[TENSOR] / mesh.size
    gathered = 2 * passes * options.microbatches / size[TENSOR] / size[STAGE]
    own = {REPLICA: dense / (size[FSDP] * size[EXPERT] * size[CONTEXT]), EXPERT: experts / size[EXPERT]}
    sent = {
        (TENSOR,): tokens * 4 * c.hidden_size,
        (EXPERT,): tokens * 2 * room * chosen * c.hidden_size,
        (CONTEXT,): tokens * 2 * c.num_key_value_heads * c.head_dim * (size[CONTEXT] - 1),
        (FSDP, EXPERT, CONTEXT): gathered * dense,
        (FSDP, CONTEXT): gathered * own[EXPERT],
    }
    if size[STAGE] > 1:  # features, to the next stage and back
        sent[STAGE,] = 2 * 2 * _rounds(model, size[STAGE]) * all_tokens * c.hidden_size * size[STAGE] / mesh.size
    # Replicas sum gradients, by reduce-scatters, or with stages by all-reduces. Each gathers weights of the others.
    if not options.decode:
        numbers = (own[REPLICA] + own[EXPERT] / (size[FSDP] * size[CONTEXT])) / size[TENSOR] / size[STAGE]
        sent[REPLICA,] = (4 if size[STAGE] == 1 else 6) * numbers
    rate = lambda axes: (slowest_link if axes in ((EXPERT,), (STAGE,)) else ring_rate)(chip, _along(mesh, axes))
    sending = sum(number / rate(axes) for axes, number in sent.items() if math.prod(size[axis] for axis in axes) > 1)
    computing = _bounds(options, rows, model, chip, mesh, None)["compute"] / chip.products
    return computing + moved / (chip.bandwidth * chip.streaming) + sending


@functools.lru_cache
def _weights(config: AbstractConfig) -> tuple[int, int, int]:
    """Counts a text model's weights outside of experts, those of experts, and the experts of a layer."""
    model = skeleton(family_of(config), config)
    experts = [m.shape for _, m in modules(model, AbstractExpertLinear)]
    of_experts = sum(map(math.prod, experts))
    return sum(a.size for a in jax.tree.leaves(model)) - of_experts, of_experts, experts[0][-3] if experts else 1


def _along(mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """Lists the devices of one group along these axes."""
    return np.ravel(mesh.devices[tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)]).tolist()


def gb(size: float | int) -> str:
    return f"{size / 1e9:,.2f} GB"
