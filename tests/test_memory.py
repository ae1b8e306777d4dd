"""Memory is freed between files. A run prints what each process used, and fails beyond the limit; a killed worker is
told with its reason.
"""

import pathlib
import signal

import pytest

from tests import memory
from tests.memory import MB, Memory


pytest_plugins = ["pytester"]
HOLD = "from tests.test_memory import NOW\n\ndef test_hold(): NOW['VmRSS'] += {} << 20\n\ndef test_more(): pass"
NOW = {}  # what the tests' process takes, in bytes


@pytest.fixture
def freed(monkeypatch):
    """Lets `NOW` be the memory in use, and returns the list of what was in use whenever it was freed."""
    freed = []

    def free():
        freed.append(NOW["VmRSS"] // MB)
        NOW["VmRSS"] = 500 * MB

    NOW.update(VmRSS=500 * MB, VmHWM=1900 * MB)
    monkeypatch.setattr(memory, "read", lambda path, name: NOW[name])
    monkeypatch.setattr(memory, "free", free)
    return freed


def test_memory_is_freed_after_a_file_or_after_a_test_that_takes_more(pytester, freed):
    pytester.makepyfile(test_a=HOLD.format(200), test_b=HOLD.format(200), test_c=HOLD.format(700))
    assert pytester.inline_run(plugins=[Memory()]).ret == pytest.ExitCode.OK
    assert freed == [900, 1200]  # after the last test of test_b.py, and after the first of test_c.py


def test_a_run_prints_its_peak_and_fails_beyond_the_limit_of_its_tier(pytester, freed, capsys):
    pytester.makepyfile("import pytest\n\ndef test_a(): pass\n\n@pytest.mark.thorough\ndef test_b(): pass")
    pytester.makeini("[pytest]\nmarkers =\n    thorough")
    for peak, mark, ends in ((1900, "", 0), (2100, "not thorough", 1), (2900, "thorough", 0), (3100, "thorough", 1)):
        NOW["VmHWM"] = peak * MB
        assert pytester.inline_run("-m", mark, plugins=[Memory()]).ret == ends
        text = capsys.readouterr().out
        assert f"Peak memory: the process {peak} MB" in text
        assert (f"The tests of the process took {peak} MB of memory, where" in text) == bool(ends)


@pytest.mark.thorough
def test_a_killed_worker_is_told_with_its_memory(pytester, monkeypatch):
    """The run itself goes on with another worker."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[1]))
    pytester.makeconftest(
        "from tests.memory import Memory\n\ndef pytest_configure(config): config.pluginmanager.register(Memory())"
    )
    pytester.makepyfile(
        "import os, signal\n\ndef test_a(): pass\n\ndef test_b(): os.kill(os.getpid(), signal.SIGKILL)\n\n"
        "def test_c(): pass\n\ndef test_d(): pass"
    )
    result = pytester.runpytest_subprocess("-n", "1")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.re_match_lines(
        [r"Peak memory: gw0 \d+ MB, gw1 \d+ MB", r"Worker gw0 was ended by SIGKILL with \d+ MB"]
    )


def test_what_is_told_of_a_death():
    assert "ended with exit code 3 with 900 MB, on a machine of" in memory.death("gw0", 3, 900 * MB, 0)
    assert memory.death("gw0", -signal.SIGSEGV, 0, 0).startswith("Worker gw0 was ended by SIGSEGV with 0 MB")
    assert "probably for lack of memory" in memory.death("gw0", -signal.SIGKILL, 0, 0)
    assert "the kernel has killed 2 processes for lack of memory" in memory.death("gw0", -signal.SIGKILL, 0, 2)


def test_the_system_is_read(tmp_path, monkeypatch):
    """Figures are read as Linux writes them, and are 0 where it does not."""
    status, events = tmp_path / "status", tmp_path / "events"
    assert (memory.read(status, "VmRSS"), memory.read(memory.STATUS, "VmNone")) == (0, 0)
    status.write_text("VmHWM:\t  204800 kB\nVmRSS:\t  102400 kB\n")
    assert (memory.read(status, "VmRSS"), memory.read(status, "VmHWM")) == (100 * MB, 200 * MB)
    monkeypatch.setattr(memory, "KILLS", (tmp_path / "none", events))
    assert memory.kills() == 0
    events.write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    assert memory.kills() == 2
