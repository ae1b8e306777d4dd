"""Language models as Equinox modules, straight from Hugging Face checkpoints.

    model = zoo.load("qwen3-0.6b")
    tokenizer = zoo.tokenizer("qwen3-0.6b")
    print(zoo.generate(model, tokenizer, ["The capital of France is"], max_new_tokens=8))

A model is named by a zoo name (`zoo.names()`), by a Hub repository "org/name", or by a folder in the Hub's layout.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import warnings
from typing import TYPE_CHECKING


__version__ = "0.1.0"


def _import_own(name: str) -> None:
    """Import zoo's package `name` from the folder beside zoo, even if another of that name comes first on the path.

    The names are common, and the other package is mostly a folder of data or a script that nobody imports. The other
    package is hidden from here on, so the user is warned, unless it is the script being run or a folder without
    `__init__.py`. One process cannot have two packages of one name.

    Raises:
        ImportError: the other package was imported already, or was installed into the same folder.
    """
    folder = pathlib.Path(__file__).resolve().parent.parent / name
    # If two distributions are installed into one folder, the later one has overwritten files of the earlier one.
    for other in importlib.metadata.distributions(name=name):
        if pathlib.Path(str(other.locate_file(name))).resolve() == folder:
            raise ImportError(
                f"zoo's package {name!r} and that of the distribution {name} {other.version} were installed into the "
                f"same folder {folder}, one over the other; uninstall {name} and install equinox-zoo again, or use "
                "each in an environment of its own."
            )
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded else importlib.util.find_spec(name)
    origin = spec.origin if spec and spec.origin else None  # None for a folder without __init__.py
    if origin and pathlib.Path(origin).resolve() == folder / "__init__.py":
        return
    if loaded:
        theirs = origin or ", ".join(getattr(loaded, "__path__", ["a module without a file"]))
        raise ImportError(
            f"{theirs} was imported as {name!r} before zoo, which brings a package of that name, {folder}. A program "
            "can use only one of the two: rename the other, or uninstall it if it is a distribution's."
        )
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if origin and not (script and pathlib.Path(script).resolve() == pathlib.Path(origin).resolve()):
        warnings.warn(
            f"`import {name}` now gives zoo's package {folder}, though {origin} comes first on the path. If this "
            "program imports that file, rename it, or uninstall it if it is a distribution's; if not, all is well.",
            stacklevel=3,
        )
    own = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert own and own.loader
    sys.modules[name] = importlib.util.module_from_spec(own)
    own.loader.exec_module(sys.modules[name])


for _name in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):  # libtpu reads these as jax loads it, or else logs a lot
    os.environ.setdefault(_name, "3")
for _name in ("kernels", "convert"):  # not train: zoo does not import it
    _import_own(_name)

from kernels.backends.program_cache import keep_programs
from zoo import lora, surgery
from zoo.activations import capture
from zoo.evaluation import evaluate
from zoo.generation.complete import complete
from zoo.generation.engine import Completion, Engine
from zoo.generation.generate import generate, stream
from zoo.generation.sampling import Sampling
from zoo.generation.speculative import ModelDraft, MTPDraft, NGramDraft
from zoo.load import config, fingerprint, init, inspect, load, save, tokenizer
from zoo.mesh import make_mesh
from zoo.registry import register
from zoo.retrieval import decide, embed, rank
from zoo.source import names
from zoo.weights import peft


if TYPE_CHECKING:
    from zoo.models import (
        deepseek2,
        deepseek3,
        gemma,
        gemma2,
        gemma3,
        gemma4,
        glm4_moe,
        gpt3,
        gpt_oss,
        granite,
        granite4,
        kimi_linear,
        laguna,
        lfm2,
        lfm2_moe,
        lfm3,
        llama,
        llama4,
        mimo_v2_flash,
        minimax_m2,
        mistral,
        mistral3,
        mistral4,
        mixtral,
        muse_glimmer,
        nemotron_h,
        olmo2,
        olmo3,
        olmo_hybrid,
        phi3,
        qwen2,
        qwen2_5_vl,
        qwen3,
        qwen3_5,
        qwen3_moe,
        qwen3_next,
        qwen3_vl,
        smollm3,
    )
else:
    from zoo.models import __getattr__ as __getattr__  # imports a family when it is first requested

__all__ = [
    "Completion",
    "Engine",
    "MTPDraft",
    "ModelDraft",
    "NGramDraft",
    "Sampling",
    "capture",
    "complete",
    "config",
    "decide",
    "embed",
    "evaluate",
    "fingerprint",
    "generate",
    "init",
    "inspect",
    "keep_programs",
    "load",
    "lora",
    "make_mesh",
    "names",
    "peft",
    "rank",
    "register",
    "save",
    "stream",
    "surgery",
    "tokenizer",
]
# The families. `python -m tests.zoo.make_table` writes their names, here and above.
__all__ += [
    "deepseek2",
    "deepseek3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "glm4_moe",
    "gpt3",
    "gpt_oss",
    "granite",
    "granite4",
    "kimi_linear",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama",
    "llama4",
    "mimo_v2_flash",
    "minimax_m2",
    "mistral",
    "mistral3",
    "mistral4",
    "mixtral",
    "muse_glimmer",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "smollm3",
]


def __dir__() -> list[str]:
    """Lists families that were not imported yet, too, for completion in a notebook."""
    return sorted({*globals(), *__all__})
