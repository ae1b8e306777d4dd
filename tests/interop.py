"""Writes the table of docs/interop.md: whose readers take a model that we have exported. `python -m tests.interop`.

Each family's first tiny checkpoint is loaded, and exported by `zoo.save`. A reader that is not installed has an empty
column:

- transformers and mlx-lm (`pip install 'mlx-lm[cpu]'`) compute logits, which are compared with the golden ones;
- vLLM's loader makes its model on the CPU and reads the weights; none of its kernels runs;
- llama.cpp's converter, of the folder LLAMA_CPP, writes GGUF, without a vocabulary, since it knows tokenizers
  by name.
"""

import contextlib
import importlib
import importlib.util
import io
import math
import os
import pathlib
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import convert.tensors
import zoo
from tests.transcripts import ROOT
from tests.zoo import make_golden, tiny
from zoo.models import FAMILIES


PAGE = ROOT / "docs" / "interop.md"
CLOSE = 1e-4  # largest difference of logits, as a share of the largest logit, that counts as the same


def case(family: str) -> str:
    return next(iter(tiny.MODULES[family].CONFIGS))


def error(family: str, logits: np.ndarray) -> float:
    golden = np.load(ROOT / "tests" / "zoo" / "golden" / f"{family}.npz")[case(family)]
    return float(np.abs(logits - golden).max() / np.abs(golden).max())


def exported(family: str, folder: pathlib.Path) -> pathlib.Path:
    """Exports the family's tiny checkpoint, and returns the folder."""
    source = tiny.write(folder / "source", case(family))
    tiny.write_tokenizer(source)
    zoo.save(zoo.load(source), folder / "exported")
    return folder / "exported"


# ======================================================================================================================
# The readers. Each returns the largest difference of logits, or None if it only reads, and raises what it refuses with.
# ======================================================================================================================


def transformers(family: str, folder: pathlib.Path) -> float:
    return error(family, make_golden.logits(folder))


def mlx(family: str, folder: pathlib.Path) -> float:
    core, utils = importlib.import_module("mlx.core"), importlib.import_module("mlx_lm.utils")
    core.set_default_device(core.cpu)
    model, _ = utils.load_model(folder)
    return error(family, np.array(model(core.array(np.asarray(tiny.TOKENS))).astype(core.float32)))


def vllm(family: str, folder: pathlib.Path) -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()  # which would import all of vLLM once for each family
    config, distributed = importlib.import_module("vllm.config"), importlib.import_module("vllm.distributed")
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    model = config.ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True)
    whole = config.VllmConfig(model_config=model, device_config=config.DeviceConfig(device="cpu"))
    with config.set_current_vllm_config(whole):
        if not distributed.model_parallel_is_initialized():
            distributed.init_distributed_environment(1, 0, "tcp://127.0.0.1:29534", 0, "gloo")
            distributed.initialize_model_parallel(1, 1)
        made = loaders.utils.initialize_model(vllm_config=whole, model_config=model)
        loaders.get_model_loader(whole.load_config).load_weights(made, model)


def llama_cpp(family: str, folder: pathlib.Path) -> None:
    """Converts, and compares the number of parameters, since the converter reorders and joins some tensors.

    Raises:
        AssertionError: the file has fewer parameters.
    """
    for path in (".", "gguf-py"):
        sys.path.insert(0, str(pathlib.Path(os.environ["LLAMA_CPP"]) / path))
    conversion, gguf = importlib.import_module("conversion"), importlib.import_module("gguf")
    base = conversion.ModelBase
    hparams = base.load_hparams(folder, False)
    kind = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    kind.set_vocab = lambda self: None
    file = folder.parent / "model.gguf"
    kind(folder, gguf.LlamaFileType.ALL_F32, file, model_name="tiny").write()
    found = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors)
    ours = sum(math.prod(tensor.shape) for tensor in convert.tensors.open_tensors(folder).values())
    assert found >= ours, f"{found:,} of {ours:,} parameters"


READERS: dict[str, tuple[str, Callable[[str, pathlib.Path], float | None]]] = {
    "transformers": ("transformers", transformers),
    "mlx-lm": ("mlx_lm", mlx),
    "vLLM": ("vllm", vllm),
    "llama.cpp": ("gguf", llama_cpp),
}


def cell(reader: Callable[[str, pathlib.Path], float | None], family: str, folder: pathlib.Path) -> str:
    """Returns the result of a reader in a few words."""
    try:
        found = reader(family, folder)
    except Exception as error:
        print(f"{family}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        return "no"
    if not found:
        return "read" if found is None else "equal"
    return f"{found:.0e}" if found < CLOSE else f"**{found:.0e}**"


def rows() -> list[str]:
    installed = {
        title: reader for title, (package, reader) in READERS.items() if importlib.util.find_spec(package) is not None
    }
    found = [f"| | {' | '.join(READERS)} |", f"|---|{'---|' * len(READERS)}"]
    for family in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = exported(family, pathlib.Path(scratch))
            with contextlib.redirect_stdout(io.StringIO()):
                cells = [cell(installed[title], family, folder) if title in installed else "" for title in READERS]
        found.append(f"| {family} | {' | '.join(cells)} |")
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    table = "\n".join(["<!-- readers: python -m tests.interop -->", "", *rows(), "", "<!-- end -->"])
    text = PAGE.read_text()
    PAGE.write_text(re.sub(r"<!-- readers.*?<!-- end -->", lambda _: table, text, flags=re.DOTALL))
