"""A second run of each failed test, in a process of its own: `pytest --rerun-failed`, as .ci/run does.

A test that then passes is printed as FLAKY with the text of its first failure, and does not fail the run. The same
holds for a test in which a worker of xdist died. The run still fails if a test fails twice, if more than MOST tests
failed, or if the run ended before all tests had run.
"""

import os
import subprocess
import sys

import pytest


MOST = 10  # failures in one run; more than these have a common cause


def pytest_addoption(parser):
    parser.addoption("--rerun-failed", action="store_true", help="run each failed test once more, alone")


def pytest_configure(config):
    if config.getoption("rerun_failed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RerunFailed())


class RerunFailed:
    """Collects failures, in the process that the workers report to."""

    def __init__(self):
        self.reported = set()
        self.failures = {}  # node id -> text of the first failure

    def pytest_runtest_logreport(self, report):
        self.reported.add(report.nodeid)
        if report.failed:
            self.failures.setdefault(report.nodeid, report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        result = yield  # to the report of the run
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self.failures:
            say = session.config.get_terminal_writer().line
            if len(self.reported) < session.testscollected:
                say("\nThe run ended early: no failed test is run again.", red=True)
            elif len(self.failures) > MOST:
                say(f"\n{len(self.failures)} tests failed, which is no accident: none is run again.", red=True)
            elif all([passes_alone(session.config, *failure) for failure in self.failures.items()]):
                session.exitstatus = pytest.ExitCode.OK
        return result


def passes_alone(config: pytest.Config, nodeid: str, failure: str) -> bool:
    """Runs a failed test again, and prints the result. `failure` is the text of its first failure."""
    options = [f"--rootdir={config.rootpath}", "-q", "-m", "", "-p", "no:xdist"]
    options += ["-c", str(config.inipath)] if config.inipath else []
    options += [] if config.pluginmanager.has_plugin("cacheprovider") else ["-p", "no:cacheprovider"]
    for name, values in (("-o", config.option.override_ini), ("-W", config.option.pythonwarnings)):
        options += [word for value in values or () for word in (name, value)]
    again = subprocess.run(
        [sys.executable, "-m", "pytest", *options, nodeid],
        cwd=config.rootpath,
        env=os.environ | {"PYTEST_ADDOPTS": ""},  # which may contain --rerun-failed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    out = config.get_terminal_writer()
    if again.returncode == pytest.ExitCode.OK:
        out.line(f"\nFLAKY {nodeid} failed, and passed when it was run again, alone. It failed first with", yellow=True)
        out.line(failure)
    else:
        out.line(f"\nFAILED TWICE {nodeid}, the second time alone:", red=True)
        out.line(again.stdout)
    return again.returncode == pytest.ExitCode.OK
