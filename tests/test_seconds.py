"""Each run counts CPU seconds and compares them with the budget; so does the table in tests/README.md."""

import pathlib
import subprocess
import sys

import pytest

from tests import seconds
from tests.zoo import tiny


pytest_plugins = ["pytester"]
ROOT = pathlib.Path(__file__).parents[1]
NOW = [0]  # the CPU seconds that the clock shows


def test_overruns_are_named():
    within = {"tests/a.py": 3 * seconds.FILE, "llama": 3 * seconds.FAMILY}
    assert seconds.overruns(within) == []
    (file,) = seconds.overruns(within | {"tests/b.py": 3 * seconds.FILE + 1})
    (family,) = seconds.overruns(within | {"gemma": 3 * seconds.FAMILY + 1})
    assert f"tests/b.py took {3 * seconds.FILE + 1} CPU seconds, where {seconds.FILE} are" in file
    assert f"gemma took {3 * seconds.FAMILY + 1} CPU seconds, where {seconds.FAMILY} are" in family


def test_a_run_counts_each_test_and_fails_beyond_the_budget(pytester, monkeypatch):
    """Seconds of the slower kind of machine are counted by file and by family, on a clock that the tests set."""
    pytester.makepyfile(
        test_x="""
        import pytest
        from tests import test_seconds

        def test_of_a_file():
            test_seconds.NOW[0] += 3

        @pytest.mark.xdist_group("llama")
        def test_of_a_family():
            test_seconds.NOW[0] += 4

        @pytest.mark.thorough
        def test_slow():
            test_seconds.NOW[0] += 5
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n    thorough\n    xdist_group(name)")
    monkeypatch.setattr(seconds, "_cpu", lambda: NOW[0])
    monkeypatch.setattr(seconds, "factor", lambda: 2)
    plugin = seconds.Seconds()
    assert pytester.inline_run(plugins=[plugin]).ret == pytest.ExitCode.OK
    assert plugin.counted == {("test_x.py", "default"): 14, ("llama", "default"): 8, ("test_x.py", "thorough"): 10}
    monkeypatch.setattr(seconds, "FAMILY", 1)
    assert pytester.inline_run(plugins=[seconds.Seconds()]).ret == pytest.ExitCode.TESTS_FAILED


def test_child_processes_count():
    before = seconds._cpu()
    subprocess.run([sys.executable, "-c", "import os\nwhile os.times().user < 0.3: pass"], check=True)
    assert seconds._cpu() - before > 0.25


def test_rows_and_sums_of_the_tables_have_budgets():
    within = {(f"tests/{n}.py", "default"): seconds.FILE for n in range(3)} | {("llama", "default"): seconds.FAMILY}
    assert seconds.faults(within) == []
    (file,) = seconds.faults(within | {("tests/b.py", "default"): seconds.FILE + 0.2})
    (family,) = seconds.faults(within | {("gemma", "default"): seconds.FAMILY + 0.2})
    many = {(f"tests/{n}.py", "default"): 1.0 for n in range(seconds.TIERS["default"] + 1)}
    (tier,) = seconds.faults(many | {("tests/0.py", "thorough"): seconds.TIERS["thorough"]})
    assert "tests/b.py" in file and "gemma" in family and "the default tier" in tier
    assert "the thorough tier" in seconds.faults({("tests/a.py", "thorough"): seconds.TIERS["thorough"] + 1.0})[0]


def test_the_tables_are_whole_and_within_the_budget():
    """The tables have a row for each file and family. `python -m tests.seconds FILE` adds a new file's row, or removes
    a deleted file's.
    """
    counted = seconds.read((ROOT / "tests" / "README.md").read_text())
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {what for what, _ in counted} == files | set(tiny.MODULES)
    assert seconds.faults(counted) == []


def test_tables_are_read_as_written():
    counted = {("tests/a.py", "default"): 1.5, ("tests/a.py", "thorough"): 0.0, ("llama", "default"): 2.0}
    assert seconds.read(seconds.table(counted)) == counted | {("llama", "thorough"): 0.0}
