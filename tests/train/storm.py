"""Training of the embedded model in real processes, joined by gloo, under `train.launch`, while faults are injected."""

import contextlib
import json
import pathlib
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import train.tiny
from tests import hurry
from train.run import launcher as launch
from train.watch.metrics import read_metrics


FAULTS = ("kill", "hang", "terminate", "damage")
SIGNALS = {"hang": signal.SIGSTOP, "terminate": signal.SIGTERM}


def storm(
    folder: pathlib.Path,
    *,
    kills: int,
    steps: int,
    processes: int = 2,
    elastic: bool = True,
    rest: float = 4.0,
    calm: dict[int, float] | None = None,
    faults: Sequence[str] = FAULTS[:1],
) -> dict[str, Any]:
    """Trains under the launcher, kills a random process `kills` times, and compares the run with an undisturbed one.

    With `elastic` a host rests for `rest` seconds after its process was killed, and the next kill waits until all are
    back. `calm` is step -> loss of the undisturbed run, if it already exists. Each fault is a random one of `faults`.
    """
    calm = calm or _train(folder / "calm", steps, processes, elastic=False)[0]
    stormy, seen = _train(folder / "stormy", steps, processes, elastic=elastic, kills=kills, rest=rest, faults=faults)
    differ = [abs(stormy[step] - calm[step]) / calm[step] for step in calm]
    return {
        "kills": len(seen["back"]),
        "sizes": seen["sizes"],
        "steps": steps,
        "seconds": max(seen["back"], default=0.0),  # from a kill to the next new step, at most
        "differ": sum(d > 0 for d in differ),  # number of steps whose loss has other bits
        "largest": max(differ),  # relative difference of a loss
    }


def told(found: dict[str, Any]) -> str:
    """Returns a storm's result in a few words."""
    return (
        f"{found['kills']} of {found['kills']} survived, at most {found['seconds']:.0f} s each; "
        f"{found['differ']} of {found['steps']} losses differ, by {found['largest']:.1e}"
    )


def arguments(out: pathlib.Path, steps: int) -> list[str]:
    """Returns a command line of train.pretrain that saves at every step."""
    numbers = {"model": "tiny", "data": train.tiny.INSTRUCTIONS, "out": out, "steps": steps, "save-every": 1}
    numbers |= {"eval-every": steps, "sample-every": steps}
    numbers |= {"seq-len": 32, "batch": 8, "lr": 1e-3}
    return [f"--{name}={value}" for name, value in numbers.items()]


def losses(out: pathlib.Path) -> dict[int, float]:
    """Returns step -> loss."""
    return {line["step"]: line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line}


def _train(
    out: pathlib.Path,
    steps: int,
    processes: int,
    *,
    elastic: bool,
    kills: int = 0,
    rest: float = 4.0,
    faults: Sequence[str] = (),
) -> tuple[dict[int, float], dict[str, list]]:
    """Returns step -> loss, the number of processes of each start, and the seconds that each kill cost."""
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
            victim, fault = choose.choice(list(launcher.children.values())), choose.choice(faults)
            if fault == "damage":
                _damage(out, choose)
            come, at = _last(out), time.monotonic()
            victim.send_signal(SIGNALS.get(fault, signal.SIGKILL))
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


def _damage(out: pathlib.Path, choose: random.Random) -> None:
    """Flips a bit of the newest checkpoint."""
    with contextlib.suppress(OSError, ValueError):  # it may just be making room for the next one
        newest = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
        files = (out / "checkpoints" / str(newest)).rglob("*")
        file = choose.choice(sorted(path for path in files if path.is_file() and path.stat().st_size))
        content = bytearray(file.read_bytes())
        content[choose.randrange(len(content))] ^= 1
        file.write_bytes(content)


def _environment() -> str:
    changed = {
        name: value for name, value in hurry.environment().items() if name.startswith(("JAX_", "XLA_", "COLUMNS"))
    }
    return "env " + " ".join(f"'{name}={value}'" for name, value in changed.items() if value)


def _last(out: pathlib.Path) -> int:
    """Returns the last step that a run has written, even while it is writing."""
    try:
        lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
        return json.loads(lines[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0
