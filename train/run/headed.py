"""Loads models in which a head stands in the place of the output embeddings."""

from typing import Any

import jax
from jax.sharding import Mesh

import zoo
from zoo.nn.heads import AbstractHead
from zoo.nn.model import AbstractModel
from zoo.registry import family_of
from zoo.source import Source
from zoo.surgery import shardings, with_head
from zoo.weights.heads import is_classifier


def load(model: Source, mesh: Mesh, head: AbstractHead | None, **options: Any) -> AbstractModel:
    """Loads a model, placed on the mesh, with these options of `zoo.load`.

    With a `head`, it gets the checkpoint's own head of that kind; or `head`, in float32, if the checkpoint has none.
    """
    if head is None:
        return zoo.load(model, mesh=mesh, **options)
    # Any checkpoint can be loaded for embeddings, whose head may have no weights.
    stored = head.kind if head.kind == "embedding" or is_classifier(model.config_json) else "embedding"
    loaded = zoo.load(model, mesh=mesh, head=stored, **options)
    if stored == head.kind:
        return loaded
    loaded = with_head(loaded, head)
    return jax.device_put(loaded, shardings(loaded, family_of(loaded).partition_rules, mesh))
