"""CPU seconds of every test file and every family: counted in each run, and compared with the budgets below.

This is a plugin of tests/conftest.py. CPU seconds, which include those of child processes, hardly depend on the
machine's load, unlike wall time. The operating system's share is left out, which grows where memory is short. Seconds
and budgets are those of the slower kind of machine: a CPU without AVX-512, with nothing compiled before. Elsewhere
what is counted is multiplied by `factor()`. A run fails if a file or a family takes ROOM times its budget. The tables
in tests/README.md are made by

    python -m tests.seconds                        # half an hour: all but the live comparisons
    python -m tests.seconds tests/zoo/test_new.py  # only the rows of some files
    python -m tests.seconds gemma4                 # only the rows of some families

which fails if a row exceeds its budget, or if all files of a tier together exceed the tier's.
"""

import collections
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import pytest


FILE, FAMILY = 100, 50  # CPU seconds
TIERS = {"default": 1000, "thorough": 6500}  # of all files together, without the start of pytest and its workers
ROOM = 3  # a run may take this multiple of them: busy machines, newer jaxlibs that compile half as fast
# The default tier of commit 0b3cf94 took 2,580 CPU seconds on two cores of an AMD EPYC without AVX-512, and 1,098 on a
# CPU with it.
SLOWER = 2.35
CPU = pathlib.Path("/proc/cpuinfo")
README = pathlib.Path(__file__).with_name("README.md")


class Seconds:
    """A sum of the CPU seconds of all tests' phases, whichever worker ran them."""

    def __init__(self):
        self.counted = collections.Counter()  # (file or family, tier) -> CPU seconds
        self.before = 0.0

    def pytest_runtest_logstart(self):
        self.before = _cpu()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        now = _cpu()
        # Attributes of a report travel with it from a worker to the process that adds up.
        report.cpu_seconds, self.before = now - self.before, now
        report.tier = tier(item)
        group = item.get_closest_marker("xdist_group")
        report.group = group.args[0] if group else item.location[0]
        return report

    def pytest_runtest_logreport(self, report):
        if not hasattr(report, "cpu_seconds"):
            return  # a worker died, and xdist made this report in its place
        file = report.nodeid.split("::")[0]
        for what in {file, report.group}:
            self.counted[what, report.tier] += report.cpu_seconds * factor()

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after flaky.py has decided
    def pytest_sessionfinish(self, session):
        result = yield
        if hasattr(session.config, "workerinput"):
            return result  # the process that started this worker adds up
        faults = overruns({what: seconds for (what, tier), seconds in self.counted.items() if tier == "default"})
        for fault in faults:
            session.config.get_terminal_writer().line(f"\n{fault}", red=True)
        if faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := session.config.getoption("--seconds", None):
            pathlib.Path(path).write_text("".join(f"{s:.1f} {t} {w}\n" for (w, t), s in self.counted.items()))
        return result


def tier(item: pytest.Item) -> str:
    return next((name for name in ("thorough", "live") if item.get_closest_marker(name)), "default")


@functools.cache
def factor() -> float:
    """Returns how many CPU seconds the slower kind of machine takes for one of this machine.

    Where Linux does not describe the CPU, the machine counts as a faster one.
    """
    return 1.0 if CPU.exists() and "avx512f" not in CPU.read_text() else SLOWER


def _cpu() -> float:
    """Returns the user's CPU seconds of this process, and of its children that have ended."""
    return os.times().user + os.times().children_user


def _is_file(what: str) -> bool:
    return what.endswith(".py")


def overruns(counted: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each file (a path) and each family (a name) that takes much more than its budget."""
    faults = []
    for what, seconds in counted.items():
        budget = FILE if _is_file(what) else FAMILY
        if seconds > ROOM * budget:
            faults.append(
                f"The tests of {what} took {seconds:.0f} CPU seconds, where {budget} are the budget "
                "(tests/seconds.py): compile less, or mark what must be long as thorough."
            )
    return faults


def faults(counted: Mapping[tuple[str, str], float]) -> list[str]:
    """Returns a sentence for each row of the tables that exceeds its budget, and for each tier that does."""
    found = []
    for what, seconds in sorted((what, s) for (what, tier), s in counted.items() if tier == "default"):
        if seconds > (budget := FILE if _is_file(what) else FAMILY):
            found.append(f"The tests of {what} take {seconds:.1f} CPU seconds, where {budget} are the budget.")
    for name, budget in TIERS.items():
        total = sum(s for (what, tier), s in counted.items() if tier == name and _is_file(what))
        if total > budget:
            found.append(f"The tests of the {name} tier take {total:.0f} CPU seconds, where {budget} are the budget.")
    return found


def table(counted: Mapping[tuple[str, str], float]) -> str:
    """Returns Markdown tables: a row for each file and each family, the longest first, with seconds by tier."""
    rows = []
    for kind, budget, belongs in (("file", FILE, _is_file), ("family", FAMILY, lambda what: not _is_file(what))):
        of = {tier: {what: s for (what, t), s in counted.items() if t == tier and belongs(what)} for tier in TIERS}
        whats = sorted(of["default"] | of["thorough"], key=lambda what: (-of["default"].get(what, 0), what))
        rows += [f"| {kind} | default, at most {budget} | thorough |", "|---|---|---|"]
        rows += [f"| {w} | {of['default'].get(w, 0):.1f} | {of['thorough'].get(w, 0):.1f} |" for w in whats]
        limits = f", at most {TIERS['default']} and {TIERS['thorough']}" if kind == "file" else ""
        rows += [f"| all{limits} | {sum(of['default'].values()):.0f} | {sum(of['thorough'].values()):.0f} |", ""]
    return "\n".join(rows)


def read(markdown: str) -> dict[tuple[str, str], float]:
    """Returns the tables' numbers: (file or family, tier) -> CPU seconds."""
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \|$", markdown, re.M)
    return {(w, tier): float(s) for w, *row in rows if w != "all" for tier, s in zip(TIERS, row, strict=True)}


def measure(*selected: str) -> dict[tuple[str, str], float]:
    """Runs the tests that pytest selects, with an empty XLA cache: (file or family, tier) -> CPU seconds."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "seconds"
        options = ["-q", "-n", "2", f"--seconds={path}"]
        options += ["--deselect", "tests/test_seconds.py::test_the_tables_are_whole_and_within_the_budget"]  # as yet
        for marks in ("not thorough and not live", "thorough and not live"):  # each as CI runs it
            command = [sys.executable, "-m", "pytest", *options, "-m", marks, *selected]
            status = subprocess.run(command, cwd=README.parents[1], env=os.environ | {"XDG_CACHE_HOME": folder})
            if status.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                sys.exit("No row was written, since a test failed.")
            for line in path.read_text().splitlines():
                seconds, tier, what = line.split()
                found[what, tier] = float(seconds)
    return found


def main() -> None:
    """Replaces the tables, or only the rows of some files and families. Fails if a budget is exceeded."""
    root, named, kept = README.parents[1], sys.argv[1:], {}
    if named:
        kept = {key: s for key, s in read(README.read_text()).items() if key[0] not in named}
        kept = {key: s for key, s in kept.items() if not _is_file(key[0]) or (root / key[0]).exists()}
    files = [name for name in named if _is_file(name) and (root / name).exists()]
    families = [name for name in named if not _is_file(name)]
    counted = {} if named else measure()
    if files:
        counted |= {key: s for key, s in measure(*files).items() if key[0] in files}
    if families:
        counted |= {key: s for key, s in measure(f"--families={','.join(families)}").items() if key[0] in families}
    before, rest = README.read_text().split("<!-- seconds -->\n")
    after = rest.split("<!-- end -->")[1]
    README.write_text(f"{before}<!-- seconds -->\n\n{table(kept | counted)}\n<!-- end -->{after}")
    if found := faults(kept | counted):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
