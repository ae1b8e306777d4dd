"""The options that all training scripts share: groups, each declared beside the code that obeys it."""

import abc
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from train.base.command import CommandOptions
from train.base.options import Flat, Group, option
from train.base.profiling import ProfileOptions
from train.base.source import SourceOptions
from train.data.packing import Chat
from train.data.sets import Phase, Reading
from train.evaluate.validation import BATCHES, ValidationOptions
from train.run.offending import OffendingOptions
from train.state.checkpoint import CheckpointOptions
from train.state.optim import OptimizerOptions
from train.state.remat import StepOptions
from train.state.state import StateOptions
from train.step.router import RouterOptions
from train.watch.watch import WatchOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions, abc.ABC):
    """The options of every training script. `train.run.defaults` fills in values that are left to us (0, -1, auto)."""

    help_group: ClassVar[Group] = Group.RUN

    vision: bool = option(False, group=Group.DATA)
    """Train on chats with images: the model's vision tower is loaded, too. The tower is trained like the rest, unless
    --freeze 'vision.*' freezes it."""
    freeze: tuple[str, ...] = option((), group=Group.MODEL, rare=True)
    """Patterns of the paths of weights that are not trained, such as vision.* for a vision tower, or embed_tokens.* and
    *norm*. These weights need no gradients, and no memory of the optimizer. Layers of one kind have one path, and so
    are frozen together."""
    source: Flat[SourceOptions] = SourceOptions()
    optim: Flat[OptimizerOptions] = OptimizerOptions()
    step: Flat[StepOptions] = StepOptions()
    state: Flat[StateOptions] = StateOptions()
    router: Flat[RouterOptions] = RouterOptions()
    validation: Flat[ValidationOptions] = ValidationOptions()
    watch: Flat[WatchOptions] = WatchOptions()
    profiling: Flat[ProfileOptions] = ProfileOptions()
    checkpoints: Flat[CheckpointOptions] = CheckpointOptions()
    offending: Flat[OffendingOptions] = OffendingOptions()
    out: pathlib.Path | None = option(None, identity=False)
    """Folder of the run: checkpoints, metrics.jsonl, samples.jsonl, report.html, loss.png, exported model or adapter.
    None: runs/NAME, or runs/NAME-2 and so on if another run has that; the same command finds its own folder again."""
    seed: int = 0
    """Seed of the order of the data, and of random weights."""
    dry_run: bool = option(False, identity=False)
    """Print the data, three examples (text that is not learnt is dimmed), memory, mesh and disk, and train nothing."""
    chat: Chat = option(Chat(), rare=True)
    retired: ClassVar[Mapping[str, str]] = {
        "local-checkpoints": "set the environment variable ZOO_LOCAL_CHECKPOINTS (docs/reliability.md).",
        "save-local-every": "local checkpoints are saved every 20 steps.",
        "step-timeout": "set the environment variable ZOO_STEP_TIMEOUT, in seconds (docs/faults.md).",
        "program": "JAX_COMPILATION_CACHE_DIR keeps compiled steps for later starts (docs/clusters.md).",
    }

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[str, ...]:
        """Names the optional parts of the model that the options request, see `zoo.load`."""

    def refuse_vision(self, why: str) -> None:
        """Raises a ValueError if --vision is given. `why` is the reason why the script does not support it."""
        if self.vision:
            raise ValueError(f"--vision: {why}; leave it out, or train on images by train.sft.")

    def reading(self, epochs: int = 0) -> Reading:
        """Returns how the run reads its data."""
        return Reading(epochs, self.seed, BATCHES * self.step.batch, self.dry_run)

    def phase(self, data: Sequence[str], weights: Sequence[float]) -> Phase:
        """Returns the whole run as one phase."""
        return Phase(self.optim.steps, tuple(data), tuple(weights), self.step.seq_len, self.step.batch)
