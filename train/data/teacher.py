"""Stores a teacher's largest logits of each token in files, and reads them for distillation without the teacher.

A folder has teacher.json, which says what the logits were made of, and one ArrayRecord file. Its records are rows of
`train.data.packing` with two more arrays [seq, k]: `top_values` (float16) and `top_indices`.
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
from train.step import Batch, features
from zoo.nn.model import AbstractModel


ROWS, ABOUT = "rows.array_record", "teacher.json"


def top_k(
    model: AbstractModel, batch: Batch, k: int
) -> tuple[Float[jax.Array, "batch seq k"], Int[jax.Array, "batch seq k"]]:
    """Returns each token's `k` largest logits and their indices; it never holds all logits of all tokens at once."""
    x, _ = features(model, batch)
    values, indices = by_chunks(lambda x: tuple(jax.lax.top_k(model.unembed(x).astype(jnp.float32), k)), x)
    return values, indices


def write(folder: pathlib.Path, batches: Iterable[Mapping[str, np.ndarray]], about: Mapping[str, Any]) -> int:
    """Writes batches that have `top_values` and `top_indices`. Returns how many rows it wrote.

    teacher.json comes last: a folder without it is incomplete.
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
    """Opens the rows, and reads teacher.json.

    Raises:
        OSError: the folder is not complete.
        ValueError: the rows are damaged.
    """
    if not (folder / ABOUT).is_file():
        raise FileNotFoundError(f"{folder} has no {ABOUT}: store a teacher's logits there with --store, to the end.")
    check_array_records([folder / ROWS])
    source: Any = grain.sources.ArrayRecordDataSource([str(folder / ROWS)])

    def unpack(record: bytes) -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(record)) as row:
            return {name: row[name] for name in row.files}

    return grain.MapDataset.source(source).map(unpack), json.loads((folder / ABOUT).read_text())
