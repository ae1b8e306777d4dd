"""Tiny random checkpoints in the Hub's layout, one for each feature of a family; the same bits on every machine.

Tensor names and shapes are written out here, not taken from the code under test. Norms are not ones and logits are of
size 10, because defaults hide errors; sequences are longer than every window and original context.
"""

import json
import pathlib
import string
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers


COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, hidden_act="silu", rope_theta=10000.0,
    tie_word_embeddings=False, torch_dtype="float32", attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.02, use_cache=True,
)  # fmt: skip
LLAMA = COMMON | dict(model_type="llama", architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5)
QWEN3 = COMMON | dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], rms_norm_eps=1e-6, attention_bias=False,
    max_window_layers=3, use_sliding_window=False, sliding_window=None,
)  # fmt: skip
S, F = "sliding_attention", "full_attention"
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def sliding(types: str) -> dict:
    kinds = [S if kind == "s" else F for kind in types]
    return dict(layer_types=kinds, num_hidden_layers=len(kinds), use_sliding_window=True, sliding_window=4)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_theta")} | dict(num_key_value_heads=4),
    "llama-rope3": LLAMA | dict(rope_scaling=LLAMA3_ROPE),
    "llama-rope3-new": {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    | dict(rope_parameters=LLAMA3_ROPE | dict(rope_theta=10000.0)),
    "llama-linear": LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)),
    "llama-tied-biases": LLAMA | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | dict(tie_word_embeddings=True),
    "qwen3-yarn": QWEN3 | dict(rope_scaling=YARN),
    "qwen3-window-tail": QWEN3 | sliding("ssfssfss"),
    "qwen3-window-head": QWEN3 | sliding("ffsfsfs"),
    "qwen3-window-max": QWEN3 | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
}

TOKENS = np.random.RandomState(0).randint(0, 64, (2, 40))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as stored on the Hub."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim", d // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    out = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        out |= {f"{layer}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        for part, matrices, bias in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
            out |= {f"{layer}.{part}.{name}.weight": shape for name, shape in matrices.items()}
            if config.get(bias):
                out |= {f"{layer}.{part}.{name}.bias": shape[:1] for name, shape in matrices.items()}
        if config["model_type"] == "qwen3":
            out |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
    return out


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random float32 tensors from numpy's legacy generator, whose stream never changes."""
    random = np.random.RandomState(1)
    out = {}
    for name, shape in sorted(shapes(config).items()):
        noise = random.standard_normal(shape)
        out[name] = (1 + 0.3 * noise if "norm" in name else 0.4 * noise).astype(np.float32)
    return out


def write(folder: pathlib.Path, name: str, **changes: Any) -> pathlib.Path:
    """The checkpoint called `name`, as files; `changes` overwrite keys of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name] | changes
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors(CONFIGS[name]), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: pathlib.Path) -> None:
    """A tokenizer of 64 tokens: the space, letters, digits, and the end."""
    characters = " " + string.ascii_letters + string.digits
    vocabulary = {character: i for i, character in enumerate(characters)} | {"<end>": 63}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
