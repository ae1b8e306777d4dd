"""Compiles kernels for NVIDIA GPUs on any machine that has JAX's CUDA plugin, and reports on the machine code.

For each kernel it reports the registers of a thread, the bytes of registers that are spilled to memory, the shared
memory of a block, and the numbers of instructions that multiply matrices. HGMMA is Hopper's own, of four warps at once;
QGMMA is the same in fp8, and IGMMA in int8. UTCHMMA and its kin are Blackwell's. HMMA is the older one of a single
warp, at about half the speed on Hopper. For the whole program it reports the memory beside arguments and results. None
of this is a time.

A test module named test_compile*_gpu.py has `CASES: dict[str, Case]`, and asserts that `complaints(__file__)` is empty.
All cases of a module are compiled in one process of their own, since XLA reads its flags once. To look at them:

    python -m tests.kernels.gpu test_compile_gpu [part]    # only cases whose name has the part
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
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

from train.base.chips import CHIPS, LIMITS, target


# By compute capability: the instructions that multiply matrices at full speed.
MULTIPLY = {"8.0": ("HMMA", "IMMA"), "8.9": ("HMMA", "IMMA"), "9.0": ("HGMMA", "QGMMA", "IGMMA"), "10.0": ("UTC.MMA",)}


def _wheel_has(distribution: str, name: str) -> Path | None:
    """Returns the path of the file of this name in an installed wheel; None if it is missing."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == name), None)


PTXAS, NVDISASM = _wheel_has("nvidia-cuda-nvcc", "ptxas"), _wheel_has("nvidia-cuda-nvdisasm", "nvdisasm")
MISSING = [
    name
    for name, present in {
        "jax-cuda13-plugin": importlib.util.find_spec("jax_cuda13_plugin"),
        "nvidia-cuda-nvcc": PTXAS,
        "nvidia-cuda-nvdisasm": NVDISASM,
    }.items()
    if not present
]

needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


class Case(NamedTuple):
    """A function to be compiled for arguments of these shapes (jax.ShapeDtypeStruct, in any pytree)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    hgmma: tuple[str, ...]  # kernels that must multiply by HGMMA, QGMMA or IGMMA, or the card's equivalents
    temporary: int  # limit of the program's bytes beside arguments and results
    card: str = "h200"  # its name in train.base.chips


def measure(module: str, part: str = "") -> dict[str, dict]:
    """Returns by case {"error"}, or {"seconds", "temporary" bytes, "kernels": {name: {"registers", ...}}}."""
    with tempfile.TemporaryDirectory() as work:
        result, dump = Path(work) / "result.json", Path(work) / "dump"
        flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=.*ptx.*"
        process = subprocess.run(
            [sys.executable, "-m", "tests.kernels.gpu", "--compile", module, part, str(dump), str(result)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-5000:]
        return json.loads(result.read_text())


def complaints(file: str) -> list[str]:
    """Returns the faults of the cases in this test file."""
    cases = importlib.import_module(f"tests.kernels.{Path(file).stem}").CASES
    return [
        f"{name}: {fault}" for name, found in measure(Path(file).stem).items() for fault in faults(cases[name], found)
    ]


def faults(case: Case, found: dict) -> list[str]:
    """Returns the faults in the result of `compile_one` for a case."""
    if "error" in found:
        return [found["error"]]
    kernels, wrong = found["kernels"], []
    capability = CHIPS[case.card].capability
    for name, kernel in kernels.items():
        if kernel["spilled"]:
            wrong.append(f"{name} spills {kernel['spilled']} bytes of registers")
        if kernel["serialized"]:
            wrong.append(f"{name} has too few registers to multiply while it does anything else")
        if kernel["shared"] > LIMITS[capability][0] - 1024:
            wrong.append(f"{name} takes {kernel['shared']} bytes of shared memory")
    for name in case.hgmma:
        called = [kernel for each, kernel in kernels.items() if each.split("__")[0] == name]  # "name__1" is a second
        if not called or not all(any(kernel[kind] for kind in MULTIPLY[capability]) for kernel in called):
            wrong.append(f"{name} does not multiply by {' or '.join(MULTIPLY[capability])}")
    if found["temporary"] > case.temporary:
        wrong.append(f"it takes {found['temporary']} bytes, and {case.temporary} are allowed")
    return wrong


def _compile(module: str, part: str, dump: Path, result: Path) -> None:
    """Compiles the cases, in the process made for it, and writes the result of `measure`."""
    cases = importlib.import_module(f"tests.kernels.{module}").CASES
    found = {name: compile_one(case, dump) for name, case in cases.items() if part in name}
    result.write_text(json.dumps(found))


@functools.cache
def mesh_of(card: str) -> Mesh:
    """Returns a mesh of one device of this kind, which need not be at hand."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target(CHIPS[card]), topology="1x1x1")
    return Mesh(np.array(topology.devices)[:1], ("device",))


def compile_one(case: Case, dump: Path) -> dict:
    """Returns a case's result for `measure`. XLA must write its PTX to the folder `dump`, which is emptied."""
    start, mesh = time.monotonic(), mesh_of(case.card)
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    try:
        with jax.set_mesh(mesh):
            compiled = jax.jit(case.function).lower(*jax.tree.map(on_mesh, case.arguments)).compile()
    except Exception as error:  # any error is the case's result, and others follow
        return {"error": f"{type(error).__name__}: {str(error)[:3000]}"}
    seconds = time.monotonic() - start
    kernels: dict[str, dict] = {}
    for file in sorted(dump.glob("*.ptx")):
        kernels |= kernels_of(file, CHIPS[case.card].capability)
    for file in dump.glob("*.thunk_sequence.txt"):
        for name, shared in re.findall(r"(\S+) grid: .*shared_memory: (\d+) bytes", file.read_text()):
            kernels[name]["shared"] = int(shared)
    for file in dump.iterdir():
        file.unlink()
    memory = compiled.memory_analysis()
    assert memory is not None
    return {"seconds": round(seconds, 1), "temporary": memory.temp_size_in_bytes, "kernels": kernels}


def kernels_of(ptx: Path, capability: str) -> dict[str, dict]:
    """Compiles a PTX file. Returns each kernel's resources (from `ptxas`) and counts of instructions (`nvdisasm`)."""
    assert PTXAS is not None and NVDISASM is not None, MISSING
    cubin = ptx.with_suffix(".cubin")
    architecture = "sm_" + capability.replace(".", "") + ("a" if float(capability) >= 9 else "")
    said = _run(PTXAS, "--verbose", f"--gpu-name={architecture}", "--output-file", str(cubin), str(ptx))
    assembly = dict(re.findall(r"\n\.text\.(\w+):\n(.*?)(?=\n\.text\.|\Z)", _run(NVDISASM, str(cubin)), re.DOTALL))
    kernels = {}
    properties = (
        r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) reg"
    )
    for name, stored, loaded, registers in re.findall(properties, said):
        kernels[name] = {
            "registers": int(registers),
            "spilled": int(stored) + int(loaded),
            "serialized": bool(re.search(rf"wgmma.* serialized .*'{name}'", said)),
            "shared": 0,
            **{kind: len(re.findall(rf"\b{kind}\b", assembly[name])) for kind in sorted({*sum(MULTIPLY.values(), ())})},
        }
    return kernels


def _run(*command: object) -> str:
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--compile", module, part, dump, result]:
            _compile(module, part, Path(dump), Path(result))
        case [module, *part]:
            for name, found in measure(module, *part).items():
                print(f"{name}: {json.dumps(found)}")
        case _:
            sys.exit(__doc__)
