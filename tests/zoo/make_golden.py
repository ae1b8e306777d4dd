"""Writes golden/FAMILY.npz: transformers' logits of the checkpoints in tiny/.

python -m tests.zoo.make_golden [FAMILY ...]
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from tests.zoo import tiny


_QWEN = dict(vision_config=dict(depth=1, hidden_size=8, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[]))
_QWEN2_5 = dict(vision_config=dict(depth=1, hidden_size=8, num_heads=2, out_hidden_size=32))
_MUSE = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=2)
# model_type of a text model -> the name of the whole model in transformers, and the sizes of its tower.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl_text": ("Qwen2_5_VL", _QWEN2_5),
    "qwen3_vl_text": ("Qwen3VL", _QWEN),
    "qwen3_vl_moe_text": ("Qwen3VLMoe", _QWEN),
    "muse_glimmer_text": ("MuseGlimmer", dict(vision_config=_MUSE, out_hidden_size=32, projector_hidden_size=8)),
}


def load(folder: pathlib.Path, dtype: str = "float32"):
    """Loads transformers' model, with its eager attention."""
    import transformers

    # transformers has a class of Mistral 4's text models, but does not list it here.
    transformers.AutoModelForCausalLM.register(
        transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
    )
    if json.loads((folder / "config.json").read_text())["model_type"] in WHOLE:
        return _text_of_whole(folder, dtype)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def with_rounded_routers(model):
    """Rounds routers' weights to bfloat16, as released files have them; since 5.24 some families keep float32 ones."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    return model


def _text_of_whole(folder: pathlib.Path, dtype: str):
    """Loads a text model as a whole model with an unused tower; transformers has no text class with a head."""
    import safetensors.torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    family, sizes = WHOLE[config.model_type]
    whole = getattr(transformers, f"{family}Config")(
        text_config=config.to_dict(), tie_word_embeddings=config.tie_word_embeddings, **sizes
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    with tempfile.TemporaryDirectory() as scratch:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        rename = lambda name: name.replace("model.", "model.language_model.", 1)
        safetensors.torch.save_file({rename(n): t for n, t in tensors.items()}, f"{scratch}/model.safetensors")
        whole.save_pretrained(scratch)
        model, info = model.from_pretrained(scratch, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    towers = ("model.visual.", "model.vision_")
    assert all(name.startswith(towers) for name in info.pop("missing_keys")) and not any(info.values()), info
    return model.eval()


def logits(model) -> np.ndarray:
    """Returns the logits of `tiny.TOKENS` by transformers' model, or by the one of a folder."""
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
