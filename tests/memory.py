"""The memory of the processes that run tests: it is freed between files, and each run prints the most that was used.

Compiled programs would take nearly all of it, some 5 MB each with what JAX keeps of how they were traced. They also lie
in some 30 memory maps each, of which Linux gives a process 65,530 in all. A run fails if a process takes more than its
tier's LIMITS. If one is killed, the run says how much it had used, and whether the kernel is known to have done it.
"""

import contextlib
import ctypes
import gc
import pathlib
import re
import signal
import subprocess

import pytest

from tests import hurry
from tests.seconds import tier


MB = 1 << 20
LIMITS = {"default": 2000 * MB, "thorough": 3000 * MB, "live": 3000 * MB}  # the most that a process may take
SHARE = 6  # programs are removed after a file if a process has grown by 1/6 of its limit, and after a test if by twice
STATUS, MACHINE = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/meminfo")
# Where the kernel counts the processes that it killed for lack of memory: in a container, and elsewhere.
KILLS = (pathlib.Path("/sys/fs/cgroup/memory.events"), pathlib.Path("/proc/vmstat"))


class Memory:
    """Frees memory between files, and collects the most that each process has used."""

    def __init__(self):
        self.peaks, self.limit, self.deaths = {}, 0, []  # the peaks by worker, in bytes
        self.kills, self.freed = kills(), 0

    def pytest_collection_finish(self):
        self.freed = read(STATUS, "VmRSS")  # what the process has without programs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        result = yield
        same = nextitem is not None and nextitem.path == item.path  # file, whose tests share programs
        if read(STATUS, "VmRSS") - self.freed > LIMITS[tier(item)] // SHARE * (2 if same else 1):
            free()
            self.freed = read(STATUS, "VmRSS")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        # Attributes of a report travel with it from a worker to the process that prints.
        report.peak, report.limit = read(STATUS, "VmHWM"), LIMITS[tier(item)]
        return report

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "peak"):  # else a worker died, and xdist made this report in its place
            worker = report.node.gateway.id if hasattr(report, "node") else "the process"
            self.peaks[worker], self.limit = report.peak, max(self.limit, report.limit)

    @pytest.hookimpl(optionalhook=True)  # where xdist is not installed
    def pytest_testnodedown(self, node, error):
        if error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a worker that only closed its pipe
                code = node.gateway._io.popen.wait(10)
                self.deaths.append(
                    death(node.gateway.id, code, self.peaks.get(node.gateway.id, 0), kills() - self.kills)
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after flaky.py has decided
    def pytest_sessionfinish(self, session):
        result = yield
        if hasattr(session.config, "workerinput"):
            return result  # the process that started this worker prints
        writer = session.config.get_terminal_writer()
        if any(self.peaks.values()):
            writer.line("\nPeak memory: " + ", ".join(f"{w} {peak // MB} MB" for w, peak in sorted(self.peaks.items())))
        faults = overruns(self.peaks, self.limit) if hurry.HURRY else []
        for sentence in (*self.deaths, *faults):
            writer.line(f"\n{sentence}", red=True)
        if faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result


def read(path: pathlib.Path, name: str) -> int:
    """Returns a number of bytes from a file of /proc, and 0 where the system has no such file."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", path.read_text(), re.M) if path.exists() else None
    return int(found[1]) << 10 if found else 0


def free() -> None:
    """Removes all compiled programs, and gives their memory back to the system. Later calls find them in the cache
    folder.
    """
    import jax  # must not start before conftest.py has set the variables that it reads

    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc keeps memory that could be given back
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory, or 0 if it does not tell."""
    text = next((path.read_text() for path in KILLS if path.exists()), "")
    found = re.search(r"^oom_kill (\d+)$", text, re.M)
    return int(found[1]) if found else 0


def death(worker: str, code: int, peak: int, killed: int) -> str:
    """Returns a sentence on a worker that ended with this exit code, after the kernel had killed so many processes."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    memory = f"with {peak // MB} MB, on a machine of {read(MACHINE, 'MemTotal') // MB} MB"
    if killed:
        return f"Worker {worker} {how} {memory}: the kernel has killed {killed} processes for lack of memory meanwhile."
    if code == -signal.SIGKILL:
        return f"Worker {worker} {how} {memory}: probably for lack of memory, so run fewer workers."
    return f"Worker {worker} {how} {memory}."


def overruns(peaks: dict[str, int], limit: int) -> list[str]:
    """Returns a sentence for each process that has used more memory than it may."""
    return [
        f"The tests of {worker} took {peak // MB} MB of memory, where {limit // MB} are the limit (tests/memory.py): "
        "compile smaller programs, or put them into another file, after which memory is freed."
        for worker, peak in sorted(peaks.items())
        if peak > limit
    ]
