"""llama.cpp as a contestant: the same weights in a GGUF file, and a loop that decodes as its server does.

`pip install llama-cpp-python gguf` compiles it for this machine. A text keeps its place in llama.cpp's cache between
turns, rows that have ended take the next text at once, and prompts are read in the same calls as other rows draw.
"""

import ctypes
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
AT_ONCE = 512  # most tokens of a call


def write_gguf(folder: str) -> str:
    """Writes a Qwen3 in float32 as a GGUF file without a tokenizer, beside its checkpoint, and returns the path."""
    import gguf
    import safetensors.numpy

    path = pathlib.Path(folder)
    config = json.loads((path / "config.json").read_text())
    writer = gguf.GGUFWriter(path / "model.gguf", "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for name, tensor in safetensors.numpy.load_file(path / "model.safetensors").items():
        layer, of_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name), ""
        if layer:
            of_layer, name = f"blk.{layer[1]}.", f"{layer[2]}.weight"
        writer.add_tensor(f"{of_layer}{NAMES[name.removesuffix('.weight')]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path / "model.gguf")


class Llama:
    """A model of llama.cpp with a cache in float32 for `rows` texts of at most `room` tokens."""

    def __init__(self, path: str, rows: int, room: int):
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # kept, since C calls it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p())
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model: Any = llama_cpp.llama_model_load_from_file(path.encode(), options)
        of_context = llama_cpp.llama_context_default_params()
        of_context.n_ctx, of_context.n_seq_max, of_context.n_batch, of_context.n_ubatch = rows * room, rows, 2048, 512
        of_context.n_threads = of_context.n_threads_batch = len(os.sched_getaffinity(0))
        of_context.type_k = of_context.type_v = llama_cpp.GGML_TYPE_F32
        self._context: Any = llama_cpp.llama_init_from_model(self._model, of_context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch, self.rows = llama_cpp.llama_batch_init(2048, 0, 1), rows

    def clear(self) -> None:
        """Forgets all texts."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def forget(self, row: int) -> None:
        """Forgets the text of a row."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), row, -1, -1)

    def step(self, new: Sequence[tuple[int, int, list[int], bool]]) -> Iterator[int]:
        """Reads tokens of some rows (row, first position, tokens, draw), and yields the likeliest next token of each
        that draws.
        """
        batch, ends = self._batch, []
        batch.n_tokens = 0
        for row, start, tokens, draw in new:
            for n, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, start + n, 1, row
                batch.logits[at] = draw and n == len(tokens) - 1
                batch.n_tokens += 1
            if draw:
                ends.append(batch.n_tokens - 1)
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}.")
        for end in ends:
            logits = self._api.llama_get_logits_ith(self._context, end)
            yield int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def generate(llama: Llama, texts: Sequence[Sequence[tuple[list[int], int]]]) -> list[list[int]]:
    """Continues texts, each of some turns (what comes before, and the number of tokens to draw), with greedy tokens."""
    llama.clear()
    drawn: list[list[int]] = [[] for _ in texts]
    queue, free = list(range(len(texts)))[::-1], list(range(llama.rows))
    turn, left, at, unread = ({} for _ in range(4))  # of each text that has a row
    rows: dict[int, int] = {}
    while queue or rows:
        while queue and free:
            n = queue.pop()
            rows[n], turn[n], at[n] = free.pop(), 0, 0
            unread[n], left[n] = list(texts[n][0][0]), texts[n][0][1]
        new, count = [], 0
        for n in sorted(rows, key=lambda n: len(unread[n])):  # those that draw come first
            part = unread[n][: AT_ONCE - count]
            if part:
                new.append((n, part, len(part) == len(unread[n])))
                count += len(part)
        found = llama.step([(rows[n], at[n], part, draws) for n, part, draws in new])
        for n, part, draws in new:
            at[n], unread[n] = at[n] + len(part), unread[n][len(part) :]
            if draws:
                token = next(found)
                drawn[n].append(token)
                unread[n], left[n] = [token], left[n] - 1
                if not left[n]:
                    turn[n] += 1
                    if turn[n] == len(texts[n]):
                        row = rows.pop(n)
                        llama.forget(row)
                        free.append(row)
                    else:
                        unread[n], left[n] = [token, *texts[n][turn[n]][0]], texts[n][turn[n]][1]
    return drawn
