"""Finds block sizes worth trying on a GPU that is not at hand, and writes them to benchmarks/shortlist.json.

    python -m benchmarks.shortlist --help

A candidate differs from the sizes in use by one step (`benchmarks.tune.neighbours`). It is listed if it compiles for
the card, within its shared memory, without a spilled register, and with the card's matrix instructions wherever the
sizes in use have them. This needs the `compile` extra, and takes some minutes.
"""

import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.gpu import matches
from benchmarks.tune import SHORTLIST, Lookup, Sizes, lookups, neighbours, watched


TUNED = ("8 documents D128 T8k", "Qwen3-30B-A3B up", "Qwen3-30B-A3B down")


def compiled(case: Case, name: str, which: str, lookup: Lookup, sizes: Sizes, card: str, dump: pathlib.Path) -> Any:
    """Compiles a pass with these sizes. Returns its kernels as tests/kernels/gpu.py reads them, or {"error": ...}."""
    import jax
    import jax.numpy as jnp

    from benchmarks.in_jax import pull_back
    from benchmarks.programs import program_of
    from tests.kernels import gpu

    program = program_of(case)

    def run(*arguments: Any) -> Any:
        with watched({lookup: sizes}):
            if which == "forward":
                return program.function(name)(*arguments)
            out, pull = pull_back(program, program.function(name), which, arguments)
            return pull(jnp.ones_like(out))

    arguments = jax.eval_shape(lambda: program.arguments(jax.random.key(0)))
    return gpu.compile_one(gpu.Case(run, arguments, (), 2**62, card), dump)


def products(found: dict[str, Any]) -> dict[str, bool]:
    """Returns, for each kernel, whether it uses the matrix instructions that run at full speed."""
    from tests.kernels.gpu import MULTIPLY

    kinds = {kind for kinds in MULTIPLY.values() for kind in kinds}
    return {name: any(kernel[kind] for kind in kinds) for name, kernel in found["kernels"].items()}


def main(only: tuple[str, ...] = TUNED, card: str = "h200", out: pathlib.Path = SHORTLIST) -> None:
    """Compiles candidates for a card that need not be at hand, and lists those worth trying.

    Kernels that the file already contains are skipped; delete the file to start afresh.

    Args:
        only: cases whose names one of these patterns matches.
        card: as in `train.plan`, such as h100 or a100.
        out: the file.
    """
    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    with tempfile.TemporaryDirectory() as work:
        dump = pathlib.Path(work)
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=.*ptx.*"
        import jax

        from tests.kernels import gpu

        anything = gpu.Case(abs, (), (), 2**62, card)  # without limits of its own
        listed: dict[str, list[Sizes]] = json.loads(out.read_text()) if out.exists() else {}
        for case in (case for case in CASES if matches(case.name, only)):
            case = dataclasses.replace(case, sets=1)
            for name, which in ((name, which) for name in ("triton", "mosaic") for which in case.passes):
                with jax.set_mesh(gpu.mesh_of(card)):
                    found = lookups(case, name, which)
                for lookup, sizes in found.items():
                    if " ".join(lookup) in listed:
                        continue
                    trial = functools.partial(compiled, case, name, which, lookup, card=card, dump=dump)
                    here = products(trial(sizes=sizes))
                    listed[" ".join(lookup)] = good = []
                    for candidate in neighbours(sizes):
                        result = trial(sizes=candidate)
                        if not gpu.faults(anything, result) and products(result) == here:
                            good.append(candidate)
                    print(f"{' '.join(lookup)}: {len(good)} of {len(neighbours(sizes))}", flush=True)
                    rows = (f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(listed.items()))
                    out.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{len(listed)} kernels in {out}.")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
