"""A teacher's largest logits of each token, stored in files for distillation without the teacher.

A folder has teacher.json, which describes the model and the data that the logits were made from, and one ArrayRecord
file. Its records are in the format of safetensors: rows of `train.data.packing` with two more arrays [seq, k],
`top_values` (float16) and `top_indices`.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from jaxtyping import Float, Int

from train.data.formats.examples import check_array_records
from train.step.language import features
from train.step.loss import by_chunks
from train.step.step import Batch
from zoo.nn.model import AbstractModel


ROWS, ABOUT = "logits.array_record", "teacher.json"


def top_k(
    model: AbstractModel, batch: Batch, k: int
) -> tuple[Float[jax.Array, "batch seq k"], Int[jax.Array, "batch seq k"]]:
    """Returns each token's `k` largest logits and their indices. Never holds all logits of all tokens at once."""
    x, _ = features(model, batch)
    values, indices = by_chunks(lambda x: tuple(jax.lax.top_k(model.unembed(x).astype(jnp.float32), k)), x)
    return values, indices


def write(folder: pathlib.Path, batches: Iterable[Mapping[str, np.ndarray]], about: Mapping[str, Any]) -> int:
    """Writes batches that have `top_values` and `top_indices`. Returns the number of rows.

    teacher.json is written last: a folder without it is incomplete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)
    writer, rows = array_record_module.ArrayRecordWriter(str(folder / ROWS), "group_size:1"), 0
    for batch in batches:
        for row in range(len(batch["tokens"])):
            if batch["segments"][row].any():
                arrays = {name: np.ascontiguousarray(a[row]) for name, a in batch.items()}
                writer.write(safetensors.numpy.save(arrays | {"top_values": arrays["top_values"].astype(np.float16)}))
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
    if lacking := [name for name in (ABOUT, ROWS) if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} has no {lacking[0]}: store a teacher's logits there by --store, to the end.")
    check_array_records([folder / ROWS])
    source: Any = grain.sources.ArrayRecordDataSource([str(folder / ROWS)])

    # Several threads read rows, so the format is not numpy's own: reading that evaluates Python, and Python 3.11's
    # parser can fail with several threads (https://github.com/python/cpython/issues/106905).
    return grain.MapDataset.source(source).map(safetensors.numpy.load), json.loads((folder / ABOUT).read_text())
