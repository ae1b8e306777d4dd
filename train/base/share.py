"""A batch of which each process holds the rows of its own devices."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, Shaped

from kernels.mesh import BATCH


@dataclasses.dataclass(frozen=True)
class Share:
    """An array of a batch of which this process holds only the rows of its own devices.

    Its shape and its indices are those of the whole array.
    """

    array: Shaped[np.ndarray, "here ..."]
    rows: Int[np.ndarray, " here"]  # numbers of the rows that are here, ascending
    batch: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, *self.array.shape[1:])

    def __len__(self) -> int:
        return self.batch

    def __getitem__(self, rows: slice) -> Shaped[np.ndarray, "rows ..."]:
        wanted = np.arange(self.batch)[rows]
        if not np.isin(wanted, self.rows).all():
            raise IndexError(f"Rows {wanted} of a batch are not this process's: it has {self.rows}.")
        return self.array[np.searchsorted(self.rows, wanted)]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Returns the rows that are here."""
        return self.array


def whole(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns all rows of a batch, in every process. All processes have to call it."""

    def gathered(share: Share) -> np.ndarray:
        rows, array = multihost_utils.process_allgather((share.rows, share.array), tiled=True)
        return np.asarray(array)[np.unique(np.asarray(rows), return_index=True)[1]]

    return {name: gathered(array) if isinstance(array, Share) else array for name, array in batch.items()}


def rows_here(mesh: Mesh | None, batch: int) -> Int[np.ndarray, " here"] | None:
    """Returns the numbers of the rows of a batch that this process's devices hold. None if they hold all rows."""
    if mesh is None or jax.process_count() == 1 or batch % math.prod(mesh.shape[axis] for axis in BATCH):
        return None  # a batch that the mesh does not divide is refused when it is put on the devices
    places = NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((batch,))
    here = np.unique(np.concatenate([np.arange(batch)[index] for index in places.values() if index is not None]))
    return None if len(here) == batch else here
