"""Writes golden/vision/FAMILY.npz: transformers' logits and features of the checkpoints in seeing/.

python -m tests.zoo.make_golden_vision [FAMILY ...]
"""

import pathlib
import sys
import tempfile

import numpy as np

from tests.zoo import seeing


if __name__ == "__main__":
    for family in sys.argv[1:] or seeing.MODULES:
        golden = {}
        for checkpoint in seeing.MODULES[family].CHECKPOINTS:
            with tempfile.TemporaryDirectory() as folder:
                values = checkpoint.computed(checkpoint.theirs(checkpoint.write(pathlib.Path(folder))))
            golden |= {f"{checkpoint.name} {key}": value for key, value in values.items()}
        np.savez_compressed(seeing.GOLDEN / f"{family}.npz", **golden)
        for key, array in golden.items():
            print(f"{key:28s} {array.shape}, largest {np.abs(array).max():.2f}, deviation {array.std():.2f}")
