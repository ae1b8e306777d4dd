"""The report of train.inspect on data: exact numbers, marks, its page, and stores that hold the given data."""

import html
import json
import re

import pytest

import zoo
from tests.train.conftest import command
from train import inspect, prepare
from train.data.packing import survey
from train.data.records import open_records
from train.run import preparation
from train.run.inspection import CUT, LEARNT, UNLEARNT, InspectOptions


SCRIPT = "<script>alert('&')</script>"
LONG = "x y " * 60


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns eight records: three are equal, one has its answer beyond the row, one loses its end, one is markup."""
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
    (found,) = inspect.main(InspectOptions.of(data=(data,), seq_len=64, samples=8, html=tmp_path / "page.html"))
    table = found.table
    assert table["records"] == "8, of which 8 are looked at" and table["documents"] == "8"
    assert table["cut at the row's end"] == f"2 (25.0 %) records, such as {data}, line 4; {data}, line 6"
    assert table["nothing to learn in"] == f"1 (12.5 %) records, such as {data}, line 4"
    assert (
        table["the same again"] == "3 (37.5 %) records have the tokens of one before, such as "
        f"{data}, line 3; {data}, line 5; {data}, line 7; {data}, line 1 is there 3 times"
    )
    sizes = [sum(len(text) for text, _ in parts) for *_, ((_, parts),) in found.samples]
    assert [where.rpartition(" ")[2] for where, _ in found.samples] == [str(n) for n in range(1, 9)]
    assert len(set(sizes)) == 5 and sum(number for *_, number in found.bars) == 8
    assert sum(number for low, _, number in found.bars if low > 65) == 2 == sum(low == 66 for low, *_ in found.bars) * 2

    def marks(n):
        parts = found.samples[n].documents[0][1]
        return {mark: "".join(text for text, its in parts if its == mark) for _, mark in parts}

    assert marks(0)[LEARNT].startswith("This.") and "What?" in marks(0)[UNLEARNT] and CUT not in marks(0)
    assert LEARNT not in marks(3) and "late" in marks(3)[CUT]
    assert "Long?" in marks(5)[UNLEARNT] and (marks(5)[LEARNT] + marks(5)[CUT]).startswith(LONG.strip())

    text = (tmp_path / "page.html").read_text()
    assert SCRIPT not in text and html.escape(SCRIPT) in text and "<script" not in text
    assert 'class="cut"' in text and text.count("<rect") == len(found.bars) and "{{" not in text
    assert not re.search(r"(src|href)=", text)


def test_some_of_the_records(data):
    (found,) = inspect.main(InspectOptions.of(data=(data,), seq_len=64, samples=2, records=3))
    assert found.table["records"] == "8, of which 3 are looked at"
    assert [where.rpartition(" ")[2] for where, _ in found.samples] == ["1", "8"]


@pytest.fixture
def texts(tmp_path):
    """Writes texts of 6, 100, 180, 14 and 14 tokens. Cut at 32, they have 2 first pieces and 6 others."""
    return write(tmp_path / "texts.jsonl", *({"text": "word " * n} for n in (3, 50, 90, 7, 7)))


@pytest.mark.parametrize("long_texts", ["split", "cut"])
def test_how_full_rows_are(texts, long_texts):
    """The report's fill of each packing equals that of the survey, which makes the rows."""
    (found,) = inspect.main(InspectOptions.of(data=(texts,), seq_len=32, long_texts=long_texts, samples=0, records=0))
    (records, _), tokenizer = open_records(texts, 0.0), zoo.tokenizer("tiny")
    for part in found.table["filled"].removesuffix(" of the rows' tokens").split(", "):
        packing, full, _ = part.split(" ")
        made = survey(records, tokenizer, vocab_size=2048, seq_len=32, packing=packing, long_texts=long_texts)
        assert full == f"{100 * made.fill:.1f}"
    assert packing == "off"
    cut = "2 (40.0 %)" if long_texts == "cut" else "0 (0.0 %)"
    assert found.table["cut at the row's end"].startswith(f"{cut} records")


def test_a_store(texts, tmp_path):
    (found,) = inspect.main(InspectOptions.of(data=(texts,), seq_len=32, samples=0))
    options = dict(data=(texts,), model="tiny", seq_len=32, packing="off", workers=1)
    counts = prepare.main(preparation.PrepareOptions.of(**options, out=tmp_path / "store"))["splits"]["train"]
    assert found.table["tokens"] == f"{counts['tokens']:,} in rows, of which {counts['learnt']:,} are learnt"
    assert "off 75.5 %" in found.table["filled"] and counts["tokens"] == 314 and counts["rows"] == 13

    (stored,) = inspect.main(InspectOptions.of(data=(str(tmp_path / "store"),), samples=1, verify=True))
    assert stored.title.endswith("store, train") and stored.table["SHA-256"] == "as written"
    assert stored.table["looked at"] == "13 rows" and sum(number for *_, number in stored.bars) == 13
    assert stored.table["the same again"].startswith("7 (53.8 %) documents have the tokens of one before")
    ((title, _),) = stored.samples[0].documents
    assert title.startswith("document 1, ")

    file = next((tmp_path / "store").glob("*.array_record"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="is not what was written: copy the store again"):
        inspect.main(InspectOptions.of(data=(str(tmp_path / "store"),), verify=True))


def test_pairs(tmp_path):
    pair = {"prompt": "Say it. ", "chosen": "Yes.", "rejected": "No, no."}
    lost = {"prompt": LONG, "chosen": "Yes.", "rejected": "No."}
    path = write(tmp_path / "pairs.jsonl", pair, lost, pair, pair | {"chosen": LONG})
    (found,) = inspect.main(InspectOptions.of(data=(path,), kind="preferences", seq_len=64, samples=4))
    assert found.table["documents"] == "8" and found.unit == "pair"
    assert found.table["nothing to learn in"] == f"1 (25.0 %) records, such as {path}, line 2"
    assert found.table["cut at the row's end"] == f"1 (25.0 %) records, such as {path}, line 4"
    assert found.table["the same again"].startswith("1 (25.0 %) records")
    assert [title.partition(",")[0] for title, _ in found.samples[0].documents] == ["chosen", "rejected"]
    (kto,) = inspect.main(InspectOptions.of(data=(path,), kind="kto", seq_len=64, samples=1))
    assert [title.partition(",")[0] for title, _ in kto.samples[0].documents] == [
        "desirable", "another's", "undesirable", "another's",
    ]  # fmt: skip
    assert kto.table["the same again"].startswith("1 (25.0 %) records")


def test_bad_records(tmp_path, capsys):
    """Each kind of bad record is counted and placed; the rest is inspected. A run refuses with the same messages."""
    wrong = {"query": "?"}
    turn = {"messages": [{"role": "user"}]}
    records = [chat("a", "b"), wrong, turn, wrong, chat("c", ""), wrong, chat("a", "b"), wrong, wrong]
    path = write(tmp_path / "bad.jsonl", *records)
    with pytest.raises(ValueError, match=r"bad\.jsonl: a run would refuse the records"):
        inspect.main(InspectOptions.of(data=(path,), seq_len=64, samples=9, html=tmp_path / "page.html"))
    shown = " ".join(capsys.readouterr().out.split())
    first = f"{path}, line 2: the record has query (str), but must have messages"
    others = f"So in 4 others: {path}, line 4; {path}, line 6; 2 more."
    assert "cannot be learnt from 6 (66.7 %) records" in shown
    for text in (shown, html.unescape((tmp_path / "page.html").read_text())):
        assert first in text and others in text and "DATA@file.py:function makes fields of them" in text
        assert f"{path}, line 3: " in text
    assert f"1 (33.3 %) records have the tokens of one before, such as {path}, line 7" in html.unescape(text)
    with pytest.raises(SystemExit) as refused:
        command("train.sft", "--data", path, "--dry-run", "--hold-out", 0)
    said = str(refused.value)
    assert "6 of the 9 records looked at cannot be learnt from." in said and first in said and others in said


def test_bad_input(data, tmp_path):
    command("train.inspect", data, "--samples", 0)
    broken = write(tmp_path / "broken.jsonl", {"query": "?"})
    incomplete = tmp_path / "store"
    incomplete.mkdir()
    (incomplete / "about.json").write_text("{}")
    for arguments, problem in [
        ((tmp_path / "none",), "none is neither a file nor a folder|There is no"),
        ((broken,), "broken.jsonl: a run would refuse the records that cannot be learnt from, see above"),
        ((data, "--verify"), "--verify: .* is no prepared store"),
        ((data, "--seq-len", 0), "--seq-len 0 must be at least 1"),
        ((data, "--records", -1), "--records -1 must be at least 0"),
        ((incomplete,), "is not complete: run `python -m train.prepare`"),
    ]:
        with pytest.raises(SystemExit, match=problem):
            command("train.inspect", *arguments)


def test_a_store_of_another_tokenizer(base, tmp_path):
    path = write(tmp_path / "texts.jsonl", {"text": "word"})
    prepare.main(
        preparation.PrepareOptions.of(data=(path,), model="tiny", seq_len=8, workers=1, out=tmp_path / "store")
    )
    with pytest.raises(ValueError, match=r"was prepared for tiny with tokenizer .*, and this run has"):
        inspect.main(InspectOptions.of(data=(str(tmp_path / "store"),), model=str(base / "model")))
