"""Compiles kernels for TPUs on any machine that has libtpu, and reads the compiler's schedules.

The compiler writes each kernel's schedule: one line for each bundle, which is what the core issues in one cycle. So the
number of bundles measures a kernel's work (loops count once), and shows growth. Registers that are spilled to memory
and filled again are slots in it. Neither is a time.

A test module named test_compile*_tpu.py has `CASES: dict[str, Case]`, with names that no other module uses, and asserts
that `complaints(chip, __file__)` is empty for each of `CHIPS`. All cases of a module and a chip are compiled in one
process of their own, since libtpu reads its flags once, when it is loaded. The expected numbers are in
recorded_tpu.json. After a kernel has changed for good reasons, record it again with

    python -m tests.kernels.tpu --record                        # all modules
    python -m tests.kernels.tpu --record test_compile_tpu       # one of them
    python -m tests.kernels.tpu v6e test_compile_tpu [part]     # only show one chip, and cases whose name has the part
"""

import importlib
import importlib.util
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


# The smallest topology of each chip: topology names can be chosen freely, and the number of devices does not matter.
CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
RECORDED = Path(__file__).with_name("recorded_tpu.json")
TOLERANCE = 0.05  # relative to the recorded bundles
# Without these, libtpu asks the cloud for its machine, takes a lock, and writes logs by the gigabyte.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
MOST_BYTES = 200 << 20  # of any file that the compiling process may write

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


class Case(NamedTuple):
    """A function to be compiled for arguments of these shapes (jax.ShapeDtypeStruct, in any pytree)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    elements: int  # no array may have this many: the logits of one head, a matrix for each row
    chips: tuple[str, ...] = tuple(CHIPS)  # chips to compile for
    temporary: int | None = None  # bytes of an array that would be copied: all temporary arrays together have fewer


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("jax", "libtpu")}


def measure(chip: str, module: str, part: str = "") -> dict[str, dict]:
    """Returns by case {"error"}, or {"seconds", "temporary" bytes, "largest" array, "kernels": {name: slots}}."""
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", "tests.kernels.tpu", "--compile", chip, module, part, result.name]
        root = Path(__file__).parents[2]
        # The output is captured, because libtpu only prints about the cloud that it does not find.
        process = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-5000:]
        return json.loads(Path(result.name).read_text())


def complaints(chip: str, file: str) -> list[str]:
    """Returns the faults of this test file's cases, compiled for this chip."""
    recorded = json.loads(RECORDED.read_text())
    same_compiler = recorded["versions"] == versions()
    found = []
    for name, case in measure(chip, Path(file).stem).items():
        found += [f"{name}: {complaint}" for complaint in _faults(case)]
        expected = recorded["chips"][chip].get(name)
        actual = {kernel: slots["bundles"] for kernel, slots in case.get("kernels", {}).items()}
        if expected is None or expected.keys() != actual.keys():
            found.append(f"{name}: the kernels are {actual}, and {expected} are recorded")
        elif same_compiler:
            off = [k for k, n in expected.items() if abs(actual[k] - n) > TOLERANCE * n]
            found += [f"{name}: {k} has {actual[k]} bundles, and {expected[k]} are recorded" for k in off]
    if not same_compiler:
        print(f"bundles are not compared: they were recorded with {recorded['versions']}, and here are {versions()}")
    return found


def _faults(case: dict) -> list[str]:
    """Returns a case's faults that do not depend on recorded numbers."""
    if "error" in case:
        return [case["error"]]
    spilling = {name: slots for name, slots in case["kernels"].items() if slots["spill"] or slots["fill"]}
    faults = [f"{name} spills registers: {slots}" for name, slots in spilling.items()]
    if case["largest"] >= case["limit"]:
        faults.append(f"an array has {case['largest']} elements, and {case['limit']} are too many")
    if case["copy"] is not None and case["temporary"] >= case["copy"]:
        faults.append(f"there are {case['temporary']} temporary bytes, as many as a copy of {case['copy']} would take")
    return faults


def record(modules: list[str]) -> None:
    """Writes recorded_tpu.json; cases of other modules stay as they are."""
    recorded: dict = {"versions": versions(), "chips": {}}
    if modules:
        recorded["chips"] = json.loads(RECORDED.read_text())["chips"]
    for chip in CHIPS:
        cases = recorded["chips"].setdefault(chip, {})
        for module in modules or sorted(path.stem for path in Path(__file__).parent.glob("test_compile*_tpu.py")):
            for name, case in measure(chip, module).items():
                if _faults(case):
                    sys.exit(f"{chip}, {name}: {_faults(case)}. Nothing was recorded.")
                cases[name] = {kernel: slots["bundles"] for kernel, slots in case["kernels"].items()}
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def show(chip: str, module: str, part: str = "") -> None:
    for name, case in measure(chip, module, part).items():
        print(f"{name}: {json.dumps(case)}")


def _compile(chip: str, module: str, part: str, result: str) -> None:
    """Compiles the cases, in the process made for it, and writes the result of `measure`."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES if hard < 0 else min(hard, MOST_BYTES), hard))
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as dump:
        flags = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_hlo-static-per-bundle.*"
        os.environ.update(ENVIRONMENT, LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump} {flags}")
        topology = topologies.get_topology_desc(CHIPS[chip], platform="tpu")
        mesh = Mesh(np.array(topology.devices)[:1], ("device",))
        cases = importlib.import_module(f"tests.kernels.{module}").CASES
        results = {}
        for name, case in cases.items():
            if part in name and chip in case.chips:
                results[name] = _compile_one(case, mesh, Path(dump))
    Path(result).write_text(json.dumps(results))


def _compile_one(case: Case, mesh: Mesh, dump: Path) -> dict:
    start = time.monotonic()
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    try:
        with jax.set_mesh(mesh):
            compiled = jax.jit(case.function).lower(*jax.tree.map(on_mesh, case.arguments)).compile()
    except Exception as error:  # any error is the case's result, and others follow
        return {"error": f"{type(error).__name__}: {str(error)[:3000]}"}
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    names = set(re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", text))
    kernels: dict[str, Counter[str]] = {re.sub(r"\.\d+$", "", name): Counter() for name in names}
    for file in dump.iterdir():
        schedule = re.fullmatch(r"\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization.txt", file.name)
        if schedule and schedule[1] in names:  # a kernel called twice has one schedule or two; two are added up
            kernels[re.sub(r"\.\d+$", "", schedule[1])].update(_slots(file))
        file.unlink()
    assert all(kernels.values()), f"{kernels}: no schedule was written for one"
    shapes = re.findall(r"\w\[([\d,]+)\]", re.sub(r"s8\[\d+\]", "", text))  # these are other arrays, moved as bytes
    return {
        "seconds": round(time.monotonic() - start, 1),
        "temporary": memory.temp_size_in_bytes,
        "largest": max(math.prod(map(int, shape.split(","))) for shape in shapes),
        "limit": case.elements,
        "copy": case.temporary,
        "kernels": kernels,
    }


def _slots(schedule: Path) -> dict[str, int]:
    """Returns a kernel's number of bundles, and the number of used slots by kind."""
    _, columns, _, _, *rows = schedule.read_text().splitlines()
    names = [column.strip() for column in columns.split(",")]
    bundles = np.array([row.split() for row in rows], int)
    slots = dict(zip(names, bundles.sum(axis=0).tolist(), strict=True))
    return {"bundles": len(rows), "spill": slots.pop("VSTORE:SPILL"), "fill": slots.pop("VLOAD:FILL"), **slots}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--compile", chip, module, part, result]:
            _compile(chip, module, part, result)
        case ["--record", *modules]:
            record(modules)
        case [chip, module, *part]:
            show(chip, module, *part)
        case _:
            sys.exit(__doc__)
