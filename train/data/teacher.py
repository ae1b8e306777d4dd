"""A teacher's logits in files: the largest of each token, for distillation without the teacher.

A folder has teacher.json, which says what they were made of, and one ArrayRecord file whose records are rows as
`train.data.packing` makes them, with `top_values` (float16) and `top_indices` [seq, k] beside the rest.
"""

import io
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from jaxtyping import Float, Int

from train.data.records import check_array_records
from train.loss import by_chunks
from train.step import Batch


ROWS, ABOUT = "rows.array_record", "teacher.json"


def top_k(model: Any, batch: Batch, k: int) -> tuple[Float[jax.Array, "batch seq k"], Int[jax.Array, "batch seq k"]]:
    """The largest `k` logits of each token, and which they are; never all logits of all tokens at once."""
    x, _ = model.hidden(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
    values, indices = by_chunks(lambda x: tuple(jax.lax.top_k(model.unembed(x).astype(jnp.float32), k)), x)
    return values, indices


def write(folder: pathlib.Path, batches: Iterable[Mapping[str, np.ndarray]], about: Mapping[str, Any]) -> int:
    """Writes batches that have `top_values` and `top_indices`. Returns how many rows there are.

    teacher.json comes last, so a folder without it is not whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)
    writer, rows = array_record_module.ArrayRecordWriter(str(folder / ROWS), "group_size:1"), 0
    for batch in batches:
        for row in range(len(batch["tokens"])):
            if batch["segments"][row].any():
                file = io.BytesIO()
                values = batch["top_values"][row].astype(np.float16)
                np.savez(file, **{name: a[row] for name, a in batch.items()} | {"top_values": values})
                writer.write(file.getvalue())
                rows += 1
    writer.close()
    (folder / ABOUT).write_text(json.dumps(dict(about), indent=2) + "\n")
    return rows


def read(folder: pathlib.Path) -> tuple[grain.MapDataset[dict[str, np.ndarray]], dict[str, Any]]:
    """The rows, and what teacher.json says.

    Raises:
        OSError: if the folder is not whole.
        ValueError: if the rows are damaged.
    """
    if not (folder / ABOUT).is_file():
        raise FileNotFoundError(f"{folder} has no {ABOUT}: store a teacher's logits there with --store, to the end.")
    check_array_records([folder / ROWS])
    source: Any = grain.sources.ArrayRecordDataSource([str(folder / ROWS)])

    def unpack(record: bytes) -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(record)) as row:
            return {name: row[name] for name in row.files}

    return grain.MapDataset.source(source).map(unpack), json.loads((folder / ABOUT).read_text())
