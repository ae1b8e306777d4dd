"""A launcher that runs a command in several processes, and again when one is lost. `train.launch` is the command."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from train.base.options import Group, OptionGroup
from train.base.preemption import FILE
from train.base.stop import AGAIN, CODES, handled
from train.watch.metrics import read_metrics


PORTS = 100  # number of a host's ports that are used in turn, since a lost process may still hold the last one
REFUSED = (1, 2)  # exit codes of a Python command that has printed what is wrong with its options or its input
GRACE = 3.0  # seconds that processes have to end by themselves after one was lost; their exit codes show which was lost


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions(OptionGroup):
    """Start a training command in several processes, and again after one is lost. The command follows after --."""

    help_group: ClassVar[Group] = Group.DEVICES

    processes: int = 1
    """Number of processes when no host is lost."""
    elastic: bool = False
    """Go on with fewer processes while hosts are lost. The rows of a step, the data and the schedule stay the same, as
    the command gets more --microbatches. The numbers of processes are divisors of --processes."""
    hosts: str | None = None
    """Command that prints the hosts that can be used now, one line for each process, such as "cat hosts". None: this
    machine, --processes times."""
    start: str = "{command}"
    """Command that starts a process on {host}, such as "ssh -o ServerAliveInterval=5 {host} 'cd /shared && {command}'"
    or "srun -N1 -n1 --overlap -w {host} {command}". {slot} is the host's number in the list, from 0; on one machine
    with several GPUs "env CUDA_VISIBLE_DEVICES={slot} {command}" gives one GPU to each process."""
    port: int = 9900
    """First of 100 ports, which the first host uses in turn to listen for the others. Without --hosts a free port is
    taken."""
    rest: float = 60.0
    """Seconds until a host is used again after a process on it was killed or the connection to it broke."""
    poll: float = 10.0
    """Seconds between checks for more hosts."""
    retries: int = 3
    """Number of times in a row that the command is started again without having come further."""


class Launcher:
    """The launcher: it runs `command` until it has ended well, or has failed too often.

    Args:
        say: is called with a line for each event.
    """

    def __init__(self, options: LaunchOptions, command: Sequence[str], say: Callable[[str], Any]):
        self.options, self.command, self.say = options, list(command), say
        self.out = out_of(command)
        self.away: dict[int, float] = {}  # slot -> the time from which it may be used again
        self.children: dict[int, subprocess.Popen] = {}  # slot -> its process
        self.signalled = 0

    def run(self) -> int:
        """Runs the command, and returns its exit code: 0, or that of a run that was stopped or has failed too often.

        A command that ends before its first step with an error of its options or input would fail again, and is not
        started again.
        """
        best, failures, attempt = self._step(), 0, 0
        while True:
            slots = self._slots()
            size = self._size(len(slots))
            if not size:
                time.sleep(min(self.options.poll, 1))
                if self.signalled:
                    return 128 + self.signalled
                continue
            attempt += 1
            code, lost = self._attempt(dict(list(slots.items())[:size]), attempt)
            if code == 0 or self.signalled:
                if lost is None:
                    continue  # the command has stopped, to go on with more processes
                interrupted = self.signalled == signal.SIGINT and code == AGAIN
                return CODES["SIGINT"] if interrupted else code
            self.away |= {slot: time.monotonic() + self.options.rest for slot in lost or ()}
            came, step = best, self._step()
            if code in REFUSED and not lost and step == 0:
                self.say(f"The command has ended before its first step (exit code {code}), and would again.")
                return code
            best, failures = max(best, step), 0 if step > came else failures + 1
            if failures > self.options.retries:
                self.say(f"The command has failed {failures} times in a row without coming further than step {best:,}.")
                return code
            told = "was interrupted" if code == AGAIN else "has failed"
            who = f"process {', '.join(map(str, lost))} was lost" if lost else "the command " + told
            self.say(f"{who[0].upper()}{who[1:]} (exit code {code}) near step {step:,}; starting again.")

    def _attempt(self, slots: dict[int, str], attempt: int) -> tuple[int, list[int] | None]:
        """Runs the command once. Returns its exit code, and the slots that were lost.

        Instead of the slots it returns None if the command was stopped because there are more hosts again.
        """
        self.out.joinpath(FILE).unlink(missing_ok=True)
        host = next(iter(slots.values()))
        address = f"{host}:{self.options.port + attempt % PORTS}" if self.options.hosts else f"localhost:{_free_port()}"
        self.say(f"Starting {len(slots)} of {self.options.processes} processes.")
        self.children = children = {
            slot: subprocess.Popen(self._call(slot, host, address, len(slots), n), start_new_session=True)
            for n, (slot, host) in enumerate(slots.items())
        }
        looked, asked = time.monotonic(), False
        try:
            with _forwarding(self, children.values()):
                while None in (codes := [child.poll() for child in children.values()]) and not any(codes):
                    time.sleep(0.1)
                    if time.monotonic() - looked > self.options.poll and not asked and not self.signalled:
                        looked = time.monotonic()
                        if asked := self._size(len(self._slots())) > len(slots):
                            self.say("There are more hosts again: stopping at the next step, to use them.")
                            self.ask()
                if not any(codes):
                    return 0, None if asked else []
                end = time.monotonic() + GRACE
                while time.monotonic() < end and None in [child.poll() for child in children.values()]:
                    time.sleep(0.1)
                ended = {slot: child.returncode for slot, child in children.items() if child.returncode}
        finally:
            for child in children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with the processes that it has started
            for child in children.values():
                child.wait()
        # Processes that are not lost abort or end with 1. The code 255 of ssh means that the connection broke.
        gone = (255, 128 + signal.SIGKILL, 128 + signal.SIGTERM)
        lost = [slot for slot, code in ended.items() if (code < 0 and code != -signal.SIGABRT) or code in gone]
        return next((code for slot, code in ended.items() if slot in lost), next(iter(ended.values()))), lost

    def ask(self) -> None:
        """Requests the command to save and end, on whichever hosts its processes run."""
        with contextlib.suppress(OSError):  # the command has not made its folder yet
            self.out.joinpath(FILE).touch()

    def _slots(self) -> dict[int, str]:
        """Returns slot -> host, for the hosts that can be used now."""
        hosts = ["localhost"] * self.options.processes
        if self.options.hosts:
            hosts = subprocess.run(self.options.hosts, shell=True, capture_output=True, text=True).stdout.split()
        self.away = {slot: until for slot, until in self.away.items() if until > time.monotonic()}
        waits = self.away if self.options.elastic else {}
        return {slot: host for slot, host in enumerate(hosts[: self.options.processes]) if slot not in waits}

    def _size(self, there: int) -> int:
        """Returns the number of processes to run on `there` hosts; 0: wait for more."""
        if not self.options.elastic:
            return self.options.processes if there >= self.options.processes else 0
        return max((n for n in range(1, there + 1) if self.options.processes % n == 0), default=0)

    def _call(self, slot: int, host: str, address: str, processes: int, process: int) -> list[str]:
        joins = {"JAX_COORDINATOR_ADDRESS": address, "NNODES": processes, "NODE_RANK": process}
        joins |= {"ZOO_FULL_PROCESSES": self.options.processes} if self.options.elastic else {}
        command = ["env", *(f"{name}={value}" for name, value in joins.items()), *self.command]
        fill = lambda word: (
            word.replace("{host}", host).replace("{slot}", str(slot)).replace("{command}", shlex.join(command))
        )
        words = shlex.split(self.options.start)
        return [part for word in words for part in (command if word == "{command}" else [fill(word)])]

    def _step(self) -> int:
        path = self.out / "metrics.jsonl"
        return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0


def out_of(command: Sequence[str]) -> pathlib.Path:
    """Returns the folder that a command names by --out.

    Raises:
        ValueError: the command has no --out.
    """
    for option, value in itertools.pairwise([*command, ""]):
        if option == "--out":
            return pathlib.Path(value)
        if option.startswith("--out="):
            return pathlib.Path(option.removeprefix("--out="))
    raise ValueError("Give the command an --out: its folder says how far it has come, and is where it is told to stop.")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def _forwarding(launcher: Launcher, children: Any) -> Iterator[None]:
    """Forwards signals to the processes, which then save and end, and are not started again."""

    def forward(number: int, _: Any) -> None:
        launcher.signalled = number
        launcher.ask()
        for child in children:
            child.send_signal(signal.SIGTERM)

    with handled(forward):
        yield
