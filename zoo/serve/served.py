"""The models of a server, each under a name."""

import dataclasses
import functools

from zoo.generation.grammar import Grammars
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model with its tokenizer and draft, under the name by which requests choose it."""

    name: str
    model: AbstractModel
    tokenizer: Tokenizer
    draft: AbstractDraft | None = None

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The compiler of grammars for replies. Raises ValueError without llguidance."""
        return Grammars(self.tokenizer, self.model.config.vocab_size)
