"""The options that training scripts share. Most are declared in the files that implement them."""

import dataclasses
import functools
import pathlib
from typing import ClassVar

from train.base.command import CommandOptions
from train.base.help import Group, option
from train.data.packing import Chat
from train.data.pictures import VisionOptions
from train.evaluate.validation import ValidationOptions
from train.run.watchdog import WatchdogOptions
from train.state.optim import OptimizerOptions
from train.state.remat import StepOptions
from train.step.mtp import MTPOptions
from train.step.router import RouterOptions
from train.step.step import Objective, cross_entropy
from train.watch.watch import WatchOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(
    CommandOptions, WatchdogOptions, WatchOptions, ValidationOptions, RouterOptions, OptimizerOptions, StepOptions,
    VisionOptions,
):  # fmt: skip
    """The options of every training script. `train.run.defaults` fills in values that are left to us (0, -1, auto)."""

    help_group: ClassVar[Group] = Group.RUN

    out: pathlib.Path | None = None
    """Folder of the run: checkpoints, metrics.jsonl, samples.jsonl, report.html, loss.png, exported model or adapter.
    None: runs/NAME, or runs/NAME-2 and so on if another run has that; the same command finds its own folder again."""
    seed: int = 0
    """Seed of the order of the data, and of random weights."""
    dry_run: bool = False
    """Print the data, three examples (text that is not learnt is dimmed), memory, mesh and disk, and train nothing."""
    chat: Chat = dataclasses.field(default_factory=Chat, metadata={"rare": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions(MTPOptions, Options):
    """Options of the scripts that learn to predict the next token."""

    help_group: ClassVar[Group] = Group.METHOD

    z_loss: float = option(0.0, rare=True)
    """Weight of log(Z)^2 in the loss, which keeps logits from growing; 1e-4 in PaLM. 0: without this term."""

    def objective(self) -> Objective:
        return functools.partial(cross_entropy, z_loss=self.z_loss, mtp_weight=self.mtp_weight)
