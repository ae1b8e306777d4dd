"""Samples: texts that a model writes while it is trained, to look at."""

import dataclasses
from collections.abc import Callable, Sequence

import rich
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.markup import escape

import zoo
from train.goodput import timed
from train.mesh import generating
from zoo.generation.generate import Encoded
from zoo.nn.model import AbstractModel
from zoo.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Samples:
    """What is written, and who takes it."""

    tokenizer: Tokenizer
    prompts: Sequence[Encoded]
    tokens: int  # of a sample
    mesh: Mesh
    dtype: DTypeLike
    record: Callable[..., None]  # such as `train.watch.Watch.sample`

    @timed("generation")
    def write(self, step: int, model: AbstractModel) -> None:
        """Prints how the model continues each prompt, and has it recorded."""
        room = model.config.max_position_embeddings - self.tokens
        prompts = [prompt if prompt.images else Encoded(prompt.ids[-room:]) for prompt in self.prompts]
        with generating(model, self.mesh, self.dtype) as model:
            texts = zoo.generate(model, self.tokenizer, prompts, max_new_tokens=self.tokens)
        for prompt, text in zip([self.tokenizer.decode(prompt.ids) for prompt in prompts], texts, strict=True):
            rich.print(f"[dim]step {step:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
            self.record(step, prompt=prompt, text=text)
