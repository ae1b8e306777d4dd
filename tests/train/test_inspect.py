"""What train.inspect says of data: exact numbers, marks, its page, and that a store has what was put into it."""

import html
import json
import re

import pytest

from tests.train.conftest import command
from train import inspect, prepare
from train.inspect import CUT, LEARNT, UNLEARNT, InspectOptions


SCRIPT = "<script>alert('&')</script>"
LONG = "x y " * 60


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight records: three are the same, one has its answer beyond the row, one loses its end, one is markup."""
    folder = tmp_path_factory.mktemp("data")
    same, another = chat("What?", "This."), chat("Why?", "So.")
    records = [
        same,
        another,
        same,
        chat(LONG, "late"),
        same,
        chat("Long?", LONG),
        another | {"id": 7},
        chat("a", SCRIPT),
    ]
    return write(folder / "chats.jsonl", *records)


def test_numbers(data, tmp_path):
    (found,) = inspect.main(InspectOptions(data=(data,), seq_len=64, samples=8, html=tmp_path / "page.html"))
    table = found.table
    assert table["records"] == "8, of which 8 are looked at" and table["documents"] == "8"
    assert table["cut at the row's end"] == f"2 (25.0 %) records, such as {data}, line 4"
    assert table["nothing to learn in"] == f"1 (12.5 %) records, such as {data}, line 4"
    assert (
        table["the same again"] == f"3 (37.5 %) records have the tokens of one before; {data}, line 1 is there 3 times"
    )
    sizes = [sum(len(text) for text, _ in parts) for *_, ((_, parts),) in found.samples]
    assert [where.rpartition(" ")[2] for where, _ in found.samples] == [str(n) for n in range(1, 9)]
    assert len(set(sizes)) == 5 and sum(number for *_, number in found.bars) == 8
    assert sum(number for low, _, number in found.bars if low > 65) == 2 == sum(low == 66 for low, *_ in found.bars) * 2

    marks = lambda n: {mark: text for text, mark in found.samples[n].documents[0][1]}
    assert marks(0)[LEARNT].startswith("This.") and "What?" in marks(0)[UNLEARNT] and CUT not in marks(0)
    assert LEARNT not in marks(3) and "late" in marks(3)[CUT]
    assert "Long?" in marks(5)[UNLEARNT] and (marks(5)[LEARNT] + marks(5)[CUT]).startswith(LONG.strip())

    text = (tmp_path / "page.html").read_text()
    assert SCRIPT not in text and html.escape(SCRIPT) in text and "<script" not in text
    assert 'class="cut"' in text and text.count("<rect") == len(found.bars) and "{{" not in text
    assert not re.search(r"(src|href)=", text)


def test_some_of_the_records(data):
    (found,) = inspect.main(InspectOptions(data=(data,), seq_len=64, samples=2, records=3))
    assert found.table["records"] == "8, of which 3 are looked at"
    assert [where.rpartition(" ")[2] for where, _ in found.samples] == ["1", "8"]


@pytest.mark.parametrize("packing", ["fit", "concat", "off"])
def test_how_full_rows_are_is_what_a_store_has(data, tmp_path, packing):
    """And the store's own tables are of the same tokens."""
    text = write(tmp_path / "texts.jsonl", *({"text": "word " * n} for n in (3, 50, 90, 7, 7)))
    (found,) = inspect.main(InspectOptions(data=(text,), seq_len=32, packing=packing, samples=0, records=0))
    options = dict(data=(text,), model="tiny", seq_len=32, packing=packing, workers=1)
    content = prepare.main(prepare.PrepareOptions(**options, out=tmp_path / "store"))
    counts = content["splits"]["train"]
    full = 100 * counts["tokens"] / (32 * counts["rows"])
    assert f"{packing} {full:.1f} %" in found.table["filled"]
    assert found.table["tokens"] == f"{counts['tokens']:,} in rows, of which {counts['learnt']:,} are learnt"

    (stored,) = inspect.main(InspectOptions(data=(str(tmp_path / "store"),), samples=1, verify=True))
    assert stored.title.endswith("store, train") and stored.table["SHA-256"] == "as written"
    assert stored.table["looked at"] == f"{counts['rows']:,} rows"
    assert sum(number for *_, number in stored.bars) == counts["documents"]
    if packing == "off":
        assert stored.table["the same again"].startswith("2 ")
    names = [title.partition(",")[0] for title, _ in stored.samples[0].documents]
    assert names == [f"document {n}" for n in range(1, len(names) + 1)]


def test_pairs(tmp_path):
    pair = {"prompt": "Say it. ", "chosen": "Yes.", "rejected": "No, no."}
    lost = {"prompt": LONG, "chosen": "Yes.", "rejected": "No."}
    path = write(tmp_path / "pairs.jsonl", pair, lost, pair, pair | {"chosen": LONG})
    (found,) = inspect.main(InspectOptions(data=(path,), kind="preferences", seq_len=64, samples=4))
    assert found.table["documents"] == "8" and found.unit == "pair"
    assert found.table["nothing to learn in"] == f"1 (25.0 %) records, such as {path}, line 2"
    assert found.table["cut at the row's end"] == f"1 (25.0 %) records, such as {path}, line 4"
    assert found.table["the same again"].startswith("1 (25.0 %) records")
    assert [title.partition(",")[0] for title, _ in found.samples[0].documents] == ["chosen", "rejected"]
    (kto,) = inspect.main(InspectOptions(data=(path,), kind="kto", seq_len=64, samples=1))
    assert [title.partition(",")[0] for title, _ in kto.samples[0].documents] == [
        "desirable", "another's", "undesirable", "another's",
    ]  # fmt: skip
    assert kto.table["the same again"].startswith("1 (25.0 %) records")


def test_bad_input(data, tmp_path):
    command("train.inspect", data, "--samples", 0)
    broken = write(tmp_path / "broken.jsonl", {"question": "?"})
    incomplete = tmp_path / "store"
    incomplete.mkdir()
    (incomplete / "about.json").write_text("{}")
    for arguments, problem in [
        ((tmp_path / "none",), "none is neither a file nor a folder|There is no"),
        ((broken,), r"broken.jsonl, line 1: the record has question \(str\), but must have messages"),
        ((data, "--verify"), "--verify: .* is no prepared store"),
        ((data, "--seq-len", 0), "--seq-len 0 must be at least 1"),
        ((data, "--records", -1), "--records -1 must be at least 0"),
        ((incomplete,), "is not complete: run `python -m train.prepare`"),
    ]:
        with pytest.raises(SystemExit, match=problem):
            command("train.inspect", *arguments)


def test_a_store_of_another_tokenizer(base, tmp_path):
    path = write(tmp_path / "texts.jsonl", {"text": "word"})
    prepare.main(prepare.PrepareOptions(data=(path,), model="tiny", seq_len=8, workers=1, out=tmp_path / "store"))
    with pytest.raises(ValueError, match=r"was prepared for tiny with tokenizer .*, and this run has"):
        inspect.main(InspectOptions(data=(str(tmp_path / "store"),), model=str(base / "model")))
    file = next((tmp_path / "store").glob("*.array_record"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="is not what was written: copy the store again"):
        inspect.main(InspectOptions(data=(str(tmp_path / "store"),), verify=True))
