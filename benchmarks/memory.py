"""Memory and compile time of Llama 3.1's training step, against MaxText's, without any hardware.

    python -m benchmarks.memory             # 8B over 8 chips of v6e, three cases
    python -m benchmarks.memory --large     # and 70B over 256 chips

Both compile ahead of time for the same TPU topology: AdamW in float32, products in bfloat16, FSDP, 8,192 tokens a row.
The peer's figures come from `train_compile` of MaxText 0.2.5, on two cores, with its published settings.
"""

import datetime
import json
from typing import Any, NamedTuple

import jax
import rich.box
import rich.console
import rich.table
import tyro

import zoo
from benchmarks.common import RESULTS, circumstances
from train.base.chips import fleet
from train.plan import plan
from train.planning.planner import Options


class Peer(NamedTuple):
    """MaxText's figures: GB (1e9 bytes) of a chip, and seconds of compiling."""

    arguments: float
    temporaries: float
    seconds: int


# The third field is rows of a chip. A peer of None refused: its program took 31.60 GiB of 31.24 GiB.
CASES: list[tuple[str, str, int, Any, Peer | None]] = [
    ("llama3.1-8b", "v6e:2x4", 2, "full", Peer(12.05, 24.43, 91)),
    ("llama3.1-8b", "v6e:2x4", 3, "full", None),
    ("llama3.1-8b", "v6e:2x4", 3, "offload", Peer(12.05, 19.79, 87)),
]
LARGE: list[tuple[str, str, int, Any, Peer | None]] = [
    ("llama3.1-70b", "v6e:16x16", 5, "offload", Peer(3.32, 26.23, 446))
]


def main(*, large: bool = False) -> None:
    """Prints a table and writes it to results/memory-v6e-DATE.json.

    Args:
        large: also compile 70B over 256 chips, which takes minutes more.
    """
    table = rich.table.Table("model", "chips", "rows", "remat", "", "arguments", "temporaries", "seconds")
    table.title, table.box, rows = "GB of a chip", rich.box.SIMPLE, []
    for model, topology, count, remat, peer in CASES + LARGE * large:
        chip, devices = fleet(topology)
        o = Options.of(model=model, topology=topology, batch=count * len(devices), seq=8192, remat=remat)
        made = plan(o, zoo.config(model), chip, devices)
        row: dict[str, Any] = {"model": model, "topology": topology, "rows of a chip": count, "remat": remat}
        row |= {"needed, GB": made.needed / 1e9, "MaxText": peer and peer._asdict()}
        case = (model, topology, str(count), remat)
        if c := made.compiled:
            row |= {"arguments, GB": c.arguments / 1e9, "temporaries, GB": c.temporaries / 1e9}
            row |= {"of the host, GB": c.host / 1e9, "compile, s": c.seconds}
            table.add_row(*case, "ours", f"{c.arguments / 1e9:.2f}", f"{c.temporaries / 1e9:.2f}", f"{c.seconds:.0f}")
        else:
            table.add_row(*case, "ours", "does not fit")
        theirs = ("does not fit",) if peer is None else (f"{peer[0]:.2f}", f"{peer[1]:.2f}", str(peer[2]))
        table.add_row("", "", "", "", "MaxText", *theirs)
        rows.append(row)
    rich.console.Console(width=120).print(table)
    path = RESULTS / f"memory-v6e-{datetime.date.today()}.json"
    path.write_text(json.dumps({"rows": rows} | circumstances(("jax", "jaxlib", "libtpu")), indent=2) + "\n")
    print(f"Written to {path}.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
