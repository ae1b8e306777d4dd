"""Lists the compile gates whose sources have changed since they passed, and runs them again.

A gate is a test that needs the compilers of GPUs or TPUs, marked by one of `MARKS`. For each gate that has passed,
gates.json has a hash of its sources, and the versions of jax and of the compilers. The sources are the code that it can
reach, without comments, docstrings and annotations (`tests.kernels.sources`). A gate must run again if the hash
differs, or if the installed jax or an installed compiler is newer. So an environment without compilers can also tell
that nothing has to be compiled.

    python -m tests.kernels.gates               # the gates to run again, and why; exit status 1 if there are any
    python -m tests.kernels.gates --run         # runs those, and writes gates.json
    python -m tests.kernels.gates --list        # all gates, each with the files of its sources
    python -m tests.kernels.gates --run matmul  # only gates whose name has the part
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.kernels.sources import Reached, Sources


ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("gates.json")
# Marks of tests that need a platform's compilers.
MARKS = {"needs_compiler": "gpu", "needs_gpu_compiler": "gpu", "needs_cuda": "gpu", "needs_libtpu": "tpu"}
# Distributions whose versions count, and words in the names of modules that are only for this platform.
COMPILERS = {
    "gpu": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm"),
    "tpu": ("libtpu",),
}
ALONE = {"gpu": {"triton", "cudnn", "mosaic"}, "tpu": {"tpu"}}


def gates(sources: Sources) -> dict[str, set[str]]:
    """Returns the gates by pytest's names ("tests/kernels/test_x.py::test_tpu"), each with its platforms."""
    found = {}
    for module, path in sources.paths.items():
        if path.name.startswith("test_") and any(mark in path.read_text() for mark in MARKS):
            for test in sources.module(module).functions():
                marks = MARKS.keys() & sources.module(module).decorators(test)
                if test.startswith("test_") and marks:
                    found[f"{path.relative_to(sources.root).as_posix()}::{test}"] = {MARKS[mark] for mark in marks}
    return dict(sorted(found.items()))


def reached(sources: Sources, gate: str, platforms: Iterable[str]) -> Reached:
    """Returns the code that a gate can reach, without the kernels of other platforms."""
    without = set().union(*(words for platform, words in ALONE.items() if platform not in platforms))
    return sources.reached(gate, without)


def families(names: Iterable[str]) -> set[str]:
    """Returns the modules of the families of those names that are models' names."""
    import zoo

    return {type(zoo.config(name)).__module__ for name in names if name in zoo.names()}


def versions(platforms: Iterable[str]) -> dict[str, str]:
    """Returns the installed versions of jax and of the platforms' compilers."""
    found = {}
    for name in ("jax", "jaxlib", *(name for platform in sorted(platforms) for name in COMPILERS[platform])):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def stale(
    record: Mapping[str, Any], hashes: Mapping[str, str], installed: Mapping[str, dict[str, str]]
) -> dict[str, str]:
    """Returns the gates that must run again, each with the reason.

    Args:
        record: gates.json: gate -> {"sources": hash, "versions": distribution -> version}.
        hashes: gate -> hash of its sources as they are now.
        installed: gate -> distribution -> version here.
    """
    found = {}
    for gate, hash in hashes.items():
        passed = record.get(gate)
        if passed is None:
            found[gate] = "it has not passed yet"
        elif passed["sources"] != hash:
            found[gate] = "its sources have changed"
        else:
            of = passed["versions"]
            newer = [f"{name} {v}" for name, v in installed[gate].items() if Version(v) > Version(of.get(name, "0"))]
            if newer:
                found[gate] = f"it passed with older versions than {', '.join(newer)}"
    return found


def run(tests: Iterable[str]) -> tuple[int, set[str]]:
    """Runs gates with all optimisations. Returns pytest's exit status, and the gates of which every case passed."""
    # Each program is compiled anew, since cached programs dump no code, by whichever worker is free.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    more = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": "disabled"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([*command, f"--junit-xml={report}", *tests], cwd=ROOT, env=os.environ | more).returncode
        if not report.exists():
            return status, set()
        cases = xml.etree.ElementTree.parse(report).iter("testcase")
        return status, passed((each.get("classname", ""), each.get("name", ""), len(each) == 0) for each in cases)


def passed(cases: Iterable[tuple[str, str, bool]]) -> set[str]:
    """Returns the tests of which all cases passed, given cases: module, test with parameters, whether it passed."""
    by_test: dict[str, list[bool]] = {}
    for module, name, good in cases:
        by_test.setdefault(f"{module.replace('.', '/')}.py::{name.split('[')[0]}", []).append(good)
    return {test for test, all_of_it in by_test.items() if all(all_of_it)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the gates that have to be run again, and record them")
    parser.add_argument("--list", action="store_true", help="print all gates, with the files of their sources")
    parser.add_argument("part", nargs="?", default="", help="only gates whose name has this part")
    arguments = parser.parse_args()
    sources = Sources(ROOT, families)
    all_gates = gates(sources)
    found = {gate: platforms for gate, platforms in all_gates.items() if arguments.part in gate}
    reach = {gate: reached(sources, gate, platforms) for gate, platforms in found.items()}
    hashes = {gate: each.hash() for gate, each in reach.items()}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    again = stale(record, hashes, {gate: versions(platforms) for gate, platforms in found.items()})
    if arguments.list:
        for gate, each in reach.items():
            print(f"{gate}: {again.get(gate, 'unchanged')}, {len(each.definitions)} definitions in")
            print("".join(f"    {file}\n" for file in each.files()))
        return
    for gate, reason in again.items():
        print(f"{gate}: {reason}")
    if not again:
        print(f"Nothing that the {len(found)} compile gates reach has changed since they passed.")
    elif not arguments.run:
        sys.exit(1)
    else:
        status, good = run(again)
        for gate in good & again.keys():
            record[gate] = {"sources": hashes[gate], "versions": versions(found[gate])}
        kept = {gate: record[gate] for gate in all_gates if gate in record}
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")
        for gate in again.keys() - good:
            print(f"not recorded: {gate}")
        sys.exit(status or int(not again.keys() <= good))


if __name__ == "__main__":
    main()
