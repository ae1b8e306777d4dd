"""Writes golden/vision/FAMILY.npz: transformers' logits and features of the checkpoints `SEEING` of tiny/.

python -m tests.zoo.make_golden_vision [FAMILY ...]
"""

import pathlib
import sys
import tempfile

import numpy as np

from tests.zoo import tiny
from tests.zoo.seeing import GOLDEN


if __name__ == "__main__":
    for family in sys.argv[1:] or sorted({checkpoint.family.name for checkpoint in tiny.SEEING.values()}):
        golden = {}
        for checkpoint in tiny.MODULES[family].SEEING:
            with tempfile.TemporaryDirectory() as folder:
                values = checkpoint.computed(checkpoint.theirs(checkpoint.write(pathlib.Path(folder))))
            golden |= {f"{checkpoint.name} {key}": value for key, value in values.items()}
        np.savez_compressed(GOLDEN / f"{family}.npz", **golden)
        for key, array in golden.items():
            print(f"{key:28s} {array.shape}, largest {np.abs(array).max():.2f}, deviation {array.std():.2f}")
