"""The budget of CPU seconds is counted, and held: by each run, and by the table in tests/README.md."""

import pathlib

import pytest

from tests import seconds
from tests.zoo import tiny


pytest_plugins = ["pytester"]
ROOT = pathlib.Path(__file__).parents[1]


def test_overruns_are_named():
    within = {"tests/a.py": 3 * seconds.FILE, "llama": 3 * seconds.FAMILY}
    assert seconds.overruns(within) == []
    (file,) = seconds.overruns(within | {"tests/b.py": 3 * seconds.FILE + 1})
    (family,) = seconds.overruns(within | {"gemma": 3 * seconds.FAMILY + 1})
    assert "tests/b.py took 166 CPU seconds, where 55" in file and "gemma took 61 CPU seconds, where 20" in family


def test_a_run_counts_each_test_and_fails_beyond_the_budget(pytester, monkeypatch):
    """By its file and its family, with what a child process takes."""
    pytester.makepyfile(
        test_x="""
        import subprocess, sys, time
        import pytest

        BURN = "import time\\nwhile time.process_time() < 0.5: pass"

        def test_in_a_child():
            subprocess.run([sys.executable, "-c", BURN])

        @pytest.mark.xdist_group("llama")
        def test_of_a_family():
            end = time.process_time() + 0.5
            while time.process_time() < end:
                pass

        @pytest.mark.slow
        def test_slow():
            pass
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    xdist_group(name)")
    plugin = seconds.Seconds()
    assert pytester.inline_run(plugins=[plugin]).ret == pytest.ExitCode.OK
    assert plugin.counted["test_x.py", "default"] > 0.9 > plugin.counted["llama", "default"] > 0.4
    assert plugin.counted["test_x.py", "slow"] < 0.3
    monkeypatch.setattr(seconds, "FAMILY", 0.1)
    assert pytester.inline_run(plugins=[seconds.Seconds()]).ret == pytest.ExitCode.TESTS_FAILED


def test_the_tables_are_whole_and_within_the_budget():
    """Where this fails for a new file, `python -m tests.seconds FILE` adds its row."""
    counted = seconds.read((ROOT / "tests" / "README.md").read_text())
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {what for what, _ in counted} == files | set(tiny.MODULES)
    budgets = dict.fromkeys(files, seconds.FILE) | dict.fromkeys(tiny.MODULES, seconds.FAMILY)
    assert [what for (what, tier), s in counted.items() if tier == "default" and s > budgets[what]] == []


def test_tables_are_read_as_written():
    counted = {("tests/a.py", "default"): 1.5, ("tests/a.py", "slow"): 0.0, ("llama", "default"): 2.0}
    assert seconds.read(seconds.table(counted)) == counted | {("llama", "slow"): 0.0}
