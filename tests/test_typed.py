"""Types are checked where they have to be."""

import jaxtyping
import pytest

import zoo
from tests import typed


def test_which_runs_check_types(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)
    assert all(map(typed.wanted, ("not slow and not live", "", "not live", "slow or not slow")))
    assert not any(map(typed.wanted, ("slow", "live", "slow and not live", "slow or live")))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert not typed.wanted("not slow and not live")


@pytest.mark.skipif(jaxtyping.config.jaxtyping_disable, reason="JAXTYPING_DISABLE leaves the checks out")
def test_this_run_checks_them():
    with pytest.raises(jaxtyping.TypeCheckError):
        zoo.config(1.0)
    with pytest.raises(RuntimeError, match=r"zoo, .* was imported before"):
        typed.install()
