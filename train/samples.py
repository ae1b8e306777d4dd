"""Samples: texts that a model writes while it is trained, to look at."""

import dataclasses
from collections.abc import Sequence

import rich
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.markup import escape

import zoo
from train.mesh import generating
from train.metrics import MetricsFile
from zoo.nn.model import AbstractModel
from zoo.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How often a model writes samples, and how long ones, in `Options`."""

    sample_every: int = 0
    """Number of steps between samples: texts that the model writes. 0: a quarter of --steps."""
    sample_tokens: int = 64
    """Number of tokens of a sample."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """What is written, and where to."""

    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    tokens: int  # of a sample
    mesh: Mesh
    dtype: DTypeLike
    file: MetricsFile

    def write(self, step: int, model: AbstractModel) -> None:
        """Prints how the model continues each prompt, and writes it to the file."""
        room = model.config.max_position_embeddings - self.tokens
        prompts = [prompt[-room:] for prompt in self.prompts]
        with generating(model, self.mesh, self.dtype) as model:
            texts = zoo.generate(model, self.tokenizer, prompts, max_new_tokens=self.tokens)
        for prompt, text in zip(map(self.tokenizer.decode, prompts), texts, strict=True):
            rich.print(f"[dim]step {step:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
            self.file.write(step, prompt=prompt, text=text)
