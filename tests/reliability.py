"""Measures what docs/reliability.md promises of runs that are killed: `python -m tests.reliability --tier N`.

Each trial trains the embedded model in real processes, joined by gloo, under `train.launch`, and compares every loss
with that of a calm run. Tier P is short, N as long as a night allows, R for a release.
"""

import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import threading
import time
from typing import Any, Literal

import tyro

import train.tiny
from tests import hurry
from train import launch
from train.metrics import read_metrics


KILLS = {"P": 2, "N": 20, "R": 100}
ROOT = pathlib.Path(__file__).parents[1]


def storm(
    folder: pathlib.Path,
    *,
    kills: int,
    steps: int,
    processes: int = 2,
    elastic: bool = True,
    rest: float = 4.0,
    calm: dict[int, float] | None = None,
) -> dict[str, Any]:
    """Trains under the launcher, kills a random process so many times, and compares with a run that nobody disturbs.

    With `elastic` a host rests for so many seconds after its process was killed, and the next kill waits until all are
    back. `calm` is step -> loss of the undisturbed run, if there is one already.
    """
    calm = calm or _train(folder / "calm", steps, processes, elastic=False)[0]
    stormy, seen = _train(folder / "stormy", steps, processes, elastic=elastic, kills=kills, rest=rest)
    differ = [abs(stormy[step] - calm[step]) / calm[step] for step in calm]
    return {
        "kills": len(seen["back"]),
        "sizes": seen["sizes"],
        "steps": steps,
        "seconds from a kill to the next new step, at most": round(max(seen["back"], default=0.0), 1),
        "steps whose loss has other bits": sum(d > 0 for d in differ),
        "largest difference of a loss": max(differ),
    }


def arguments(out: pathlib.Path, steps: int) -> list[str]:
    """A command line of train.pretrain, which saves at every step."""
    numbers = {"model": "tiny", "data": train.tiny.INSTRUCTIONS, "out": out, "steps": steps, "save-every": 1}
    numbers |= {"eval-every": steps, "sample-every": steps, "eval-batches": 1, "sample-tokens": 1}
    numbers |= {"seq-len": 32, "batch": 8, "lr": 1e-3}
    return [f"--{name}={value}" for name, value in numbers.items()]


def losses(out: pathlib.Path) -> dict[int, float]:
    """Step -> loss."""
    return {line["step"]: line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line}


def _train(
    out: pathlib.Path, steps: int, processes: int, *, elastic: bool, kills: int = 0, rest: float = 4.0
) -> tuple[dict[int, float], dict[str, list]]:
    """Returns step -> loss, and the numbers of processes of each start with the seconds that each kill cost."""
    command = [sys.executable, "-m", "train.pretrain", *arguments(out, steps)]
    o = launch.LaunchOptions(
        processes=processes, elastic=elastic, rest=rest, poll=0.5, start=f"{_environment()} {{command}}"
    )
    seen: dict[str, list] = {"sizes": [], "back": []}
    heard = lambda text: text.startswith("Starting") and seen["sizes"].append(int(text.split()[1]))
    launcher, ended = launch.Launcher(o, command, heard), threading.Event()

    def kill() -> None:
        choose = random.Random(0)
        while len(seen["back"]) < kills:
            come = _last(out)
            while _last(out) <= come or len(launcher.children) < processes:  # new steps, by all processes
                if ended.wait(0.05):
                    return
            ended.wait(choose.uniform(0, 0.5))
            victim = choose.choice(list(launcher.children.values()))
            come, at = _last(out), time.monotonic()
            victim.kill()
            while _last(out) <= come:
                if ended.wait(0.05):
                    return
            seen["back"].append(time.monotonic() - at)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        code = launcher.run()
    finally:
        ended.set()
        thread.join()
    assert code == 0, f"{out} has not been finished: exit code {code}"
    return losses(out), seen


def _environment() -> str:
    changed = {
        name: value for name, value in hurry.environment().items() if name.startswith(("JAX_", "XLA_", "COLUMNS"))
    }
    return "env " + " ".join(f"'{name}={value}'" for name, value in changed.items() if value)


def _last(out: pathlib.Path) -> int:
    """The last step that a run has written, whatever else it is writing."""
    try:
        lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
        return json.loads(lines[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


@dataclasses.dataclass
class Arguments:
    tier: Literal["P", "N", "R"] = "P"
    """P: 2 kills a trial. N: 20. R: 100."""


if __name__ == "__main__":
    kills = KILLS[tyro.cli(Arguments).tier]
    for name, options in {"as many processes again": dict(elastic=False), "elastic": dict(elastic=True)}.items():
        with tempfile.TemporaryDirectory() as folder:
            found = storm(pathlib.Path(folder), kills=kills, steps=12 * kills + 10, **options)
        print(json.dumps({"trial": name} | found), flush=True)
