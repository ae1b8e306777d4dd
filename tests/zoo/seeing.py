"""The contract of tiny checkpoints that take images. `SEEING` in a family's module of `tests.zoo.tiny` lists them.

tests/zoo/test_vision.py tests all of them. golden/vision/FAMILY.npz has transformers' results; `python -m
tests.zoo.make_golden_vision` writes it.
"""

import abc
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import safetensors.numpy
import tokenizers

from zoo import registry
from zoo.nn.model import Family, Images
from zoo.text.tokenizer import Tokenizer


GOLDEN = pathlib.Path(__file__).parent / "golden" / "vision"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat with images, and its expected encoding."""

    messages: list[dict[str, Any]]
    ids: list[int]
    pictures: Sequence[np.ndarray]  # patches of each picture
    grids: np.ndarray
    room: int  # number of patches that they are padded to
    within: float = 0.0  # tolerance of a patch's numbers


class Checkpoint(abc.ABC):
    """A checkpoint, prompts and pictures for it, and its expected properties.

    A picture is the tower's unit of input: an image, a tile of one, or two frames of a video. Four of its patches
    become a feature.
    """

    name: str
    """Name of the checkpoint in tests/zoo/tiny whose text model this one resembles."""

    prompts: np.ndarray
    """[rows, seq]; the first row has no picture."""
    ids: tuple[int, ...]
    """Ids of the tokens that stand for pictures."""
    pictures: Sequence[np.ndarray]
    """Patches of each picture, in the order of their tokens."""
    grids: np.ndarray
    """Rows and columns of each picture's patches."""
    room: int
    """Number of patches that pictures are padded to."""

    packed: Sequence[Sequence[tuple[int, int, int, int]]]
    """Rows of documents, each (row of the prompts, start, stop, segment), or padding, whose segment is 0."""
    lengths: Sequence[int]
    """Length of each prompt's prefill, which includes all of its pictures."""
    steps: int
    """Number of tokens that are then decoded one by one."""
    lags: Sequence[int] | None = None
    """Number of tokens minus rotary positions of each prompt; None: they are equal."""

    restated: Sequence[str] = ()
    """Keys of config.json, with dots, that saving writes with other values or under another key."""
    renamed: ClassVar[Sequence[Mapping[str, str]]] = ()
    """Prefixes of tensors' names -> those in other checkpoints."""
    text_names: tuple[str, str]
    """model_type and architecture when saved without the tower."""
    inward: tuple[str, ...]
    """Suffixes of paths: the linear maps beside the text model that are split like the second one of an MLP."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Suffixes of paths: the arrays that are not trained, and so have no gradient."""
    refused: ClassVar[Sequence[tuple[dict[str, Any], str]]] = ()
    """Changes of the vision_config that are refused, with the error."""
    parameters: Mapping[str, int]
    """Released model -> its number of parameters with the tower, as the Hub shows it."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options for transformers' `from_pretrained`."""

    @property
    def family(self) -> Family:
        return registry.FAMILIES[self.config()["model_type"]]

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Returns the config.json."""

    @abc.abstractmethod
    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the tensors of the checkpoint, by their names on the Hub."""

    @abc.abstractmethod
    def add_chat(self, folder: pathlib.Path) -> None:
        """Writes a tokenizer with a chat template beside a checkpoint, and the files for preprocessing its images."""

    @abc.abstractmethod
    def chats(self, folder: pathlib.Path, tokenizer: Tokenizer) -> list[Chat]:
        """Returns chats for the files that `add_chat` has written."""

    @abc.abstractmethod
    def features(self, model: Any, images: Images) -> dict[str, jax.Array]:
        """Computes the outputs of the tower, the projector and further parts for pictures, by the golden names."""

    @abc.abstractmethod
    def given(self) -> dict[str, np.ndarray]:
        """Returns the arguments of transformers' model beside the tokens; floating-point ones are pixels."""

    @abc.abstractmethod
    def their_features(self, model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Computes these features with transformers' model, for all pictures one after another."""

    def tensor_name(self, parameter: str) -> str:
        """Returns the name on the Hub of a parameter of transformers' model."""
        return parameter

    def images(self) -> Images:
        """Returns the pictures, padded with numbers that must not matter."""
        counts = self.grids.prod(axis=1) // 4
        images = Images.of(self.pictures, counts.tolist(), self.prompts, self.ids, self.grids)
        patches = np.full((len(self.pictures), self.room, self.pictures[0].shape[1]), 7.0, np.float32)
        for padded, picture in zip(patches, self.pictures, strict=True):
            padded[: len(picture)] = picture
        return Images(*map(jax.device_put, (patches, images.grids, images.image, images.feature)))

    def golden(self) -> dict[str, np.ndarray]:
        """Returns transformers' results: logits, and features by their names."""
        stored = np.load(GOLDEN / f"{self.family.name}.npz")
        return {key.removeprefix(f"{self.name} "): stored[key] for key in stored if key.startswith(f"{self.name} ")}

    def write(self, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
        """Writes the checkpoint, in the layout of the Hub; `changes` overwrite keys of its config.json."""
        self.write_config(folder, **changes)
        safetensors.numpy.save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        self.add_chat(folder)
        return folder

    def write_config(self, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
        """Writes only its config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config() | changes))
        return folder

    def theirs(self, folder: pathlib.Path, dtype: str = "float32") -> Any:
        """Loads transformers' model, with its eager attention."""
        import transformers
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        # Llama 4's forward of 5.24 reads this attribute of its text model's output, which has none.
        if "image_outputs" not in vars(MoeCausalLMOutputWithPast):
            MoeCausalLMOutputWithPast.image_outputs = None
        options = dict(dtype=dtype, attn_implementation="eager", output_loading_info=True, **self.options)
        model, info = transformers.AutoModelForImageTextToText.from_pretrained(folder, **options)
        assert not any(info.values()), info
        return model.eval()

    def logits(self, model: Any) -> Any:
        """Returns the logits of transformers' model for the prompts and pictures: a torch tensor with its gradient."""
        import torch

        return model(input_ids=torch.tensor(self.prompts), **self._given(model)).logits

    def computed(self, model: Any) -> dict[str, np.ndarray]:
        """Returns the logits and the features of transformers' model as numbers."""
        import torch

        with torch.no_grad():
            result = {"logits": self.logits(model)} | self.their_features(model, self._given(model))
        return {name: value.float().numpy() for name, value in result.items()}

    def _given(self, model: Any) -> dict[str, Any]:
        import torch

        tensors = {key: torch.tensor(value) for key, value in self.given().items()}
        return {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in tensors.items()}


def template(place: str) -> str:
    """Returns a chat template without turns, with these tokens in place of an image."""
    of_part = "{% if p.type == 'image' %}" + place + "{% else %}{{ p.text }}{% endif %}"
    return "{% for m in messages %}{% for p in m.content %}" + of_part + "{% endfor %}{% endfor %}"


def add_chat(folder: pathlib.Path, characters: str, special: Mapping[str, int], template: str, **files: Any) -> None:
    """Writes a tokenizer of characters, whose ids are those between the special ones, its template, and JSON files."""
    free = (id for id in range(64) if id not in special.values())
    vocabulary = dict(zip(characters, free, strict=False)) | dict(special)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": dict(chat_template=template), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def patches(pixels: np.ndarray) -> np.ndarray:
    """Cuts pictures [n, channels, height, width] into patches of 2 x 2 pixels: [n, patches, channels * 2 * 2]."""
    n, channels, height, width = pixels.shape
    cut = pixels.reshape(n, channels, height // 2, 2, width // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(n, -1, channels * 4)


def image(shown: Any) -> dict[str, Any]:
    """Returns an image part of a message, from a Pillow image."""
    return {"type": "image", "image": shown}


def text(said: str) -> dict[str, Any]:
    """Returns a text part of a message."""
    return {"type": "text", "text": said}


def ask(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat of one user message."""
    return [{"role": "user", "content": list(parts)}]
