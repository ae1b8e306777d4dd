"""Adapters of a model that is fine-tuned: their options, and how they are added and told apart."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from zoo import lora
from zoo.nn.model import AbstractModel
from zoo.registry import family_of
from zoo.surgery import shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters: small matrices beside those of the model, which are not trained."""

    rank: int = 0
    """Rank of the adapters; 8 to 64 is usual. 0: no adapters, and every weight is trained."""
    alpha: float = 0.0
    """Scale of the adapters: what they add is multiplied by alpha / rank. 0: twice the rank."""
    where: str = lora.LAYERS
    """Pattern of the paths of the linear maps that get adapters, such as *.[qv]_proj for queries and values. The
    default is all of the layers, experts' too."""

    def identity(self) -> dict[str, Any]:
        """What must not change while a run lasts."""
        return {"rank": self.rank, "scale (alpha / rank)": self.alpha / max(self.rank, 1), "where": self.where}


def add(model: AbstractModel, o: Lora, mesh: Mesh, *, seed: int) -> AbstractModel:
    """The model with new adapters, placed on the mesh."""
    model = lora.add(model, rank=o.rank, alpha=o.alpha, where=o.where, key=jax.random.key(seed))
    return jax.device_put(model, shardings(model, family_of(model).partition_rules, mesh))
