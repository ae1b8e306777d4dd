"""Records: every file format, random access, errors, and the files of each split."""

import json
import pathlib
import sys

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from train.data.formats.examples import check_array_records
from train.data.formats.text import PIECE
from train.data.records import open_records


SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def f(fields): return {'text': 'x' * 90_000_000}",
            r"line 1: .*own.py:f returned 86 MiB or more, and",
        ),
        ("import sys\ndef f(fields): sys.exit()", r"line 1: .*own.py:f raised SystemExit"),
        ("raise SystemExit", r"own.py can't be imported: SystemExit"),
        ("def f(", r"own.py can't be imported: SyntaxError"),
    ],
)
def test_a_function_that_ends_the_process(tmp_path, code, message):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ValueError, match=message):
        open_records(f"{tmp_path / 'a.jsonl'}@{tmp_path / 'own.py'}:f")[0][0]


@pytest.mark.parametrize("share", [-1.0, 1.5, float("nan")])
def test_a_share_that_is_none(tmp_path, share):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=rf"--hold-out {share} is no share: give a number from 0 to 1"):
        open_records(tmp_path / "a.jsonl", share)


@pytest.fixture(autouse=True)
def cached(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def fields(path: pathlib.Path) -> list:
    records, valid = open_records(path, holdout=0.0)
    assert valid is None
    return [record.fields for record in records]


def write_array_record(path: pathlib.Path, records: list[bytes]):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def tf_example(**features: bytes | list[bytes] | int) -> bytes:
    """Serializes like tf.train.Example."""

    def field(number: int, data: bytes) -> bytes:
        size, encoded = len(data), b""
        while size > 127:
            encoded, size = encoded + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + encoded + bytes([size]) + data

    entries = b""
    for key, value in features.items():
        strings = value if isinstance(value, list) else [value]
        feature = (
            field(3, b"\x0a\x01\x05") if isinstance(value, int) else field(1, b"".join(field(1, s) for s in strings))
        )
        entries += field(1, field(1, key.encode()) + field(2, feature))
    return field(1, entries)


def test_json_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes('{"text": "é"}\n\n  \n{"text": "b",\t"x": 1}  \r\n{"text": "c"}'.encode())
    records, _ = open_records(file, holdout=0.0)
    assert [record.fields["text"] for record in records] == ["é", "b", "c"]
    assert [record.where for record in records] == [f"{file}, line {n}" for n in (1, 4, 5)]
    assert records[2].fields == {"text": "c"} and records[0].fields == {"text": "é"}


@pytest.mark.parametrize("line", ['{"text": "cut o', '[{"text": 1}]', "{", '"text"'])
def test_a_broken_line_is_found_at_once(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n' + line + '\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 3 is broken: each line must be a whole JSON object."):
        open_records(file)


def test_a_line_that_would_take_gigabytes_is_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": "' + "b" * 2**23 + '"}\n')
    with pytest.raises(
        ValueError, match=r"a.jsonl, line 2 has 8,388,621 bytes, and may have 8,388,608: split its text"
    ):
        open_records(file)


def test_a_broken_line_that_looks_whole_is_found_when_it_is_read(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": b}\n{"text": "c"}\n{"text": "\xff"}\n')
    records, _ = open_records(file, holdout=0.0)
    assert records[0] and records[2]
    with pytest.raises(ValueError, match=r"a.jsonl, line 2 is broken: Expecting value at column 10"):
        records[1]
    with pytest.raises(ValueError, match=r"a.jsonl, line 4 is not UTF-8 text"):
        records[3]


def test_json(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('\n [{"text": "a"},\n{"text": "b"}]')
    assert fields(file) == [{"text": "a"}, {"text": "b"}]
    assert open_records(file, holdout=0.0)[0][1].where == f"{file}, record 2"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert fields(file) == [{"text": "a"}, {"text": "b"}]
    file.write_text('[{"text": "a"},')
    with pytest.raises(ValueError, match=r"a.json is broken: "):
        open_records(file)
    file.write_text('{\n "data": [{"text": "a"}]\n}')
    with pytest.raises(ValueError, match=r"a.json, line 1 is broken"):
        open_records(file)


def test_parquet(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    rows = [{"messages": [{"role": "user", "content": str(i)}], "id": i} for i in range(5)]
    parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    assert fields(file) == [{"messages": row["messages"]} for row in rows]
    assert open_records(file, holdout=0.0)[0][3].where == f"{file}, record 4"
    parquet.write_table(pa.Table.from_pylist([{"question": "?"}]), file)
    assert fields(file) == [{"question": "?"}]  # so that the error can name the keys
    file.write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"a.parquet is broken: "):
        open_records(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install -e '.\[data\]'"):
        open_records(file)


def test_array_record(tmp_path):
    file = tmp_path / "a.array_record-00000-of-00002"
    long = "é" * 300
    write_array_record(file, [tf_example(text=long.encode(), url=b"\xff", stamp=7), "\nplain é".encode(), b""])
    assert fields(file) == [{"text": long, "url": [], "stamp": []}, {"text": "\nplain é"}, {"text": ""}]
    assert open_records(file, holdout=0.0)[0][1].where == f"{file}, record 2"
    write_array_record(file, [tf_example(text=[b"one", b"two"]), b"\xff"])
    records, _ = open_records(file, holdout=0.0)
    assert records[0].fields == {"text": ["one", "two"]}  # not a string, so it is refused later and not cut to one
    with pytest.raises(ValueError, match=r"record 2 is broken: it is neither a tf.train.Example nor UTF-8 text"):
        records[1]
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"a.array_record-00000-of-00002 is broken: "):
        open_records(file)


def test_damaged_array_records(tmp_path, monkeypatch):
    """A flipped bit is found before the run, whether the reader notices it, loses all records over it, or crashes."""
    files = [tmp_path / f"{name}.array_record" for name in "ab"]
    for file in files:
        write_array_record(file, [bytes([97 + i]) * 300 for i in range(9)])
    whole = files[1].read_bytes()
    bits = [i for i, byte in enumerate(whole) if byte]
    for at, words in (
        (bits[80], r"b\.array_record is broken: record \d: Corrupted"),
        (bits[-40], "or its index is damaged"),
    ):
        files[1].write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=words):
            open_records(tmp_path)
        with pytest.raises(ValueError, match=words):
            check_array_records(files[::-1])
    files[1].write_bytes(whole)
    records, _ = open_records(tmp_path, holdout=0.0)
    files[0].write_bytes(whole[: bits[80]] + bytes([whole[bits[80]] ^ 4]) + whole[bits[80] + 1 :])
    with pytest.raises(ValueError, match=r"a\.array_record, record \d is broken: Corrupted"):
        list(records)
    crash = "import os, signal, sys\nprint(sys.argv[1], flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr("train.data.formats.examples.READ_ARRAY_RECORDS", crash)
    with pytest.raises(ValueError, match=r"a\.array_record is broken: reading it ended a process by SIGSEGV"):
        open_records(tmp_path)


def test_text_uses_every_byte_once(tmp_path):
    file = tmp_path / "a.txt"
    lines = "".join(f"line {i}\r\n\n" for i in range(9000))
    words = "word " * 9000
    blob = "x" * (PIECE - 2) + "🎉" * 9000  # cuts are possible only between characters
    for text in lines, words, blob, blob + "y", words + lines + blob + words, "\n" * PIECE, "x" * PIECE, "short":
        file.write_bytes(text.encode())
        pieces = fields(file)
        assert "".join(piece["text"] for piece in pieces) == text
        sizes = [len(piece["text"].encode()) for piece in pieces]
        assert max(sizes[:-1], default=0) <= PIECE and sizes[-1] <= 1.5 * PIECE
        assert len(sizes) == 1 or sizes[-1] > 0.4 * PIECE  # a last piece is long enough to be held out
        assert [piece["continues"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        assert len(pieces) <= 1 + len(text.encode()) / (PIECE / 2)
        if text == lines:
            assert all(piece["text"].endswith("\n") for piece in pieces)
        if text == words:
            assert all(piece["text"].endswith("word") for piece in pieces[:-1])
    file.write_bytes(b"fine\n" * 8000 + b"\xff\xfe")
    records, _ = open_records(file, holdout=0.0)
    assert records[0]
    with pytest.raises(ValueError, match=r"a.txt, bytes 16380 to 40002 is not UTF-8 text"):
        records[1]


def test_which_files_are_for_what(tmp_path):
    def found(*names: str, **options) -> tuple[list[str], list[str] | None]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps({"text": name}) + "\n")
        train, valid = open_records(folder, **options)
        return [r.fields["text"] for r in train], valid and [r.fields["text"] for r in valid]

    assert found("train.jsonl", "valid.jsonl", "README.md") == (["train.jsonl"], ["valid.jsonl"])
    assert found("b/train-1.jsonl", "b/train-0.jsonl", "b/dev.jsonl", "b/test.jsonl") == (
        ["b/train-0.jsonl", "b/train-1.jsonl"],
        ["b/dev.jsonl"],
    )
    assert found("Train/a.jsonl", "test/a.jsonl", "other.jsonl") == (["Train/a.jsonl"], ["test/a.jsonl"])
    assert found("train/a.jsonl", "train/test.jsonl") == (["train/a.jsonl"], ["train/test.jsonl"])
    assert found("x.jsonl", "validation.jsonl") == (["x.jsonl"], ["validation.jsonl"])
    assert found("contest.jsonl", "trained.jsonl", holdout=0.0) == (["contest.jsonl", "trained.jsonl"], None)
    with pytest.raises(ValueError, match=r"files of several kinds, a.jsonl among them"):
        found("a.jsonl", "b.json")
    with pytest.raises(
        ValueError, match=r"nothing to train on: files must end in .jsonl, .json, .parquet, .txt, .array_r"
    ):
        found("a.tsv")
    with pytest.raises(ValueError, match=r"nothing to train on"):
        found("test.jsonl")
    with pytest.raises(FileNotFoundError, match=r"nowhere is neither a file nor a folder"):
        open_records(tmp_path / "nowhere")
    file = tmp_path / "a.tsv"
    file.write_text("a")
    with pytest.raises(ValueError, match=r"a.tsv has nothing to train on"):
        open_records(file)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_an_empty_data_set_is_refused(tmp_path, name):
    (tmp_path / name).write_text("\n" if name == "a.jsonl" else "[]" if name == "a.json" else "")
    with pytest.raises(ValueError, match=rf"The data set is empty: no records in .*{name}"):
        open_records(tmp_path)


def test_records_held_out_are_the_last_and_no_others(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(100)))
    for holdout, held in (0.1, 10), (0.101, 11), (0.001, 1), (0.999, 99), (1.0, 99):
        train, valid = open_records(file, holdout=holdout)
        assert [r.fields["text"] for r in train] == [str(i) for i in range(100 - held)]
        assert [r.fields["text"] for r in valid] == [str(i) for i in range(100 - held, 100)]
    file.write_text('{"text": "alone"}\n')
    assert open_records(file)[1] is None
    (tmp_path / "a.txt").write_text("line\n" * 20000)
    train, valid = open_records(tmp_path / "a.txt")
    assert (
        len(train) == 5 and len(valid) == 1 and "".join(r.fields["text"] for r in [*train, *valid]) == "line\n" * 20000
    )


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs {SHARED}")
def test_real_files():
    train, valid = open_records(SHARED / "c4")
    assert (len(train), len(valid)) == (1000, 200)
    assert all(len(records[i].fields["text"]) > 20 for records in (train, valid) for i in range(0, len(records), 50))
    assert "url" in train[0].fields
    pytest.importorskip("pyarrow")
    assert len(open_records(SHARED / "parquet", holdout=0.0)[0]) == 200
    text = SHARED / "text" / "tinyshakespeare.txt"
    assert "".join(piece["text"] for piece in fields(text)) == text.read_bytes().decode()
