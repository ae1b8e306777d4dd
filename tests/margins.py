"""Shows how far the tests' comparisons are from their bounds (tests/close.py): `python -m tests.margins`.

    python -m tests.margins                              # all files that compare, default and thorough tier
    python -m tests.margins tests/zoo/test_moe.py        # these files
    python -m tests.margins --only avx2 --each 3         # one environment, with three of the seeds
    python -m tests.margins --python /path/to/python     # and another interpreter, with another jax

It runs the tests with other seeds, and as other CPUs compute: ENVIRONMENTS. All 20 seeds in each would take days, so
the environments share them: each seed runs once, unless --each says how many seeds an environment gets. In such a
run `close` and `as_exact` keep each error as a fraction of its bound, and fail no test. Other failures, such as
another text, are ignored; comparisons that are then never reached are counted.

It prints a table, and exits with 1 if a run compared nothing, or if an error is more than a quarter of its bound
(QUARTER): another CPU might exceed that. Such a bound counts too few roundings, or its `size` is not that of the
operands; or the code is wrong.
"""

import argparse
import ast
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from tests import close


ROOT = pathlib.Path(__file__).parents[1]
SEEDS, QUARTER = 20, 0.25
FILE, SHIFT = "TESTS_MARGINS", "TESTS_MARGINS_SEED"  # of the environment of a run
FLAGS = "TESTS_XLA_FLAGS"  # tests/hurry.py appends it to XLA's flags
# Name -> what it changes in the environment of a run. In "one core", the process has only one.
ENVIRONMENTS = {
    "as it is": {},
    "one core": {FLAGS: "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"},
    "no ynnpack": {FLAGS: "--xla_cpu_experimental_ynn_fusion_type="},
    "sse4": {FLAGS: "--xla_cpu_max_isa=SSE4_2"},
    "avx2": {FLAGS: "--xla_cpu_max_isa=AVX2"},
    "onednn avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "optimised": {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
}
OTHER = "other python"
# Their seeds stay: golden numbers exist for what they make.
FIXED = (
    "tests/zoo/tiny/", "tests/zoo/seeing.py", "tests/zoo/conftest.py", "tests/zoo/test_heads.py",
    "tests/zoo/make_golden", "tests/train/make_golden_trl.py",
)  # fmt: skip


class Margin(NamedTuple):
    """A comparison in a run: its place, the test, and its error as a fraction of its bound."""

    file: str
    line: int
    test: str
    ratio: float
    where: str = ""  # the environment and the seed


class Row(NamedTuple):
    """A file's line of the table."""

    file: str
    places: int  # lines that compare
    missed: int  # those of them that no run reached
    compared: int
    worst: Margin | None


# As a plugin of pytest: tests/conftest.py imports it, and it does nothing unless FILE is set.


def pytest_configure():
    if path := os.environ.get(FILE):
        shift_seeds(int(os.environ.get(SHIFT, "0")))
        close.record = lambda file, line, ratio: _append(
            path, file=os.path.relpath(file, ROOT), line=line, test=_running(), ratio=ratio
        )


def pytest_runtest_logreport(report):
    if report.failed and (path := os.environ.get(FILE)):
        _append(path, failed=report.nodeid)


def _running() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]


def _append(path: str, **entry):
    with open(path, "a") as file:  # in one write, so workers may share the file
        file.write(json.dumps(entry) + "\n")


def shift_seeds(by: int) -> None:
    """Adds a number to the seeds that tests give to NumPy and JAX, except those of FIXED and of the library."""

    def moved(seed):
        shifts = isinstance(seed, int | np.integer) and _shifts(sys._getframe(2).f_code.co_filename)
        return seed + by if shifts else seed

    def wrapped(make):
        return lambda seed=None, *args, **options: make(moved(seed), *args, **options)

    class RandomState(np.random.RandomState):  # a type, because NumPy asks for instances of it
        def __init__(self, seed=None):
            super().__init__(moved(seed))

    if by:
        np.random.RandomState, np.random.default_rng = RandomState, wrapped(np.random.default_rng)
        jax.random.key, jax.random.PRNGKey = map(wrapped, (jax.random.key, jax.random.PRNGKey))


def _shifts(file: str) -> bool:
    file = os.path.relpath(file, ROOT)
    return file.startswith("tests/") and not file.startswith(FIXED)


# As a script.


def places_of(file: str) -> list[range]:
    """Returns the lines of each call of `close` or `as_exact` in a file."""
    calls = (node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Call))
    names = ("close", "as_exact")
    return [range(c.lineno, c.end_lineno + 1) for c in calls if isinstance(c.func, ast.Name) and c.func.id in names]


def comparing_files() -> list[str]:
    """Returns the test files that import this comparison."""
    files = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    found = re.compile(r"^from tests\.close import ", re.MULTILINE)
    return [file for file in files if file != "tests/test_close.py" and found.search((ROOT / file).read_text())]


def seeds_of(environments: Iterable[str], each: int | None) -> Iterator[tuple[str, int]]:
    """Yields the environment and the seed of each run. Seed 0 is the tests' own, and is in the first environment."""
    environments = list(environments)
    for n, name in enumerate(environments):
        if each is None:
            yield from ((name, seed) for seed in range(n, SEEDS, len(environments)))
        else:
            yield from ((name, (n * each + k) % SEEDS) for k in range(each))


def run(files: Iterable[str], name: str, seed: int, python: str, marks: str) -> tuple[list[Margin], set[str]]:
    """Runs the tests of files once, and returns what they compared, and the tests that failed otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "margins.jsonl")
        out.touch()
        environment = os.environ | ENVIRONMENTS.get(name, {}) | {FILE: str(out), SHIFT: str(1000 * seed)}
        one = (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})) if name == "one core" else None
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-m", marks, "--tb=no", "--continue-on-collection-errors", *files],
            cwd=ROOT, env=environment, preexec_fn=one, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1, 5):
            print(
                f"{name}, seed {seed}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    where = f"{name}, seed {seed}"
    return [Margin(**line, where=where) for line in lines if "ratio" in line], {
        line["failed"] for line in lines if "failed" in line
    }


def rows(files: Iterable[str], margins: Iterable[Margin]) -> list[Row]:
    by_file = collections.defaultdict(list)
    for margin in margins:
        by_file[margin.file].append(margin)
    made = []
    for file in sorted({*files, *by_file}):
        found, places = by_file[file], places_of(file)
        reached = {margin.line for margin in found}
        missed = sum(not reached & {*place} for place in places)
        made.append(Row(file, len(places), missed, len(found), max(found, key=lambda m: m.ratio, default=None)))
    return made


def table(rows: Iterable[Row], tight: Iterable[Margin], failed: Mapping[str, int]) -> str:
    """Returns Markdown: a row for each file, the comparisons that are tight, and the tests that failed otherwise."""
    out = ["| file | comparisons | lines | never reached | largest error / bound | where | test |", "|" + "---|" * 7]
    for row in sorted(rows, key=lambda row: -row.worst.ratio if row.worst else 0):
        cells = [row.file, row.compared, row.places, row.missed]
        if row.worst:
            cells += [f"{row.worst.ratio:.3f}", row.worst.where, f"line {row.worst.line}, {_name(row.worst.test)}"]
        out.append("| " + " | ".join(map(str, cells)) + " |")
    if tight := sorted(tight, key=lambda margin: -margin.ratio):
        out += ["", f"Above {QUARTER} of their bounds:", ""]
        out += [f"- {m.file}:{m.line}: {m.ratio:.3f} in {_name(m.test)} ({m.where})" for m in tight]
    if failed:
        out += ["", "Failed in another way, in so many runs:", ""]
        out += [f"- {test}: {runs}" for test, runs in sorted(failed.items())]
    return "\n".join(out) + "\n"


def _name(test: str) -> str:
    return test.split("::", 1)[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files or tests, by default all files that compare")
    parser.add_argument("--each", type=int, metavar="N", help="seeds for each environment, instead of a share of 20")
    parser.add_argument("--only", action="append", choices=[*ENVIRONMENTS, OTHER], help="run only this environment")
    parser.add_argument("--python", help=f"another interpreter, for the environment {OTHER!r}")
    parser.add_argument("-m", default="not live", dest="marks", metavar="MARKS", help="by default: not live")
    parser.add_argument("--out", type=pathlib.Path, help="write the table to this file, too")
    options = parser.parse_args()
    chosen = options.only or [*ENVIRONMENTS, *([OTHER] if options.python else [])]
    files = options.files or comparing_files()
    margins, failed, empty = [], collections.Counter(), False
    for name, seed in seeds_of(chosen, options.each):
        found, failures = run(files, name, seed, options.python if name == OTHER else sys.executable, options.marks)
        print(f"{name}, seed {seed}: {len(found)} comparisons, {len(failures)} other failures", flush=True)
        margins += found
        empty |= not found
        failed.update(failures)
    worst = {(margin.file, margin.line): margin for margin in sorted(margins, key=lambda margin: margin.ratio)}
    tight = [margin for margin in worst.values() if margin.ratio > QUARTER]
    text = table(rows({file.split("::")[0] for file in files}, margins), tight, failed)
    print(text)
    if options.out:
        options.out.write_text(text)
    return 1 if tight or empty else 0


if __name__ == "__main__":
    raise SystemExit(main())
