"""A script that plans, on a CPU, whether a model trains or decodes on a fleet of chips, and at what cost.

    python -m train.plan llama3.1-8b --topology v6e:2x4 --mesh fsdp=-1 --batch 16 --seq 8192

It compiles the step of a run ahead of time for the real devices, before any chip is rented. XLA reports the bytes, and
the traffic between devices is read from the compiled program. Times are lower bounds, from the chip's published
figures, and estimates by kind of kernel, from rates that are reached in practice.
"""

import functools
import itertools
import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import rich
from jax.sharding import Mesh
from rich.table import Column, Table

import zoo
from kernels.mesh import BATCH
from train import classify, distill, dpo, embed, grpo, reward, sft
from train.base import runfile
from train.base.chips import Chip, fleet, size_of
from train.methods.on_policy import Teacher, Teachers
from train.methods.texts import Text, packing, rows_of
from train.planning import planner
from train.planning.ahead import Pieces, Program, abstract_frozen, parts_of, training
from train.planning.hlo import by_axis
from train.planning.planner import Options, Plan, Sampled, gb, suggestion
from train.run import finetune
from train.run.defaults import resolve_steps, width_lr
from train.state.mesh import abstract_model, reads_in_order
from zoo.nn.heads import ClassificationHead, RewardHead
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.registry import family_of
from zoo.weights.heads import described


DURATION = "10 seconds to some minutes, the longest for large meshes and mixtures of experts"
BOUNDS = "No time is measured: bounds follow from the chip's published figures, estimates from rates that are reached."


class Method(NamedTuple):
    options: type[finetune.FineTuningOptions]
    rate: float  # the default learning rate, as a share of fine-tuning's


METHODS = {
    "sft": Method(sft.SFTOptions, 1.0),
    "dpo": Method(dpo.DPOOptions, 1 / 20),
    "grpo": Method(grpo.GRPOOptions, 1 / 20),
    "distill": Method(distill.DistillOptions, 1.0),
    "reward": Method(reward.RewardOptions, 1 / 2),
    "classify": Method(classify.ClassifyOptions, 1.0),
    "embed": Method(embed.EmbedOptions, 1.0),
}


def script(options: Options, config: AbstractConfig) -> finetune.FineTuningOptions:
    """Converts the plan's options to those of the method's script. Other options keep the script's defaults.

    Raises:
        ValueError: the script refuses the options.
    """
    method = METHODS[options.method]
    own: dict[str, Any] = {}
    if options.method == "grpo":
        own = dict(
            kl=options.kl, group=options.group, rollout_batch=options.rollout_batch, cache_dtype=options.cache_dtype
        )
        own["max_new_tokens"] = options.new
    if options.method == "distill":
        own = dict(teacher=(options.teacher,), beta=1.0 if options.samples else 0.0)
    run = method.options.of(
        model=options.model, lora=options.lora, quantize=options.quantize, optim=options.optim, state=options.state,
        mesh=options.mesh, batch=options.batch, seq_len=options.seq, remat=options.remat,
        microbatches=options.microbatches, compute_dtype="bfloat16", **own,
    )  # fmt: skip
    return resolve_steps(
        finetune.resolve(run, config, width_lr=method.rate * width_lr(options.lora)), options.optim.steps or 1000
    )


def rows_of_completions(options: Options, model: AbstractModel, mesh: Mesh) -> dict[str, Any]:
    """Returns the arguments of `train.planning.ahead.training` for the rows in which the method packs completions.

    All texts have as many tokens, and so have all prompts. What follows a prompt is each text's own: replies, and in
    conversations what stands between them.
    """
    prompt, rest = options.prompt, options.seq + 1 - options.prompt  # the last token of a text is only a target
    of_prompt = lambda n: Text([n] * prompt + [0] * rest, [None] * prompt + [0.0] * rest, 0.0)
    texts = [of_prompt(n // options.completions) for n in range(options.batch)]
    count = rows_of(len(texts), math.prod(mesh.shape[axis] for axis in BATCH) * options.microbatches)
    places = packing(texts, count, branches=options.method == "grpo" and not reads_in_order(model))
    numbers: Counter[tuple[int, int]] = Counter()
    for members in itertools.chain(*(documents.values() for documents in places.table)):
        trunk = places.trunk(members)
        numbers[0, trunk] += trunk > 0
        numbers[trunk, options.seq] += len(members)
    pieces = tuple(Pieces(number, *ends) for ends, number in numbers.items() if number)
    return dict(batch=count, seq=places.length, pieces=pieces, branches=places.branches)


def step(options: Options, config: AbstractConfig, family: Family, mesh: Mesh) -> Program:
    """Makes the training step of the plan's options."""
    run, more, reference, head, microbatches = script(options, config), (), None, None, options.microbatches
    parts = parts_of(options.images)
    whole = functools.partial(abstract_frozen, config, family, mesh, quantize="none", parts=parts)
    match run:
        case dpo.DPOOptions():
            objective = functools.partial(dpo.objective, options=run)
            reference = None if options.lora.rank else whole()
        case grpo.GRPOOptions():
            objective, more = functools.partial(grpo.objective, options=run), ("advantages", "old")
            reference = whole() if options.kl and not options.lora.rank else None
        case distill.DistillOptions():
            objective = functools.partial(distill.objective, options=run)
            other = zoo.inspect(options.teacher, ignore=options.source.ignore_keys)
            reference = abstract_frozen(other, family_of(other), mesh, quantize="none")
            reference = Teachers((Teacher(reference),)) if options.samples else reference
        case sft.SFTOptions():
            objective = run.language.objective()
        case reward.RewardOptions():
            objective = functools.partial(reward.objective, centre=run.centre)
            head = RewardHead(config.hidden_size, None, key=jax.random.key(0))
        case classify.ClassifyOptions():
            objective = classify.objective
            head = ClassificationHead(config.hidden_size, ("no", "yes"), None, key=jax.random.key(0))
        case embed.EmbedOptions():
            objective = functools.partial(embed.objective, options=run, parts=microbatches)
            head, microbatches = described("embedding", {}, config), 1
        case _:
            raise AssertionError(f"METHODS has {options.method}, and here it is missing.")
    if run.lora.rank:
        how: Any = dict(quantize=options.quantize, adapters=run.lora, parts=parts, head=head)
        model = abstract_frozen(config, family, mesh, **how)
    else:
        model = abstract_model(config, family, mesh, parts, head)
    rows: dict[str, Any] = dict(batch=options.batch, seq=options.seq)
    if options.samples:
        rows = rows_of_completions(options, model, mesh)
    program = training(
        model, mesh, **rows, images=options.images, patches=options.patches, remat=options.remat,
        microbatches=microbatches, optimization=run.optim, kept=run.state, objective=objective, reference=reference,
        more=more,
    )  # fmt: skip
    if options.judge:
        other = zoo.inspect(options.judge, ignore=options.source.ignore_keys)
        head = RewardHead(other.hidden_size, None, key=jax.random.key(0))
        judge = abstract_frozen(other, family_of(other), mesh, quantize="none", head=head)
        program = program._replace(kinds=program.kinds | {planner.JUDGE: judge})
    return program


def plan(options: Options, config: AbstractConfig, chip: Chip, devices: list[Any]) -> Plan:
    """Calls `train.planning.planner.plan` with the method's step."""
    return planner.plan(options, config, chip, devices, step)


def candidates(options: Options, config: AbstractConfig, chip: Chip, devices: list[Any]) -> list[Options]:
    """Calls `train.planning.planner.candidates` with the method's step."""
    return planner.candidates(options, config, chip, devices, step)


def report(made: Plan, config: AbstractConfig) -> None:
    """Prints a plan: bytes, traffic and bounds; or a change of options with which it fits."""
    o, c = made.options, made.compiled
    table = Table(title=f"{o.model} on {o.topology}, {o.mesh}", title_justify="left", show_header=False, box=None)
    table.add_row("[bold]fits[/bold]" if c else "[bold red]does not fit[/bold red]", "")
    table.add_row("a device needs", f"{gb(made.needed)} of {gb(made.available)}")
    for kind, size in made.kinds.items():
        table.add_row(f"  {kind}", gb(size))
    rest = made.needed - sum(made.kinds.values())
    if c:
        table.add_row("  activations", gb(c.activations))
        table.add_row("  gradients and temporaries", gb(c.needed - sum(made.kinds.values()) - c.activations))
        if made.sampling:
            _add_memory_of_sampling(table, made, made.sampling)
        if c.host:
            table.add_row("and of its host", gb(c.host))
        for (kind, axes), size in sorted(by_axis(c.collectives, made.mesh.shape).items()):
            table.add_row(f"a device sends by {kind} over {axes}", f"{gb(size)} a step")
        table.add_row("compiled in", f"{c.seconds:.0f} s")
    else:
        what = "what sampling needs beside these" if made.sampling else "activations, gradients and temporaries"
        table.add_row(f"  {what}", gb(rest))
    table.add_row("FLOPs of a token, of which MFU is counted", f"{made.flops / 1e9:,.4g} billion")
    for name, seconds in made.bounds.items():
        table.add_row(f"a step takes, because of {name}", f"at least {1e3 * seconds:,.2f} ms")
    if c:
        table.add_row("so MFU is", f"at most {made.mfu:.1%}")
        table.add_row("and all devices do", f"at most {made.tokens_per_second:,.0f} tokens a second")
        if made.sampling:
            _add_times_of_sampling(table, made, made.sampling)
    rich.print(table)
    if c:
        rich.print(breakdown(made))
    rich.print(BOUNDS if c else f"To fit, try {suggestion(made, config)}")


def _add_memory_of_sampling(table: Table, made: Plan, s: Sampled) -> None:
    """Adds the bytes of an update beside those of sampling, and those of sampling's caches."""
    o, update = made.options, made.updating
    table.add_row("in all, an update needs", gb(update) + ", the peak" * (update > s.needed))
    beside = "on other devices" if o.sampling_mesh else "beside it" if o.one_step_off else "with the state beside it"
    table.add_row(f"and sampling, {beside}", gb(s.needed) + ", the peak" * (s.needed > update))
    pages = f" in {s.layout.count:,} pages of {s.layout.slots}" if s.layout else ""
    of = f"{o.rollout_batch:,} rows of at most {s.most:,} tokens{pages}"
    table.add_row("  of which caches", f"{gb(s.caches)}, for {of}")


def _add_times_of_sampling(table: Table, made: Plan, s: Sampled) -> None:
    """Adds the bounds of the times of sampling, and of a step with its update."""
    o, rows, ms = made.options, made.rows, lambda seconds: f"{1e3 * seconds:,.2f} ms"
    once = ", each with its prompts once" if rows.branches else ""
    packed = f"in {rows.count:,} rows of {rows.length:,}{once}"
    table.add_row("a step's tokens", f"{made.tokens:,}, of which {o.batch * o.new:,} are drawn, {packed}")
    read = "prompts" + " and what stands between replies" * (o.turns > 1)
    limit = max(s.bounds, key=s.bounds.__getitem__)
    each = f"{s.steps:,} decoding steps of {ms(s.bounds[limit])} because of {limit}, {ms(s.prompts)} for {read}"
    each += f", {ms(s.copying)} for copying weights" if s.copying else ""
    table.add_row("sampling takes", f"at least {ms(s.seconds)}: {each}")
    update = max(made.bounds.values())
    both, longer = ms(s.seconds + update), ms(max(s.seconds, update))
    if o.sampling_mesh:
        table.add_row("one beside the other, a step takes", f"at least {longer}, and in turn {both}")
    else:
        table.add_row("with the update, a step takes", f"at least {both}")


def breakdown(made: Plan) -> Table:
    """Makes a table of a step's kernels by kind, with their estimated times."""
    columns = [Column(name, justify="right") for name in ("kernels", "TFLOP", "GB", "ms")]
    table = Table("where a step goes", *columns, box=None)
    for kind, part in made.parts.items():
        flops = f"{part.flops / 1e12:,.2f}" if part.flops else ""
        table.add_row(kind, f"{part.kernels:,}", flops, f"{part.bytes / 1e9:,.2f}", f"{1e3 * part.seconds:,.2f}")
    assert made.compiled
    sent = sum(each.sent * each.times for each in made.compiled.collectives)
    calls = sum(each.times for each in made.compiled.collectives)
    if calls:
        table.add_row("collectives", f"{calls:,}", "", f"{sent / 1e9:,.2f}", f"{1e3 * made.sending:,.2f}")
    beside, between = made.seconds
    table.add_row(f"sum, MFU {made.reached(between):.1%}", "", "", "", f"{1e3 * between:,.2f}")
    if between > beside:
        name = f"with what is started ahead beside kernels, MFU {made.reached(beside):.1%}"
        table.add_row(name, "", "", "", f"{1e3 * beside:,.2f}")
    return table


def rank(plans: list[Plan]) -> None:
    """Prints the plans that were compiled, ranked by the sums of their kernels and collectives, the fastest first."""
    columns = ("batch, parts", "remat", "a device needs", "tokens a second", "MFU, and at most")
    table = Table(Column("mesh", overflow="fold"), *columns, title="Ranked by the estimated sum", title_justify="left")
    for p in sorted(plans, key=lambda p: -p.estimated_speed):
        mfu = f"{p.reached(p.seconds[1]):.1%}, {p.mfu:.1%}" if p.compiled else ""
        speed = (f"{p.estimated_speed:,.0f}", mfu) if p.compiled else ("does not fit", "")
        rows = f"{p.options.batch}, {p.options.microbatches}"
        table.add_row(p.options.mesh, rows, p.options.remat, gb(p.needed), *speed)
    rich.print(table)


def main(o: Options) -> None:
    config = zoo.inspect(o.model, ignore=o.source.ignore_keys)
    try:
        chip, devices = fleet(o.topology)
    except ImportError:  # report that the model does not fit before asking the user to install a compiler
        planner.refuse(o, config, *size_of(o.topology), step)
        raise

    def planned(options: Options, which: str = "") -> Plan:
        rich.print(f"Compiling the step of {options.model} for {options.topology}{which}, {options.mesh}: {DURATION}.")
        return plan(options, config, chip, devices)

    plans = [planned(o)]
    if o.search:
        best_of_axes: dict[frozenset[str], Options] = {}  # by the axes beside replica and fsdp
        for other in candidates(o, config, chip, devices):
            best_of_axes.setdefault(frozenset(re.findall("tensor|expert|context|stage", other.mesh)), other)
        best = [other for other in list(best_of_axes.values())[:3] if other != o]
        plans += [planned(other, f" ({n} of {len(best)} that are searched)") for n, other in enumerate(best, 1)]
        rank(plans)
    best = max((p for p in plans if p.compiled), key=lambda p: p.estimated_speed, default=plans[0])
    report(best, config)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # the fleet is not attached to this machine
    jax.config.update("jax_enable_compilation_cache", False)  # XLA does not dump a program that comes from the cache
    try:
        main(runfile.parse(Options))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
