"""Plans of models on the fleets for which others published results, without any hardware: the table of docs/plan.md.

    python -m benchmarks.plans            # the peers' configurations; hours on two cores
    python -m benchmarks.plans --all      # and every other model of the zoo, on H100s
    python -m benchmarks.plans --only gemma3

Each row takes minutes, so it is written to results/plans.json as soon as it is known, and is not computed again.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import rich
import tyro

import zoo
from benchmarks.common import RESULTS, circumstances
from train.base.chips import CHIPS, fleet
from train.base.flops import flops_per_token
from train.plan import plan
from train.planning.planner import Options
from zoo.nn.layers import AbstractExpertLinear
from zoo.registry import CONFIGS, family_of
from zoo.surgery import modules
from zoo.weights.checkpoint import skeleton


DOCS = pathlib.Path(__file__).parents[1] / "docs" / "plan.md"
BEGIN, END = "<!-- the table of benchmarks/plans.py -->\n", "<!-- its end -->\n"

# Model, topology, mesh, rows of a device, tokens of a row, remat. Cloud TPU's names count the cores of a v5p, two per
# chip: 8x8x8 is a v5p-1024, 4x4x4 a v5p-128. Each chip of TPU7x is two devices.
PEERS: list[tuple[str, str, str, int, int, Any]] = [
    ("llama3.1-8b", "v6e:16x16", "fsdp=-1", 3, 8192, "full"),
    ("llama3.1-70b", "v6e:16x16", "fsdp=-1", 5, 8192, "offload"),
    ("llama3.1-70b", "v6e:8x8", "fsdp=-1", 2, 8192, "offload"),
    ("gemma3-12b", "v6e:16x16", "fsdp=-1", 1, 8192, "full"),
    ("gemma3-27b", "v6e:16x16", "fsdp=-1", 1, 8192, "full"),
    ("mixtral-8x7b", "v6e:16x16", "fsdp=-1", 4, 4096, "full"),
    ("mixtral-8x7b", "v5p:4x4x4", "fsdp=-1", 4, 4096, "full"),
    ("llama3.1-405b", "v5p:8x8x8", "fsdp=-1", 1, 8192, "full"),
    ("deepseek-v3", "v5p:8x8x8", "fsdp=-1", 2, 4096, "full"),
    ("deepseek-v3", "v5p:8x8x8", "fsdp=2,expert=256", 2, 4096, "full"),
    ("llama4-scout", "v5p:4x4x8", "fsdp=-1", 2, 8192, "full"),
    ("llama3.1-70b", "tpu7x:4x4x4", "fsdp=-1", 2, 8192, "full"),
    ("qwen3-235b-a22b", "tpu7x:4x8x8", "fsdp=-1", 2, 4096, "full"),
    ("gpt-oss-120b", "tpu7x:4x4x4", "fsdp=-1,expert=4", 2, 8192, "full"),
    ("llama3.1-70b", "h200:256", "fsdp=-1", 2, 8192, "full"),
    ("llama3.1-8b", "h100:8", "fsdp=-1", 1, 8192, "full"),
    ("llama3.1-405b", "b200:256", "fsdp=-1", 1, 8192, "full"),
]


@functools.cache
def shapes(model: str) -> tuple[Any, ...]:
    """Returns a key that is equal for two models if their steps are the same program except for constants."""
    config = CONFIGS[model]
    parameters = jax.tree.leaves(skeleton(family_of(config), config))
    seq = min(4096, config.max_position_embeddings)
    return type(config).__module__, sum(a.size for a in parameters), seq, flops_per_token(config, seq)


def others() -> list[tuple[str, str, str, int, int, Any]]:
    """Returns one model for each further group of equal shapes, on as few H100s as hold the state twice.

    Its experts lie within a node, which has eight H100s.
    """
    planned, found = {shapes(model) for model, *_ in PEERS}, []
    for name, config in CONFIGS.items():
        if (key := shapes(name)) not in planned:
            planned.add(key)
            _, parameters, seq, _ = key
            devices = next(n for n in (8, 64, 512) if 2 * 12 * parameters < n * CHIPS["h100"].memory)
            sparse = any(modules(skeleton(family_of(config), config), AbstractExpertLinear))
            mesh = "fsdp=-1,expert=8" if sparse else "fsdp=-1"
            found.append((name, f"h100:{devices}", mesh, 1, seq, "full"))
    return found


def measure(model: str, topology: str, mesh: str, rows: int, seq: int, remat: Any) -> dict[str, Any]:
    """Returns the plan's figures, or the message with which `train.plan` refuses."""
    chip, devices = fleet(topology)
    o = Options.of(model=model, topology=topology, mesh=mesh, batch=rows * len(devices), seq=seq, remat=remat)
    try:
        made = plan(o, zoo.config(model), chip, devices)
    except ValueError as error:
        return {"refused": str(error)}
    gb = lambda size: round(size / 1e9, 2)
    row = {"needs, GB": gb(made.needed), "of, GB": gb(made.available), "fits": made.compiled is not None}
    row |= {f"{kind}, GB": gb(size) for kind, size in made.kinds.items()}
    row |= {"GFLOP a token": round(made.flops / 1e9, 1), **{f"{name}, s": s for name, s in made.bounds.items()}}
    if c := made.compiled:
        row |= {"activations, GB": gb(c.activations), "on the host, GB": gb(c.host), "MFU at most": round(made.mfu, 3)}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table of all rows."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in CONFIGS:
        alike.setdefault(shapes(name), []).append(name)
    columns = ("model", "topology", "mesh", "rows x tokens", "remat", "a device needs", "state", "activations")
    columns += ("GFLOP a token", "compute, ms", "HBM, ms", "interconnect, ms", "MFU at most")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        model, topology, mesh, count, seq, remat = row["case"]
        # A peer's model may have several rows; models of equal shapes are named in the first.
        names = ", ".join([model, *(name for name in alike.pop(shapes(model), []) if name != model)])
        cells = [names, topology, mesh, f"{count} x {seq:,} a device", remat]
        if "refused" in row:
            cells += [row["refused"], *[""] * 7]
        else:
            needs = f"{row['needs, GB']} of {row['of, GB']} GB{'' if row['fits'] else ', does not fit'}"
            state = row["parameters, GB"] + row["optimizer, GB"]
            times = [row.get(f"{name}, s") for name in ("compute", "HBM", "interconnect")]
            cells += [needs, f"{state:.2f} GB", f"{row['activations, GB']} GB" if row["fits"] else ""]
            cells += [f"{row['GFLOP a token']:,}", *("" if s is None else f"{1e3 * s:,.1f}" for s in times)]
            cells += [f"{row['MFU at most']:.1%}" if row["fits"] else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(*, all: bool = False, only: str = "") -> None:
    """Computes the rows that are missing, and writes the table.

    Args:
        all: also the models for which no peer published results.
        only: part of the names of models to compute.
    """
    path = RESULTS / "plans.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    for case in PEERS + (others() if all else []):
        if only in case[0] and list(case) not in [row["case"] for row in record["rows"]]:
            rich.print(*case)
            record["rows"].append({"case": list(case), **measure(*case)})
            record |= circumstances(("jax", "jaxlib", "libtpu"))
            path.write_text(json.dumps(record, indent=1) + "\n")
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    DOCS.write_text(before + BEGIN + table(record["rows"]) + END + rest.split(END)[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    tyro.cli(main)
