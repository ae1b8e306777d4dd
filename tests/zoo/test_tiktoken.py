"""Kimi's tokenizer, built from tiktoken.model, against the plain algorithm."""

import base64
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.text import tiktoken
from zoo.text.tokenizer import Tokenizer


MERGED = [
    "he",
    "ll",
    "hello",
    " w",
    "or",
    " wor",
    "ld",
    " world",
    "中".encode()[:2],
    "中",
    "文",
    "中文",
    "12",
    "123",
    "  ",
]
RANKED = [bytes([b]) for b in range(256)] + [t if isinstance(t, bytes) else t.encode() for t in MERGED]
RANKS = {token: rank for rank, token in enumerate(RANKED)}
SPECIAL = {len(RANKED): "[BOS]", len(RANKED) + 2: "<|im_end|>"}


def write(folder, special=SPECIAL):
    """Writes the files of such a tokenizer."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(RANKED)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    config = {"added_tokens_decoder": {str(i): {"content": c} for i, c in special.items()}, "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("kimi")))


def merge(piece: bytes) -> list[int]:
    """Returns a token's id, or else merges bytes: repeatedly the pair whose union has the lowest rank."""
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([b]) for b in piece]
    while True:
        ranks = {i: RANKS[a + b] for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in RANKS}
        if not ranks:
            return [RANKS[part] for part in parts]
        i = min(ranks, key=ranks.__getitem__)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="helo wrd中文"))
def test_merges(tokenizer, text):
    # For these characters the pattern cuts in this way.
    pieces = re.findall(r"[中文]+|[^中文\S]?[a-z]+|\s+(?!\S)|\s+", text)
    assert tokenizer.encode(text) == [i for piece in pieces for i in merge(piece.encode())]


@pytest.mark.thorough
@settings(deadline=None, derandomize=True)
@given(st.text())
def test_every_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces(tokenizer):
    """Pieces are as published for Kimi K2: Chinese is separated from letters, and numbers have three digits at most."""
    read = tiktoken.read(tokenizer.folder / tiktoken.NAME, {})
    visible = lambda text: [read.decoder.decode([piece]) for piece, _ in read.pre_tokenizer.pre_tokenize_str(text)]
    assert visible("中文English混合") == ["中文", "English", "混合"]
    assert visible("北京市 Pascal") == ["北京市", " Pascal"]
    assert visible("1234567890") == ["123", "456", "789", "0"]
    assert visible("it's HTTPServer") == ["it's", " HTTPServer"]


def test_special_tokens(tokenizer):
    first = len(RANKED)
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.bos == first
    assert tokenizer.encode("[BOS]hello<|im_end|>") == [first, RANKED.index(b"hello"), first + 2]
    assert tokenizer.encode(f"<|reserved_token_{first + 1}|>") == [first + 1]


def test_a_damaged_file(tmp_path):
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nnot base64 1\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model is not a list"):
        Tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nIg== 2\n")
    with pytest.raises(ValueError, match=r"does not list the ranks"):
        Tokenizer(tmp_path)
