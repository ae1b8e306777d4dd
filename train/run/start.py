"""The start of a run: everything that its loop holds, at the first step or at the last checkpoint."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from train.base.flops import flops_per_token
from train.base.options import Every
from train.base.profiling import Profile
from train.evaluate.validation import Validation
from train.run import folder, replay, report, resume
from train.run.defaults import resolve_remat
from train.run.offending import SpikeGuard
from train.run.options import Options
from train.run.watchdog import Watchdog
from train.state import optim
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.offload import to_device
from train.state.remat import remat_of
from train.state.state import Trained, TrainState, abstract_state, init_state, whole
from train.step.clip import check_qk_clip
from train.step.router import rebalancing
from train.step.step import Recipe, jit_train_step
from train.step.task import Task
from train.watch.memory import breakdown
from train.watch.watch import Samples, Watch
from zoo import lora
from zoo.registry import family_of
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass
class Run:
    """Everything that the loop holds. `data`, `state` and `n` change from step to step."""

    out: pathlib.Path  # the folder that the run writes to
    manifest: Mapping[str, Any]  # its identity, and the options that its numbers depend on
    trained: Trained
    task: Task
    mesh: Mesh
    tokenizer: Tokenizer
    recipe: Recipe
    step: Callable[..., tuple[TrainState, dict[str, Any]]]  # compiled
    steps: int  # of the whole run
    flops: float  # of a token
    eval_every: Every
    sample_every: Every
    save_every: Every
    checkpoints: Checkpoints
    validation: Validation
    guard: SpikeGuard
    watchdog: Watchdog
    watch: Watch
    samples: Samples
    memory: Callable[[TrainState, Any], dict[str, int]]  # of the state and a placed batch, by kind
    data: Any  # iterator
    state: TrainState
    n: int  # number of steps that are done
    new: bool  # whether the run begins here

    def parameters(self) -> Any:
        """Returns the trained parameters, on the devices, all of them in each replica."""
        return whole(to_device(self.state.model))

    def model(self) -> Any:
        return lora.combine(self.parameters(), self.trained.frozen)

    def done(self) -> bool:
        return self.n >= self.steps or self.validation.out_of_patience(self.n)

    def is_due(self, every: Every) -> bool:
        """Whether the run is done, or `n` is a multiple of `every`; with 0, whether no checkpoint is being saved."""
        if every == "never":
            return False
        return self.done() or (self.n % every == 0 if every else self.checkpoints.idle())


def start(
    options: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> Run | None:
    """Makes the run, at its first step or at its last checkpoint. Returns None after a dry run, which prints memory."""
    manifest = folder.run_manifest(options, identity)  # before --remat auto, which differs from device to device
    optimizer, schedule = optim.make_optimizer(options.optim, task.updates)
    abstract, router = abstract_state(trained.abstract, optimizer, options.state), options.router
    held = abstract, trained.frozen, task.reference, task.beside
    options = options.changed(step=resolve_remat(options.step, options.state, trained, mesh, held))
    validation = Validation(options.validation, task, trained.config, tokenizer, mesh, options.step.compute_dtype)
    check_qk_clip(options.optim.qk_clip, trained.abstract, trained.frozen)
    recipe = Recipe(
        optimizer=optimizer, schedule=schedule, compute_dtype=jnp.dtype(options.step.compute_dtype),
        objective=task.objective, remat=remat_of(options.step.remat), microbatches=options.step.microbatches,
        router_balance=router.router_balance, router_sequence=router.router_sequence, router_z=router.router_z,
        rebalance=rebalancing(router, family_of(trained.config), adapters=trained.adapters),
        qk_clip=options.optim.qk_clip,
    )  # fmt: skip
    out, told = folder.run_folder(options, manifest), report.overview(options, trained, mesh)
    if jax.process_index() == 0:
        report.rows("Run", told)
    if options.dry_run:
        batch = put_batch(task.example or next(iter(task.data)), mesh, trained.abstract, task.reference)
        step = jit_train_step(abstract, recipe)
        report.run(options, out, mesh, abstract, step, batch, trained.frozen, task.reference)
        return None
    if options.offending.replay:
        step = jit_train_step(abstract, recipe)
        return replay.replay(options.offending, step, abstract, trained, task.reference, mesh)
    checkpoints = resume.checkpoints(options, out, manifest["identity"])
    weights = lambda: init_state(trained.make(), optimizer, options.state)
    state, saved, new = resume.begin(options, out, checkpoints, abstract, manifest, task.updates, weights)
    data, n = iter(task.data), int(state.step) // task.updates
    if saved:
        validation.evaluations = saved["looks"]
        data.set_state(saved["data"] or data.get_state())  # "data" is None if --load-state is of a run with other data
        optim.report_jump(options.optim, schedule, task.updates, n, before=saved["rate"])
    folder.write_manifest(out, manifest, options)
    spikes, eval_every = (saved or {}).get("spikes"), options.validation.eval_every
    left = trained.abstract if options.freeze else None
    watch = Watch(options.watch, out, n, new=new, parameters=report.parameters(trained))
    return Run(
        out, manifest, trained, task, mesh, tokenizer, recipe,
        step=jit_train_step(state, recipe),
        steps=options.optim.steps,
        flops=flops_per_token(
            trained.config, options.step.seq_len, frozen=trained.adapters, trained=left,
            headed=trained.abstract.head is not None,
        ),
        eval_every=eval_every,
        sample_every=options.watch.sample_every,
        save_every=eval_every if options.validation.keeps_best else options.checkpoints.save_every,
        checkpoints=checkpoints,
        validation=validation,
        guard=SpikeGuard(options.offending, f"train.{options.name}", out, manifest["identity"], spikes),
        watchdog=Watchdog(Profile(options.profiling, out), out, n),
        watch=watch,
        samples=Samples(tokenizer, task.prompts, mesh, options.step.compute_dtype, watch.sample),
        memory=lambda state, batch: breakdown(
            state, trained, {"reference": task.reference, "rewards": task.beside}, batch, options.step, options.state
        ),
        data=data, state=state, n=n, new=new,
    )  # fmt: skip
