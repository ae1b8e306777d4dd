"""Rewards that other models give: reward models and classifiers, which read completions on the devices of the run."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

import zoo
from kernels.mesh import BATCH
from train.data.packing import encode, messages
from train.data.prompts import Prompt
from train.data.record import Record
from train.state.mesh import put_batch
from train.step.language import features
from train.step.step import Batch
from zoo.generation.shapes import bucket
from zoo.nn.heads import ClassificationHead
from zoo.nn.model import AbstractModel
from zoo.source import Source
from zoo.text.tokenizer import Tokenizer
from zoo.weights.gather import gathered
from zoo.weights.heads import labels_in


NAME = "model:"  # the beginning of such a reward's name


@dataclasses.dataclass(frozen=True)
class Judge:
    """A model whose reward of a completion follows from the prompt with the completion, in its own tokens.

    A reward model gives its reward, and a classifier the probability of one of its labels.
    """

    model: AbstractModel
    tokenizer: Tokenizer
    label: int | None  # None: a reward model
    mesh: Mesh
    batch: int  # number of completions that are read at a time

    @classmethod
    def load(cls, name: str, mesh: Mesh, *, dtype: str, batch: int) -> "Judge":
        """Loads the model that a reward names, model:FOLDER or model:FOLDER:LABEL, onto the mesh.

        The folder may also be a zoo name, or a Hub repository.

        Raises:
            ValueError: there is no such label, or the model has several and none is named.
            OSError: the model cannot be found.
        """
        folder, colon, label = name.removeprefix(NAME).rpartition(":")
        folder, label = (folder, label) if colon else (label, "")
        source = Source.open(folder)
        labels = labels_in(source.config_json)
        if label and label not in labels:
            raise ValueError(f"--reward {name}: {folder} has the labels {', '.join(labels) or 'of no classifier'}.")
        if len(labels) > 1 and not label:
            raise ValueError(f"--reward {name}: name one of the labels, {NAME}{folder}:{labels[0]} or others.")
        model = zoo.load(source, head="classification" if label else "reward", dtype=dtype, mesh=mesh)
        number = labels.index(label) if label else None
        return cls(model, zoo.tokenizer(source), number, mesh, batch)

    def rate(self, prompts: Sequence[Prompt], texts: Sequence[Sequence[str]]) -> Float[np.ndarray, "prompts group"]:
        """Returns the reward of each text of each prompt. If there are several processes, all must call this.

        A text that is longer than the model's positions loses its end.
        """
        ids = [self.encode(prompt, text) for prompt, group in zip(prompts, texts, strict=True) for text in group]
        shares = math.prod(self.mesh.shape[axis] for axis in BATCH)
        size = math.ceil(min(self.batch, len(ids)) / shares) * shares
        length, found = bucket(max(map(len, ids))), []
        for start in range(0, len(ids), size):
            names = ("tokens", "segments", "loss_mask", "positions")
            rows = {name: np.zeros((size, length), np.int32) for name in names}
            for row, each in enumerate(ids[start : start + size]):
                end = len(each)
                rows["tokens"][row, :end], rows["segments"][row, :end], rows["loss_mask"][row, end - 1] = each, 1, 1
                rows["positions"][row, :end] = np.arange(end)
            with jax.set_mesh(self.mesh):
                found.append(gathered(_results(self.model, put_batch(rows, self.mesh, self.model), self.label)))
        return np.concatenate(found)[: len(ids)].reshape(len(prompts), -1)

    def encode(self, prompt: Prompt, text: str) -> list[int]:
        """Encodes a prompt with its completion, as `train.reward` and `train.classify` do."""
        fields, tokenizer = prompt.record, self.tokenizer
        asked: Any = next(fields[name] for name in ("prompt", "messages", "conversations") if name in fields)
        if not isinstance(asked, str):
            asked = messages(asked, tokenizer)
            asked = asked[:-1] if asked[-1]["role"] == "assistant" else asked
        completion: Any = text if isinstance(asked, str) else [{"role": "assistant", "content": text}]
        if self.label is None:
            record = Record("a completion", {"prompt": asked, "completion": completion})
            ids = encode(record, tokenizer, vocab_size=self.model.config.vocab_size)[-1].ids
        else:
            ids = tokenizer.encode(asked + text) if isinstance(asked, str) else tokenizer.encode_all(asked + completion)
        return ids[: self.model.config.max_position_embeddings]


@eqx.filter_jit
def _results(model: AbstractModel, batch: Batch, label: int | None) -> Float[Array, " batch"]:
    assert model.head is not None, "`Judge.load` loads one"
    x, _ = features(model, batch)
    results = model.head(x, (batch["loss_mask"] != 0)[:, None])[:, 0].astype(jnp.float32)
    if label is None:
        return results
    assert isinstance(model.head, ClassificationHead)
    return (jax.nn.sigmoid(results) if model.head.several else jax.nn.softmax(results, axis=-1))[:, label]
