"""Exports in mlx-lm's own reader, on a CPU: its logits are transformers'. docs/interop.md has other readers."""

import pytest

from tests import interop


# A family for each kind of layer that mlx-lm computes as transformers does, windows and scalings aside.
NAMES = ("llama", "qwen3", "qwen3_moe", "deepseek3", "olmo3", "granite", "lfm2", "nemotron_h", "qwen3_next")


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # of mlx-lm and transformers
@pytest.mark.parametrize("name", NAMES)
def test_in_mlx(name, tmp_path):
    pytest.importorskip("mlx_lm")
    assert interop.mlx(name, interop.exported(name, tmp_path)) < interop.CLOSE
