"""The embedded default model: its training text, its tokenizer, its size, and the instructions to fine-tune on."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
import zoo
from train.tiny.__main__ import documents, train_tokenizer, write_model_folder
from zoo.text.tokenizer import Tokenizer


FOLDER = pathlib.Path(zoo.__file__).parent / "tiny"
INSTRUCTIONS = pathlib.Path(train.__file__).parent / "tiny" / "instructions.jsonl"
LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))

# A process of its own, so that neither the order of sets nor the modules that pytest imported are the same.
DIGEST = """
import hashlib, pathlib, sysconfig
from train.tiny.__main__ import documents
text = "\\n".join(documents(pathlib.Path(sysconfig.get_path("stdlib"))))
print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return list(documents(LIBRARY))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in INSTRUCTIONS.read_text().splitlines()]


@pytest.mark.thorough
def test_corpus_is_the_same_every_time(corpus):
    command = [sys.executable, "-c", DIGEST]
    digest = subprocess.check_output(
        command, env=os.environ | {"PYTHONHASHSEED": "1"}, cwd=FOLDER.parents[1], text=True
    )
    assert hashlib.sha256("\n".join(corpus).encode()).hexdigest() == digest.strip()


@pytest.mark.thorough
def test_corpus_documents_python(corpus):
    assert 2_000_000 < sum(map(len, corpus)) < 4_000_000
    assert len({document.split("\n\n", 1)[1] for document in corpus}) == len(corpus)  # no text occurs twice
    titles = {document.split("\n\n")[0] for document in corpus}
    # Functions in Python, in C, built in, and known under another name, and a topic of the language reference.
    assert {"textwrap.dedent(text)", "math.sqrt(x, /)", "len(obj, /)", "os.getcwd()", "class list", "with"} <= titles


@pytest.mark.thorough
def test_corpus_holds_the_standard_library_only(tmp_path, corpus):
    for file in "textwrap", "site-packages/other", "dist-packages/other", "other", "json/tests/other", "idlelib/other":
        path = tmp_path / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'def f(x):\n    """The text of {file}, as it is written here."""\n')
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text('topics = {"with": "The text of a topic."}')
    found = [document for document in documents(tmp_path) if "The text of" in document and document not in corpus]
    assert found == ["textwrap.f(x)\n\nThe text of textwrap, as it is written here.", "with\n\nThe text of a topic."]
    assert not [document for document in corpus if "copyright (c)" in document.lower()]


@pytest.mark.thorough
def test_folder_is_made_as_it_is_embedded(tmp_path, corpus):
    write_model_folder(tmp_path, train_tokenizer(corpus))
    assert zoo.config(str(tmp_path)) == zoo.config("tiny")
    for name in "generation_config.json", "tokenizer_config.json":
        assert json.loads((tmp_path / name).read_text()) == json.loads((FOLDER / name).read_text())
    # The text, and so the vocabulary, may be that of another version of Python.
    ours, embedded = (Tokenizer(folder) for folder in (tmp_path, FOLDER))
    assert ours.vocab_size == embedded.vocab_size == zoo.config("tiny").vocab_size == 2048
    assert ours.eos == embedded.eos == (0, 2)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_tokenizer_round_trips_every_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), special=True) == text


def test_folder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 4_000_000


def test_instructions_are_valid(tokenizer, chats):
    assert len(chats) > 300
    assert len({json.dumps(chat) for chat in chats}) == len(chats)
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        assert all(message["content"] == message["content"].strip() != "" for message in chat)
        assert all(len(message["content"].split()) <= 40 for message in chat)
        assert len(tokenizer.encode(tokenizer.render(chat), special=False)) < 256


def test_held_out_instructions_ask_in_other_words_what_was_taught(chats):
    held_out = len(chats) // 20
    taught = {chat[1]["content"] for chat in chats[:-held_out]}
    asked = {chat[0]["content"] for chat in chats[:-held_out]}
    for question, answer in chats[-held_out:]:
        assert answer["content"] in taught
        assert question["content"] not in asked


def test_every_answer_and_its_end_is_learnt(tokenizer, chats):
    for chat in chats:
        ((ids, mask),) = tokenizer.encode_chat(chat)
        learnt = tokenizer.decode([id for id, one in zip(ids, mask, strict=True) if one], special=True)
        assert learnt == "".join(f"{message['content']}<|im_end|>" for message in chat[1::2])


@pytest.mark.live
def test_transformers_reads_it_alike(tokenizer, chats, corpus):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for chat in chats[::7]:
        text = tokenizer.render(chat)
        assert theirs.apply_chat_template(chat, tokenize=False) == text
        opened = theirs.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        assert opened == tokenizer.render(chat[:1], add_generation_prompt=True)
        encoded = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert [(encoded["input_ids"], encoded["assistant_masks"])] == tokenizer.encode_chat(chat)
    for document in corpus[::100]:
        assert theirs(document)["input_ids"] == tokenizer.encode(document)
    assert transformers.AutoConfig.from_pretrained(FOLDER).model_type == "qwen3"
