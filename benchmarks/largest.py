"""The largest model that one card or chip trains, by method, without any hardware: a table of docs/plan.md.

    python -m benchmarks.largest                                      # all that is missing; hours on two cores
    python -m benchmarks.largest --cards l4:1 a100:1 --columns lora dpo

For each card and method it compiles the largest model that should fit by an estimate, and then the next smaller, until
one fits. The best estimate is a program's memory on another GPU. Each compiled program is a row of
results/largest.json, written as soon as it is known and not computed again.
"""

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import rich
import tyro

from benchmarks.common import RESULTS, circumstances
from train.base.chips import Chip, fleet
from train.plan import plan, step
from train.planning import fit
from train.planning.ahead import device_bytes
from train.planning.planner import Options
from train.state.remat import StepOptions
from train.state.state import Lora, Trained
from zoo.mesh import make_mesh
from zoo.registry import CONFIGS, family_of


DOCS = pathlib.Path(__file__).parents[1] / "docs" / "plan.md"
BEGIN, END = "<!-- the table of benchmarks/largest.py -->\n", "<!-- the end of the largest -->\n"
ROW = 2048  # tokens
# Dense models of the zoo, the largest first: one of each size.
MODELS = (
    "llama3.3-70b", "qwen3-32b", "gemma3-27b", "mistral-small-3.1-24b", "qwen3-14b", "gemma3-12b", "qwen3-8b",
    "llama3.1-8b", "qwen3-4b", "llama3.2-3b", "qwen3-1.7b", "llama3.2-1b", "qwen3-0.6b",
)  # fmt: skip
# JAX takes three quarters of a GPU by default; with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 it takes this share. A TPU's
# memory limit, as its compiler has it, already excludes the part that the TPU reserves.
SHARE = 0.95

CARDS = {
    "t4:1": "T4", "l4:1": "L4", "4090:1": "RTX 4090", "a100-40gb:1": "A100, 40 GB", "a100:1": "A100, 80 GB",
    "h100:1": "H100", "h200:1": "H200", "b200:1": "B200", "v5e-1": "TPU v5e-1", "v6e-1": "TPU v6e-1",
}  # fmt: skip
ADAPTERS = {"lora": Lora(rank=16)}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("all weights", {}),
    "moments": ("all weights, `--moments bfloat16`", {"moments": "bfloat16"}),
    "lora": ("LoRA", ADAPTERS),
    "int8": ("LoRA over int8", ADAPTERS | {"quantize": "int8"}),
    "nf4": ("LoRA over nf4", ADAPTERS | {"quantize": "nf4"}),
    "dpo": ("DPO, LoRA", ADAPTERS | {"method": "dpo"}),
    "grpo": ("GRPO, LoRA", ADAPTERS | {"method": "grpo", "rollout_batch": 8}),
}


def options(card: str, method: str, model: str) -> Options:
    return Options.of(model=model, topology=card, batch=1, seq=ROW, remat="full", **METHODS[method][1])


def available(chip: Chip) -> float:
    """Returns the bytes that a run may use on a card or chip."""
    return chip.memory * (SHARE if chip.cores else 1.0)


def estimate(o: Options, devices: Sequence[Any]) -> float:
    """Returns the estimated bytes of the update, from `train.planning.fit`."""
    config = CONFIGS[o.model]
    mesh = make_mesh(o.mesh, devices)
    program = step(o, config, family_of(config), mesh)
    trained, _, kept, reference = program.arguments
    held = device_bytes((trained, kept, reference))
    part = Trained(o.model, config, trained.model, lambda: None, adapters=bool(o.lora.rank))
    usual = StepOptions(batch=o.batch, seq_len=o.seq, compute_dtype="bfloat16")
    return next(each.needed for each in fit.candidates(usual, o.state, part, mesh, held) if each.remat == o.remat)


def measure(o: Options, chip: Chip, devices: list[Any]) -> dict[str, Any]:
    """Returns the memory that `train.plan` computes, and whether it fits."""
    made = plan(o, CONFIGS[o.model], chip, devices)
    fits = made.compiled is not None and made.needed <= available(chip)
    gb = lambda size: round(size / 1e9, 2)
    return {
        "needs, GB": gb(made.needed),
        "sampling, GB": gb(made.sampling.needed if made.sampling else 0.0),
        "fits": fits,
    }


def candidates(card: str, method: str, chip: Chip, devices: list[Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns models that may fit, the largest first, judged by their memory on other GPUs or else by the estimate.

    The estimate is up to 21 % too high with adapters and 11 % without (docs/plan.md).
    """
    most, found = available(chip), []
    for model in MODELS:
        alike = [
            row["needs, GB"] * 1e9
            for row in rows
            if row["case"][1:] == [method, model] and chip.cores and not row["case"][0].startswith("v")
        ]
        o = options(card, method, model)
        needed = min(alike) if alike else estimate(o, devices) / (1.2 if o.lora.rank else 1.1)
        if needed <= most * (1.01 if alike else 1.0):
            found.append(model)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table: the largest model that fits by card and method, with its memory in gigabytes."""
    fitting = [row for row in rows if row["fits"]]
    lines = [f"| | memory | {' | '.join(name for name, _ in METHODS.values())} |", "|---" * (len(METHODS) + 2) + "|"]
    for card, name in CARDS.items():
        cells = []
        for method in METHODS:
            found = [row for row in fitting if row["case"][:2] == [card, method]]
            best = min(found, key=lambda row: MODELS.index(row["case"][2]), default=None)
            cells.append(f"{best['case'][2]}, {best['needs, GB']:.1f}" if best else "")
        if any(cells):
            memory = next(row["of, GB"] for row in rows if row["case"][0] == card)
            lines.append(f"| {name} | {memory:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(*, cards: tuple[str, ...] = tuple(CARDS), columns: tuple[str, ...] = tuple(METHODS)) -> None:
    """Computes the cells that are missing, and writes the table.

    Args:
        cards: Rows of the table: topologies of one device, as for train.plan.
        columns: Columns of the table: full, moments, lora, int8, nf4, dpo, grpo.
    """
    path = RESULTS / "largest.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    for method, card in itertools.product(columns, cards):
        chip, devices = fleet(card)
        for model in candidates(card, method, chip, devices, record["rows"]):
            known = [row for row in record["rows"] if row["case"] == [card, method, model]]
            if not known:
                rich.print(card, method, model)
                row = {"case": [card, method, model], "of, GB": round(chip.memory / 1e9, 2)}
                known = [row | measure(options(card, method, model), chip, devices)]
                record["rows"] += known
                record |= circumstances(("jax", "jaxlib", "libtpu", "jax-cuda13-plugin"))
                path.write_text(json.dumps(record, indent=1) + "\n")
            if known[0]["fits"]:
                break
    write(record["rows"])


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Puts the table into docs/plan.md."""
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    DOCS.write_text(before + BEGIN + table(rows) + END + rest.split(END)[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    tyro.cli(main)
