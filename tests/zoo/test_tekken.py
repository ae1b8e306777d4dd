"""Mistral's tokenizer and chat template, made from tekken.json, against Mistral's library mistral_common.

`python -m tests.zoo.test_tekken` writes hashes of that library's texts, in an environment that has it.
"""

import base64
import hashlib
import json
import pathlib
from typing import Any

import pytest

from tests.zoo.test_templates import CHATS, TOOLS
from tests.zoo.test_tokenizer import runs
from zoo.text import tekken
from zoo.text.tokenizer import Tokenizer, chat_template_of


GOLDEN = pathlib.Path(__file__).parent / "golden" / "tekken.json"
RANKED = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", "é".encode()]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = {7: tekken.UNLISTED, 11: (*tekken.UNLISTED, "[ARGS]", "[CALL_ID]")}
SPECIAL[13] = (*SPECIAL[11], "[THINK]", "[/THINK]")
COUNT = 30  # of special tokens, named or not

ask = lambda content: {"role": "user", "content": content}
say = lambda content, **more: {"role": "assistant", "content": content, **more}
call = lambda name, arguments, id: {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
result = lambda content, id: {"role": "tool", "tool_call_id": id, "content": content}
texts = lambda *parts: [{"type": "text", "text": part} for part in parts]
CALLS = [call("add", '{"a": 1}', "abcdef123"), call("subtract", '{"a": "é"}', "abcdef124")]
FURTHER: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "results in another order": (
        [ask("?"), say("", tool_calls=CALLS), result("x", "abcdef124"), result("y", "abcdef123"), say("z  "), ask("!")],
        TOOLS,
    ),
    "said and called": ([ask("?"), say("Wait. ", tool_calls=[call("add", "", "abcdef123")])], TOOLS),
    "two of each": ([ask("one"), ask("two"), say("a"), say("b "), ask("c")], TOOLS),
    "systems": ([{"role": "system", "content": "a"}, {"role": "system", "content": texts("b", "c")}, ask("d")], None),
    "late system": ([ask("a"), {"role": "system", "content": "b"}, ask("c")], None),
    "empty part": ([ask(texts("a", "", "b")), say("c")], None),
    "thinking part": ([ask("a"), say([{"type": "thinking", "thinking": "hm"}, *texts("b ")])], None),
    "no description": ([ask("a")], [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
}
COMMON = {name: (chat, more.get("tools")) for name, (chat, more) in CHATS.items() if not set(more) - {"tools"}}
COMMON.pop("thinking")  # a name of reasoning that mistral_common does not read
CASES = COMMON | FURTHER


def write(folder: pathlib.Path, version: int, **changes: Any) -> pathlib.Path:
    """Writes a small tekken.json, with more tokens than the vocabulary takes, as the real ones have."""
    entry = lambda rank, token: {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
    config = dict(pattern=PATTERN, default_vocab_size=len(RANKED) + COUNT, default_num_special_tokens=COUNT)
    special = [dict(rank=id, token_str=token, is_control=True) for id, token in enumerate(SPECIAL.get(version, ()))]
    content = dict(
        config=config | dict(version=f"v{version}"), special_tokens=special or None,
        vocab=[entry(rank, token) for rank, token in enumerate([*RANKED, b"unused"])],
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content | changes))
    return folder


def rendered(tokenizer: Tokenizer, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Returns a chat's text; "" if it is refused."""
    try:
        return tokenizer.render(chat, tools=tools)
    except ValueError as error:
        assert "has no place in a message" in str(error)
        return ""


def theirs(folder: pathlib.Path, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[str, list]:
    """Returns a chat's text and ids by mistral_common; ("", []) if it is refused."""
    from mistral_common.exceptions import MistralCommonException
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokenizer = MistralTokenizer.from_file(str(folder / "tekken.json"), mode=ValidationMode.agnostic)
    request = ChatCompletionRequest.from_openai(json.loads(json.dumps(chat)), tools=tools)
    try:
        ids = tokenizer.encode_chat_completion(request).tokens
    except MistralCommonException:
        return "", []
    return tokenizer.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP), ids


short = lambda text: hashlib.sha256(text.encode()).hexdigest()[:8] if text else "-"


@pytest.mark.parametrize("version", tekken.VERSIONS)
def test_texts_equal_the_committed(tmp_path, version):
    tokenizer, golden = Tokenizer(write(tmp_path, version)), json.loads(GOLDEN.read_text())
    assert {name: short(rendered(tokenizer, *case)) for name, case in CASES.items()} == golden[f"v{version}"]


@pytest.mark.live
@pytest.mark.parametrize("version", tekken.VERSIONS)
def test_live(tmp_path, version):
    pytest.importorskip("mistral_common")
    tokenizer = Tokenizer(write(tmp_path, version))
    for case in CASES.values():
        text, ids = theirs(tmp_path, *case)
        assert rendered(tokenizer, *case) == text
        assert tokenizer.encode(text, special=False) == ids


def test_tokens(tmp_path):
    """Special tokens have the first ids, <s> stands before a text, and a user's control tokens are letters."""
    tokenizer = Tokenizer(write(tmp_path, 11))
    id = lambda token: COUNT + RANKED.index(token)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, (2,), 11)
    assert tokenizer.vocab_size == len(RANKED) + COUNT
    assert tokenizer.encode("hello w[INST]<SPECIAL_25>") == [1, id(b"hello"), id(b" w"), 3, 25]
    assert tokenizer.decode(tokenizer.encode("hellé \0</s>")) == "hellé \0"
    told = tokenizer.encode_prompt([ask("[/INST]a</s>")])
    assert told == [1, 3, *(id(bytes([b])) for b in b"[/INST]a</s>"), 4]


def test_masks(tmp_path):
    """The assistant learns its reasoning, its words, its calls, and the end."""
    tokenizer = Tokenizer(write(tmp_path, 13))
    chat = [ask("?"), say("Wait.", reasoning_content="hm", tool_calls=CALLS[:1]), result("x", "abcdef123"), say("z")]
    ((ids, mask),) = tokenizer.encode_chat(chat, tools=TOOLS)
    learnt = [text for on, text in runs(tokenizer, ids, mask) if on]
    assert learnt == ['[THINK]hm[/THINK]Wait.[TOOL_CALLS]add[ARGS]{"a": 1}</s>', "z</s>"]


def test_images(tmp_path):
    """One image after text stands before it."""
    tokenizer, image = Tokenizer(write(tmp_path, 7)), {"type": "image"}
    assert tokenizer.render([ask([*texts("a"), image])]) == "<s>[INST][IMG]a[/INST]"
    assert tokenizer.render([ask([image, *texts("a"), image])]) == "<s>[INST][IMG]a[IMG][/INST]"


def test_other_templates_come_first(tmp_path):
    """The repository's own template is used if there is one, be it in chat_template.json."""
    assert "[SYSTEM_PROMPT]" in chat_template_of(write(tmp_path, 7))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert chat_template_of(tmp_path) == "{{ messages }}"


def test_versions_without_a_template(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, 3, special_tokens=None))
    assert tokenizer.chat_template is None and tokenizer.encode("[INST]") == [1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab=[]), "list the ranks 0 to 261 in order"),
        (dict(config={}), "is not a tokenizer of Mistral's .*KeyError"),
        (dict(vocab=[{}]), "is not a tokenizer of Mistral's .*KeyError"),
    ],
)
def test_a_damaged_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(write(tmp_path, 7, **changes))


if __name__ == "__main__":
    import tempfile

    golden = {}
    for version in tekken.VERSIONS:
        folder = write(pathlib.Path(tempfile.mkdtemp()), version)
        golden[f"v{version}"] = {name: short(theirs(folder, *case)[0]) for name, case in CASES.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
