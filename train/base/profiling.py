"""A profile of steps: --profile 10:13 records some, and sums up their kernels."""

import collections
import dataclasses
import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import ClassVar

import jax
import rich

from train.base.options import Group, OptionGroup, option


TOP = 30  # kernels in the summary


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileOptions(OptionGroup):
    """Options for profiling."""

    help_group: ClassVar[Group] = Group.WATCHING

    profile: str | None = option(None, rare=True, identity=False)
    """Steps to record, the first and the last, such as 10:13. The folder of the run gets profile/, which xprof and
    Perfetto read, and profile/summary.txt: the time of each kernel or XLA operation."""
    retired: ClassVar[Mapping[str, str]] = {
        "dump-hlo": "XLA_FLAGS=--xla_dump_to=FOLDER writes the programs of all that is compiled."
    }


class Profile:
    """A recorder of the steps of --profile, into the folder `out`. Only process 0 records.

    Raises:
        ValueError: --profile names no steps.
    """

    def __init__(self, options: ProfileOptions, out: pathlib.Path):
        self.out, self.steps, self.on = out / "profile", range(0), False
        if options.profile is not None:
            if not (match := re.fullmatch(r"(\d+):(\d+)", options.profile)) or not 0 < int(match[1]) <= int(match[2]):
                raise ValueError(f"--profile {options.profile}: give the first and the last step, such as 10:13.")
            self.steps = range(int(match[1]), int(match[2]) + 1)

    def begin(self, n: int) -> None:
        """Starts before the first of the steps, or at one of them if the run goes on there."""
        if n in self.steps and not self.on and jax.process_index() == 0:
            jax.profiler.start_trace(self.out)
            self.on, self.begun = True, n

    def end(self, n: int) -> None:
        """Stops after the last of the steps, or after step `n` if the run ends there."""
        if not self.on:
            return
        jax.profiler.stop_trace()
        self.on, self.steps = False, range(0)
        newest = max(self.out.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        text = summary(newest, n - self.begun + 1)
        (self.out / "summary.txt").write_text(text)
        rich.print(f"Steps {self.begun:,} to {n:,} are in {newest.parent}, their kernels in {self.out}/summary.txt:")
        print("\n".join(text.splitlines()[:8]))

    def done(self, n: int) -> None:
        if self.on and n == self.steps[-1]:
            self.end(n)


def summary(path: pathlib.Path, steps: int) -> str:
    """Returns a table of the kernels in an xprof trace, sorted by time, in milliseconds a step and device."""
    found = kernels(path)
    total = sum(seconds for _, seconds in found.values()) or 1.0
    lines = [f"{'ms a step':>12} {'share':>7} {'calls':>8}  kernel or operation"]
    for name, (calls, seconds) in sorted(found.items(), key=lambda each: -each[1][1])[:TOP]:
        lines.append(f"{1e3 * seconds / steps:12.3f} {seconds / total:7.1%} {calls / steps:8.1f}  {name}")
    if len(found) > TOP:
        lines.append(f"{'':>30}  and {len(found) - TOP} more")
    lines.append(f"{1e3 * total / steps:12.3f} {1:7.1%} {'':>8}  all of a device's, added up")
    return "\n".join(lines) + "\n"


def kernels(path: pathlib.Path) -> dict[str, tuple[float, float]]:
    """Reads an xprof trace. Returns the name of a kernel (on a CPU or TPU, of an XLA operation) -> calls and seconds.

    Calls and seconds are those of one device. Copies of one operation (`fusion.3`, `fusion.7`) stay apart, as each has
    its own place in the program that XLA_FLAGS=--xla_dump_to writes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by the bindings in Python 3.12
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        devices = [plane for plane in planes if re.match(r"/device:(GPU|TPU):\d+$", plane.name)]
        found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for plane in devices or [plane for plane in planes if plane.name == "/host:CPU"]:
            for line in plane.lines:
                if not _is_of_kernels(plane.name, line.name):
                    continue
                for event in line.events:
                    if devices or any(key == "hlo_op" for key, _ in event.stats):
                        found[event.name][0] += 1
                        found[event.name][1] += event.duration_ns / 1e9
    share = max(1, len(devices))
    return {name: (calls / share, seconds / share) for name, (calls, seconds) in found.items()}


def _is_of_kernels(plane: str, line: str) -> bool:
    """Whether a line of a trace lists each kernel once. Other lines list whole programs, steps, or names of scopes."""
    if "GPU" in plane:
        return line.startswith("Stream")
    return line == "XLA Ops" if "TPU" in plane else line.startswith("tf_XLA")
