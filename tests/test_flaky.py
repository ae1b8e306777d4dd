"""A failed test is run once more, alone, and decides about the run only if it fails twice."""

import pathlib

import pytest

from tests import flaky


pytest_plugins = ["pytester"]
ONCE = """
import os, pathlib

def first(name):
    return not os.path.exists(name) and not pathlib.Path(name).touch()
"""


@pytest.mark.thorough
def test_flaky_tests_are_named_and_do_not_fail_the_run(pytester, monkeypatch):
    """A test that ends its worker must neither end the next worker nor hide the other tests."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[1]))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--rerun-failed")  # must not reach the tests that run alone
    pytester.makepyfile(
        test_crash=ONCE + "def test_crash():\n    if first('crash'):\n        os._exit(3)\n\ndef test_after(): pass",
        test_once=ONCE + "def test_once():\n    assert not first('once'), 'the first time'\n\ndef test_good(): pass",
    )
    result = pytester.runpytest_subprocess("-p", "tests.groups", "-p", "tests.flaky", "-n", "1")
    text = result.stdout.str()
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=2, failed=2)
    assert "FLAKY test_once.py::test_once failed, and passed" in text
    assert "FLAKY test_crash.py::test_crash failed, and passed" in text
    told = text.split("FLAKY ", 1)[1]
    assert "AssertionError: the first time" in told and "crashed while running 'test_crash.py::test_crash'" in told


@pytest.mark.thorough
def test_a_test_that_fails_twice_fails_the_run(pytester):
    pytester.makepyfile("def test_wrong():\n    assert 1 + 1 == 3")
    result = pytester.runpytest("-p", "tests.flaky", "--rerun-failed")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = result.stdout.str()
    assert "FAILED TWICE" in told and told.count("E       assert (1 + 1) == 3") == 2


@pytest.mark.parametrize(
    "count, options, why", [(flaky.MOST + 1, (), "no accident: none is run again"), (2, ("-x",), "ended early")]
)
def test_what_is_not_run_again(pytester, count, options, why):
    pytester.makepyfile(f"import pytest\n@pytest.mark.parametrize('n', range({count}))\ndef test_wrong(n): assert 0")
    result = pytester.runpytest("-p", "tests.flaky", "--rerun-failed", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED and why in result.stdout.str()
