"""Writes golden/FAMILY.npz: what transformers computes on the checkpoints of tiny/.

python -m tests.zoo.make_golden [FAMILY ...]
"""

import pathlib
import sys
import tempfile

import numpy as np

from tests.zoo import tiny


def load(folder: pathlib.Path, dtype: str = "float32"):
    """transformers' model, with its eager attention."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def logits(model) -> np.ndarray:
    """What transformers' model, or the one of a folder, says of `tiny.TOKENS`."""
    import torch

    model = load(model) if isinstance(model, pathlib.Path) else model
    with torch.no_grad():
        return model(torch.tensor(tiny.TOKENS)).logits.float().numpy()


if __name__ == "__main__":
    for family in sys.argv[1:] or tiny.MODULES:
        with tempfile.TemporaryDirectory() as folder:
            names = tiny.MODULES[family].CONFIGS
            golden = {name: logits(tiny.write(pathlib.Path(folder) / name, name)) for name in names}
        np.savez_compressed(pathlib.Path(__file__).parent / "golden" / f"{family}.npz", **golden)
        for name, values in golden.items():
            print(f"{name:24s} largest logit {np.abs(values).max():.2f}")
