"""The assignment of tests to workers of xdist: all tests about one family of tiny checkpoints share a worker, and so do
the remaining tests of a file.

They share programs and fixtures. Groups that take longest start first, so that no worker is still running one when the
others have finished.
"""

import collections

import pytest

from tests.seconds import README, read, tier
from tests.zoo import tiny


OF_NO_FAMILY = ("tests/zoo/test_engine.py", "tests/zoo/test_speculative.py")  # by file, whatever checkpoint they use


def group(nodeid: str) -> str:
    """Returns the family of the tiny checkpoint that a test is about, or else its file."""
    file, _, case = nodeid.rstrip("]").partition("[")
    words = case.split("-") if not file.startswith(OF_NO_FAMILY) else []
    names = ("-".join(words[i:j]) for i in range(len(words)) for j in range(len(words), i, -1))
    return next((tiny.FAMILIES[name] for name in names if name in tiny.FAMILIES), file.split("::")[0])


def pytest_addoption(parser):
    parser.addoption("--families", default="", metavar="NAMES", help="only tests of these families: gemma4,llama")


@pytest.hookimpl(optionalhook=True)  # where xdist is not installed
def pytest_xdist_make_scheduler(config, log):
    """Replaces the scheduler of `-n`, to avoid three faults of xdist 3.8.

    Its own `loadgroup` sends each test alone, because since pytest 9.2 it writes groups where nothing reads them. A
    test in which a worker died is run again by the next worker, which then dies, too. A new worker that gets a single
    test waits for ever, because it does not start before it knows the next test.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

        def remove_node(self, node):
            units = self.assigned_work.pop(node)
            begun = [(unit, nodeid) for unit in units.values() for nodeid, ended in unit.items() if not ended]
            if not begun:
                return None
            unit, nodeid = begun[0]
            unit[nodeid] = True
            self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return nodeid

        def _reschedule(self, node):
            if node.shutting_down or node not in self.registered_collections:
                return
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 3:
                self._assign_work_unit(node)
            if not self.workqueue:
                node.shutdown()  # after its remaining tests

    if config.getvalue("dist") == "load":
        config.option.loadscopereorder = False  # the order below is kept instead
        return Groups(config, log)


@pytest.hookimpl(trylast=True)  # after tests of other tiers were deselected
def pytest_collection_modifyitems(config, items):
    if config.getoption("families"):
        names = config.getoption("families").split(",")
        config.hook.pytest_deselected(items=[item for item in items if group(item.nodeid) not in names])
        items[:] = [item for item in items if group(item.nodeid) in names]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item.nodeid)))
    if hasattr(config, "workerinput"):
        groups = collections.defaultdict(list)
        for item in items:
            groups[group(item.nodeid)].append(item)
        counted = read(README.read_text())
        seconds = lambda name: max(counted.get((name, tier(item)), 0) for item in groups[name])
        order = sorted(groups, key=lambda name: (-seconds(name), -len(groups[name])))
        items[:] = [item for name in order for item in groups[name]]
