"""GPT-3 and GPT-2, with GPT-2's config.json and tensors."""

from typing import Any

import numpy as np


GPT2 = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=40,
    n_ctx=40, layer_norm_epsilon=1e-5, activation_function="gelu_new", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    initializer_range=0.02, bos_token_id=1, eos_token_id=2, summary_type="cls_index", summary_use_proj=True,
    summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True, torch_dtype="float32",
    task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt3": GPT2,
    "gpt3-inner": GPT2 | dict(n_inner=48, n_positions=48, layer_norm_epsilon=1e-3, reorder_and_upcast_attn=True),
}
STACK = "gpt3"
PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt3-52k": 52_464, "gpt3-6b": 5_588_736_000, "gpt3-22b": 22_049_107_968, "gpt3-175b": 174_780_997_632,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as transformers saves them; Conv1D's matrices are (in, out)."""
    d, inner = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
    norm = lambda name: {f"transformer.{name}.{part}": (d,) for part in ("weight", "bias")}
    out: dict[str, tuple[int, ...]] = norm("ln_f") | {
        "transformer.wte.weight": (config["vocab_size"], d),
        "transformer.wpe.weight": (config["n_positions"], d),
    }
    for n in range(config["n_layer"]):
        out |= norm(f"h.{n}.ln_1") | norm(f"h.{n}.ln_2")
        maps = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, inner), "mlp.c_proj": (inner, d)}
        for name, shape in maps.items():
            out |= {f"transformer.h.{n}.{name}.weight": shape, f"transformer.h.{n}.{name}.bias": shape[1:]}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    return 1 + 0.3 * noise if ".ln_" in name and name.endswith("weight") else 0.4 * noise
