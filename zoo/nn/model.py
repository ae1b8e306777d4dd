"""The contract of a family: what its `Config`, its `Model` and its `FAMILY` must have. Read after zoo/models/qwen3.py.

Classes are abstract or final, as everywhere in Equinox: a family defines what is abstract here and overrides nothing
else (https://docs.kidger.site/equinox/pattern/). So code for all models, such as a training loop, need not ask what a
model has.
"""

import abc
import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kernels import Tokens
from kernels.mesh import split_lookup
from zoo.nn.cache import AbstractCache
from zoo.nn.heads import AbstractHead
from zoo.nn.layers import Embedding
from zoo.nn.stack import Caches, Reports, Stack
from zoo.nn.summary import summary


class _Sizes(abc.ABC):
    """The values that other code reads from a config. Not a dataclass, so that a family may have them as properties."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys
    max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractConfig(_Sizes):
    """The architecture of a model and nothing else; fields are named as in the checkpoint's config.json.

    `source` is the folder it was read from. `zoo.save` copies the tokenizer and the rest of config.json from there.
    """

    source: pathlib.Path | None = dataclasses.field(default=None, compare=False, repr=False)

    cache_limit: ClassVar[int | None] = None
    """The number of tokens beyond which a text's cache has to be made anew, since all its tokens are then read in
    another way; None: a cache can always be continued."""

    @abc.abstractmethod
    def attention_products(self, layer: int, seq: int) -> float:
        """Multiplications, each with its addition, of one token in this layer's attention, weights aside.

        That is the scores of the keys that it sees and the sum of their values, on average over a causal sequence of
        `seq` tokens, of which a token counts itself as half (`causal_keys`). A recurrent layer says what its state
        takes.
        """


class AbstractMixtureConfig(AbstractConfig):
    """The config of a model with experts."""

    num_experts_per_tok: int


def causal_keys(seq: int, window: int | None = None) -> float:
    """Returns the mean number of keys that a token sees in a causal sequence of `seq`; itself counts as half.

    With a window it sees at most `window` keys.
    """
    window = min(window or seq, seq)
    return window * (1 - window / (2 * seq))


class Images(eqx.Module):
    """The images of a batch, as a tower reads them, and which tokens stand for them.

    An image here is what the tower reads at once, which may be a tile of one. There may be more than any token stands
    for: a batch is filled up with some, so that its shape stays the same and nothing is compiled anew.
    """

    patches: Float[Array | np.ndarray, "images patches pixels"]
    """The patches of each image, padded to as many as the largest image has."""
    grids: Int[Array | np.ndarray, "images 2"]
    """Rows and columns of patches of each image. Patches beyond rows * columns are padding."""
    image: Int[Array | np.ndarray, "batch seq"]
    """Which image each token belongs to; -1: it is text."""
    feature: Int[Array | np.ndarray, "batch seq"]
    """Which of the features that the model makes of its image the token is."""

    @classmethod
    def of(
        cls,
        patches: Sequence[Float[np.ndarray, "_ pixels"]] | Float[np.ndarray, "images patches pixels"],
        each: int | Sequence[int],
        tokens: Int[np.ndarray, "batch seq"],
        id: int | Sequence[int],
        grids: Int[np.ndarray, "images 2"] | None = None,
    ) -> "Images":
        """Gives each token `id` a feature, in order: those of a row before the next row's, as transformers does.

        Args:
            patches: of each image of the batch.
            each: how many features the model makes of an image, or of each of them.
            tokens: in which token `id`, or one of several, stands so many times for each image.
            grids: rows and columns of patches; None: the tower takes images of one shape, and does not ask.

        Raises:
            ValueError: if there are more tokens `id` than features, or fewer.
        """
        here, counts = np.isin(tokens, id), np.broadcast_to(np.asarray(each), len(patches))
        if (count := int(here.sum())) != counts.sum():
            one = f", {each} each" if isinstance(each, int) else ""
            raise ValueError(
                f"{len(patches)} images are {counts.sum()} tokens{one}, but the prompts have {count} of them (of the "
                f"id {id}): give as many images as the prompts have places for."
            )
        image, feature = np.full(here.shape, -1, np.int32), np.zeros(here.shape, np.int32)
        image[here] = np.repeat(np.arange(len(patches)), counts)
        feature[here] = np.concatenate([np.arange(n) for n in counts])
        shapes = [(1, len(one)) for one in patches] if grids is None else grids
        return cls(pad_patches(patches), np.asarray(shapes, np.int32), image, feature)

    def splice(
        self, x: Float[Array, "batch seq embed"], features: Float[Array, "images tokens embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Puts features in the place of the tokens that stand for them."""
        _, tokens, embed = features.shape
        index = jnp.asarray(jnp.maximum(self.image, 0) * tokens + self.feature)
        found = split_lookup(features.reshape(-1, embed).astype(x.dtype), index)
        return jnp.where(self.image[..., None] < 0, x, found)


def pad_patches(patches: Sequence[np.ndarray] | np.ndarray, most: int = 0) -> np.ndarray:
    """Stacks the patches of images, [images, patches, pixels], filled up to `most` or to what the largest has."""
    most = max(most, *map(len, patches))
    return np.stack([np.pad(one, ((0, most - len(one)), (0, 0))) for one in patches])


class AbstractModel(eqx.Module):
    """A family's `Model`: `logits = model(tokens)`.

    `embed_tokens` is the embedding of tokens, `layers` are the decoder's, and `config` is static. A `head` stands in
    the place of the output embeddings, which a model with a head lacks; families know nothing of it.
    """

    config: eqx.AbstractVar[AbstractConfig]
    embed_tokens: eqx.AbstractVar[Embedding]
    layers: eqx.AbstractVar[Stack]
    # The converter makes the default a field of each model, whose class has an `__init__` that knows of no head.
    head: AbstractHead | None = eqx.field(default=None, converter=lambda head: head, kw_only=True)

    @abc.abstractmethod
    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        """Computes what `hidden` returns, for tokens that stand where `at` says."""

    @abc.abstractmethod
    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits of the token that follows each, of features from `hidden`."""

    def hidden(
        self,
        tokens: Int[Array, "batch seq"],
        cache: Caches | None = None,
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segments: Int[Array, "batch seq"] | None = None,
        branches: Int[Array, "batch seq"] | None = None,
        images: Images | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        """Features that `unembed` turns into logits, the new cache, and what the layers report of these tokens.

        Args:
            tokens: ids.
            cache: what earlier calls left, from `init_cache`. None: these tokens are all there is, and the new
                cache is None.
            positions: None means 0, 1, 2, ..., and with `segments` from 0 in each document; negative ones are padding,
                which a cache does not keep. Give them only where tokens are in another order: attention's fastest
                kernels need to know that tokens are in order.
            segments: numbers of the documents packed into a row, which do not see each other; 0 is padding, which no
                report counts. The tokens of each document are neighbours.
            branches: numbers of the branches of documents that begin alike and then part: 0 is the common beginning.
                They need `positions`, which go on from it in each branch, and layers without recurrences.
            images: tokens for which these have a feature are that feature, whatever their ids. With a cache, all tokens
                of an image are in one call, whose keys later calls see.

        Raises:
            ValueError: for images, if the model takes none; for branches, if a layer is recurrent.
        """
        at = Tokens(positions, segments, branches=branches)
        return (
            self.forward(tokens, cache, at)
            if images is None
            else require_vision(self).forward(tokens, cache, at, images)
        )

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Caches:
        """An empty cache for positions 0 to `length` - 1 of each row.

        It has the caches of the layers, and behind them that of the tower if it has one (`AbstractTower.cache`).
        """
        caches = self.layers.init_cache(batch, length, dtype)
        cache = self.vision.cache if has_vision(self) and self.vision is not None else None
        return (*caches, (cache.init(batch),)) if cache else caches

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segments: Int[Array, "batch seq"] | None = None,
        images: Images | None = None,
    ) -> Float[Array, "batch seq vocab"] | Float[Array, "batch ..."]:
        """Logits of the token that follows each; or, with a head, its result for each row, which is one text.

        The results are [batch, width] of an `EmbeddingHead`, [batch, labels] of a `ClassificationHead`, and [batch] of
        a `RewardHead`.

        Args:
            segments: as for `hidden`; for a head, 0 is padding and 1 the text. None: all tokens are the row's text,
                except that the head's `pad` is none of its tokens.

        Raises:
            ValueError: for images, if the model takes none.
        """
        x, _, _ = self.hidden(tokens, segments=segments, images=images)
        if self.head is None:
            return self.unembed(x)
        return self.head(x, self.head.members(tokens, segments))[:, 0]

    def decode(
        self, tokens: Int[Array, "batch seq"], cache: Caches, *, positions: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq vocab"], Caches | None]:
        """Logits for tokens at these positions, given what `cache` (from `init_cache`) remembers; and the new cache."""
        x, new, _ = self.hidden(tokens, cache, positions=positions)
        return self.unembed(x), new

    def __str__(self) -> str:
        """A table of the model's parts and kinds of layers, with their parameters and bytes, for `print(model)`."""
        return summary(self)

    def __hash__(self) -> int:
        """Raises, since `jax.jit(model)` hashes its function, and a module that holds arrays has no hash.

        Raises:
            TypeError: with the two ways in which a model is compiled.
        """
        try:
            return super().__hash__()
        except TypeError as error:
            raise TypeError(
                "A model's arrays are arguments of a compiled function, not part of it, so jax.jit(model) can't be: "
                "use equinox.filter_jit(model)(tokens), or jax.jit(lambda model, tokens: model(tokens))(model, tokens)."
            ) from error


class AbstractRowCache(AbstractCache):
    """A cache of a few numbers for each row, which no layer owns."""

    @classmethod
    @abc.abstractmethod
    def init(cls, batch: int) -> "AbstractRowCache":
        """An empty cache."""


class AbstractTower(eqx.Module):
    """The part "vision", as a model calls it: `features = vision(patches, grids)`."""

    cache: ClassVar[type[AbstractRowCache] | None] = None
    """Keeps what later tokens need of a row's images; None: they need nothing."""

    @abc.abstractmethod
    def __call__(
        self, patches: Float[Array, "images patches pixels"], grids: Int[Array, "images 2"]
    ) -> Float[Array, "images tokens embed"]:
        """Features in the place of each image's tokens, in their order; see `Images` for `grids`."""


class AbstractVisionModel(AbstractModel):
    """A model that takes images if it is made with the part "vision"."""

    vision: eqx.AbstractVar[AbstractTower | None]

    @abc.abstractmethod
    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        """Computes what `hidden` returns, for tokens that stand where `at` says."""

    def embed(self, tokens: Int[Array, "batch seq"], images: Images | None) -> Float[Array, "batch seq embed"]:
        """Embeds tokens; those that stand for images become the tower's features."""
        if images is None:
            return self.embed_tokens(tokens)
        assert self.vision is not None, "`hidden` refuses images where there is no tower"
        x = self.embed_text(tokens, images)
        return images.splice(x, self.vision(jnp.asarray(images.patches), jnp.asarray(images.grids)))

    def embed_text(self, tokens: Int[Array, "batch seq"], images: Images | None) -> Float[Array, "batch seq embed"]:
        """Embeds tokens; those that stand for images, whose ids may be beyond the table, become that of token 0."""
        return self.embed_tokens(tokens if images is None else jnp.where(images.image < 0, tokens, 0))


def has_vision(model: AbstractModel) -> TypeGuard[AbstractVisionModel]:
    """Whether the model takes images: it can, and has the part for it."""
    return isinstance(model, AbstractVisionModel) and model.vision is not None


def require_vision(model: AbstractModel) -> AbstractVisionModel:
    """The model, which takes images.

    Raises:
        ValueError: if it takes none, saying which does.
    """
    if has_vision(model):
        return model
    if isinstance(model, AbstractVisionModel):
        raise ValueError('The model was loaded without its vision tower, and so takes no images: parts=("vision",).')
    family = type(model).__module__.rpartition(".")[2]
    raise ValueError(f"A model of {family} takes no images; docs/vision.md lists those that do.")


class OneOf(tuple):
    """Values of a config.json's key that a family treats alike. The first is written where the source says none."""


class Released(NamedTuple):
    """A released model: its config, which base, instruct and fp8 models of one size share, and its Hub repository."""

    config: AbstractConfig

    repository: str | None = None
    """The repository of the weights and the tokenizer; None: the weights were never published."""

    tokenizer: str | None = None
    """Where there are no weights: a repository of a tokenizer whose ids fit the vocabulary."""


# `Family.experts_in_transformers` where the maps have transformers' names.
EXPERTS: dict[str, tuple[str, int | None]] = {
    "experts.gate_proj": ("experts.gate_up_proj", 0),
    "experts.up_proj": ("experts.gate_up_proj", 1),
    "experts.gate_up_proj": ("experts.gate_up_proj", None),
    "experts.down_proj": ("experts.down_proj", None),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """All that loading, saving, placing and training need to know of a family's file; its `FAMILY`."""

    title: str
    """The name of its models, for tables."""

    Config: type[AbstractConfig]
    Model: Callable[..., AbstractModel]
    """`Model(config, key=key)` has random weights, in float32. Where the family has `parts`, it takes `parts=` too."""

    configs: Mapping[str, Released]
    """Zoo name -> config and repository."""

    partition_rules: Mapping[str, P]
    """Pattern of a module's path -> spec of its matrix: (out, in) of a Linear, (experts, out, in) of an ExpertLinear.
    The first match wins, and the leading axis of a stack is no part of it."""

    checkpoint_names: Mapping[str, str]
    """Pattern of a parameter's path -> tensor's name, in which each `{}` is what the next `*` stands for: see
    `zoo.weights.checkpoint`."""

    implied: Mapping[str, Any]
    """Key of config.json -> the one value of it that the family implements, or `OneOf` several."""

    model_types: tuple[str, ...]
    """The `model_type`s of the family in config.json. "outer/inner": of a file of the type outer whose `text_config` is
    of the type inner, if other families read other files of the type outer."""

    redundant: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Pattern of the name of a tensor that checkpoints may hold and the model does not need -> the tensor that it
    repeats, if any. `{config.x}` is the config's x."""

    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other beginnings of tensors' names, or patterns of other names, with a `*` -> what `checkpoint_names` gives. The
    beginnings in `beginnings` are read, too."""

    fused: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """End of the name of a tensor of all experts -> ends of the names of those that a checkpoint may hold in its place,
    `{}` being the expert's number. The rows of an expert's tensors follow one another."""

    fp8_blocks: Collection[str] = ()
    """Patterns of the paths of parameters that releases store in blocks of 8 bits."""

    mxfp4: Collection[str] = ()
    """Patterns of the paths of parameters that releases store in MXFP4, with (out, in) as their last axes."""

    standard_form: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Brings a parsed config.json, of which there may be several forms, into the one that `Config` and `implied` speak
    of. Raises ValueError for what it can't, and where one key is at fault, `zoo.nn.fields.KeyProblem`."""

    published_form: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Brings a config.json in the standard form into the one in which models are published: its inverse."""

    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a part that a model has only if it is asked for, and of its field in `Model` -> what it is."""

    beginnings: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Name of a part -> beginnings of tensors' names -> what they are in checkpoints of models with that part."""

    experts_swapped_in_peft: bool = False
    """Whether PEFT exchanges in and out in the adapters of experts. It takes transformers' parameters of experts for
    (experts, out, in) unless they are marked as transposed, and some families' are (experts, in, out) without the mark.
    """

    names_in_transformers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parts of tensors' names -> those of transformers' modules, if others: PEFT names adapters by modules."""

    renamed_by_peft: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same of names that PEFT renames when it loads an adapter: its tensors must keep them, and its config not."""

    experts_in_transformers: Mapping[str, tuple[str, int | None]] = dataclasses.field(default_factory=lambda: EXPERTS)
    """End of the name of an experts' map -> that of the parameter in which transformers keeps it, of all experts of a
    layer, and which half of the parameter's rows it is: 0 or 1; None: all. PEFT names adapters by the parameter."""

    rebalance: Callable[..., Any] | None = None
    """`rebalance(model, reports, rate)` moves the biases of the routers towards an even load; None: they have none."""

    def __post_init__(self) -> None:
        config, where = self.Config, f"{self.Config.__module__}.{self.Config.__name__}"
        if not (issubclass(config, AbstractConfig) and dataclasses.is_dataclass(config)):
            raise TypeError(f"{where} is no dataclass that derives from zoo.nn.model.AbstractConfig, as a family's is.")
        annotated = {name for kind in config.__mro__ for name in inspect.get_annotations(kind)}
        lacking = annotated - config.__dataclass_fields__.keys() - set(dir(config))
        if lacking := sorted(lacking | config.__abstractmethods__):
            raise TypeError(f"{where} has no {', '.join(lacking)}, which a family needs.")
        if bare := [name for name, released in self.configs.items() if not isinstance(released, Released)]:
            raise TypeError(f"{', '.join(bare)} in the configs of {self.name} is no Released(config, repository).")

    def init_model(self, config: AbstractConfig, *, key: PRNGKeyArray, parts: Sequence[str] = ()) -> AbstractModel:
        """A model with random weights, in float32, and with these of the family's `parts`.

        Raises:
            ValueError: if the family or the config has no such part, naming it and those that there are.
        """
        if unknown := [part for part in parts if part not in self.parts]:
            known = "; ".join(f"parts=({part!r},) adds {what}" for part, what in self.parts.items())
            raise ValueError(f"{self.name} has no part {unknown[0]!r}: {known or 'it has no optional parts'}.")
        return self.Model(config, key=key, parts=parts) if parts else self.Model(config, key=key)

    @property
    def name(self) -> str:
        """The name of the family's file."""
        return self.Config.__module__.rpartition(".")[2]
