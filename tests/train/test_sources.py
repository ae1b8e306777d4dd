"""Sources beyond plain files: other formats, compressed files, globs, object stores, and data sets by name."""

import contextlib
import gzip
import http.server
import itertools
import json
import pathlib
import struct
import subprocess
import sys
import threading
import types

import fsspec
import google_crc32c
import numpy as np
import pytest

import zoo
from convert import cache, pacing
from tests.train.test_records import cached, fields, tf_example  # noqa: F401
from train.data import files, web
from train.data.formats import columns, ids, index
from train.data.packing import Example, encode
from train.data.record import Record
from train.data.records import find_files, open_records


pa = pytest.importorskip("pyarrow")
CHATS = [{"messages": [{"role": "user", "content": str(i)}], "id": i} for i in range(7)]


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def wheres(path) -> list[str]:
    return [record.where for record in open_records(path, holdout=0.0)[0]]


def refused(path, *words: str, kind=ValueError):
    """Checks that reading all records fails with one message that has these words."""
    with pytest.raises(kind) as error:
        fields(path)
    said = str(error.value).splitlines()[0]  # grain adds its own lines below
    assert all(word in said for word in words), said


# ======================================================================================================================
# Formats.
# ======================================================================================================================


def write_tfrecord(path: pathlib.Path, records: list[bytes]):
    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)

    path.write_bytes(
        b"".join(n + masked(n) + data + masked(data) for data in records for n in [struct.pack("<Q", len(data))])
    )


def test_tfrecord(tmp_path, monkeypatch):
    file = tmp_path / "a.tfrecord-00000-of-00001"
    write_tfrecord(file, [tf_example(text="é".encode()), b"plain", b"\xff"])
    records, _ = open_records(file, holdout=0.0)
    assert [records[i].fields for i in (1, 0)] == [{"text": "plain"}, {"text": "é"}]
    assert records[1].where == f"{file}, record 2"
    refused(file, "record 3 is broken: it is neither a tf.train.Example nor UTF-8 text")
    whole = file.read_bytes()
    for at, words in (
        (14, "record 1 is broken: its bytes do not have the checksum"),
        (3, "record 1 is broken: it has a"),
    ):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(file, f"{file}, {words}")
    for size in (len(whole) - 1, len(whole) - 14):
        file.write_bytes(whole[:size])
        refused(file, f"{file}, record 3 is broken: it is cut off")
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    refused(file, "needs google-crc32c: pip install -e '.[data]'", kind=ImportError)


def test_examples_have_numbers_and_lists_of_objects(tmp_path):
    """Examples may have numbers and lists of objects, as TFDS writes them, in a folder that has other files, too."""
    field = lambda number, data: bytes([number << 3 | 2, len(data)]) + data
    packed = b"".join(bytes([n & 127 | 128, n >> 7]) if n > 127 else bytes([n]) for n in (5, 300, 0))
    tokens = field(1, field(1, field(1, b"tokens") + field(2, field(3, field(1, packed)))))
    chat = tf_example(**{"messages/role": [b"user", b"assistant"], "messages/content": [b"a", b"b"]})
    write_tfrecord(tmp_path / "set-train.tfrecord-00000-of-00001", [tokens, chat])
    for name in ("dataset_info.json", "features.json", "label.labels.txt"):
        (tmp_path / name).write_text("{}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert fields(tmp_path) == [{"tokens": [5, 300, 0]}, {"messages": turns}]
    write_tfrecord(tmp_path / "set-train.tfrecord-00000-of-00001", [tokens[:-1] + b"\x80"])
    refused(tmp_path, "tfrecord-00000-of-00001, record 1 is broken: it is neither")
    write_tfrecord(tmp_path / "set-train.tfrecord-00000-of-00001", [chat])
    for shards, words in (
        (["2"], f"{tmp_path}/set-train.tfrecord-00000-of-00001 has 1 records, but not by dataset_info.json"),
        (["1", "1"], f"{tmp_path} lacks set-train.tfrecord-00000-of-00002"),
    ):
        info = {"splits": [{"name": "train", "shardLengths": shards}]}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        refused(tmp_path, words)
    (tmp_path / "dataset_info.json").write_text('{"splits"')
    refused(tmp_path, "dataset_info.json is broken")


def write_megatron(path: pathlib.Path, documents: list[list[list[int]]], code=8, dtype=np.uint16):
    sequences = [sequence for document in documents for sequence in document]
    data = [np.array(sequence, dtype).tobytes() for sequence in sequences]
    path.with_suffix(".bin").write_bytes(b"".join(data))
    starts = np.cumsum([0, *map(len, data)])[:-1]
    ends = np.cumsum([0, *map(len, documents)])
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
        + np.array([len(s) for s in sequences], "<i4").tobytes() + starts.astype("<i8").tobytes()
        + ends.astype("<i8").tobytes()
    )  # fmt: skip


def test_megatron(tmp_path):
    file = tmp_path / "a.bin"
    for code, dtype in ((8, np.uint16), (4, np.int32)):
        write_megatron(file, [[[1, 2], [3]], [[60000]], [[4, 5, 6]]], code, dtype)
        assert [record["tokens"] for record in fields(file)] == [[1, 2, 3], [60000], [4, 5, 6]]
    assert wheres(tmp_path)[1] == f"{file}, document 2" and set(files.hashes(tmp_path)) == {"a.bin", "a.idx"}
    whole, beside = file.read_bytes(), tmp_path / "a.idx"
    file.write_bytes(whole[:-1])
    refused(file, f"{file} is broken: it has 27 bytes, and its .idx says 28")
    file.write_bytes(whole)
    head = beside.read_bytes()
    for wrong, words in (
        (b"", "no index of a Megatron"), (b"x" * 50, "no index of a Megatron"), (head[:-1], "too few for 4 sequences"),
        (head[:17] + b"\x07" + head[18:], "none of whole numbers"), (head[:-8] + b"\x09" + b"\0" * 7, "its documents"),
        (head[:34] + b"\x01" + head[35:], "its sequences"),
    ):  # fmt: skip
        beside.write_bytes(wrong)
        refused(file, "a.idx", words)
    beside.unlink()
    refused(file, f"{file} has no a.idx beside it")


def test_npy(tmp_path, monkeypatch):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(6, dtype=np.uint16).reshape(2, 3))
    assert fields(file) == [{"tokens": [0, 1, 2]}, {"tokens": [3, 4, 5]}] and wheres(file)[1] == f"{file}, row 2"
    for count in (ids.PIECE, ids.PIECE + 1):
        np.save(file, np.arange(count))
        pieces = fields(file)
        assert len(pieces) == 1 + (count > ids.PIECE)
        assert list(itertools.chain(*(each["tokens"] for each in pieces))) == list(range(count))
    monkeypatch.setattr(ids, "PIECE", 4)
    np.save(file, np.arange(6))
    assert fields(file) == [{"tokens": [0, 1, 2, 3]}, {"tokens": [4, 5]}] and wheres(file)[1] == f"{file}, ids from 4"
    file.write_bytes(file.read_bytes()[:-1])
    refused(file, "a.npy is broken")
    for wrong in (np.ones(3), np.ones((1, 1, 1), int), np.array([{}])):
        np.save(file, wrong)
        refused(file, "a.npy")


def test_csv(tmp_path):
    """CSV may have quoted line breaks and a byte order mark. A row of another length is refused by its line."""
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbfquestion,answer,id\r\n"a ""b""\nc",d,1\r\n\r\ne,f\r\ng,h,\r\n')
    records, _ = open_records(file, holdout=0.0)
    assert records[0] == Record(f"{file}, line 3", {"question": 'a "b"\nc', "answer": "d", "id": "1"}, tmp_path)
    assert records[2].fields == {"question": "g", "answer": "h", "id": ""}
    refused(file, f"{file}, line 5 is broken: it has 2 fields, and the first row 3")
    for content, words in (
        (b"a,a\n1,2\n", "a.csv must name each of its columns differently"),
        (b'a,b\n1,"2', "a.csv is broken after line 2: unexpected end of data"),
        (b"a,b\n1,\xff\n", "a.csv is broken after line"),
        (b"a,b\n", "The data set is empty"),
        (b"", "The data set is empty"),
    ):
        file.write_bytes(content)
        refused(file, words)


def write_arrow(path: pathlib.Path, rows: list, make=pa.ipc.new_stream):
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def test_arrow(tmp_path):
    """A folder by `save_to_disk` is read; its other files are no data."""
    for name in ("train", "validation"):
        write_arrow(tmp_path / name / "data-00000-of-00001.arrow", CHATS)
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    train, valid = open_records(tmp_path)
    assert [record.fields for record in train] == [{"messages": chat["messages"]} for chat in CHATS]
    assert valid and valid[6].where == f"{tmp_path}/validation/data-00000-of-00001.arrow, record 7"
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}, {"filename": "gone.arrow"}]}
    (tmp_path / "train" / "state.json").write_text(json.dumps(state))
    refused(tmp_path / "train", f"{tmp_path}/train lacks gone.arrow, which its state.json names")
    file = tmp_path / "a.arrow"
    write_arrow(file, CHATS, pa.ipc.new_file)
    assert len(fields(file)) == 7
    for data in (file.read_bytes()[:-20], b"", b"no arrow"):
        file.write_bytes(data)
        refused(file, "a.arrow is broken")
    write_arrow(file, CHATS)
    file.write_bytes(file.read_bytes()[:-8])
    refused(file, "a.arrow is broken: it does not end")


def test_row_groups_are_kept_up_to_a_bound(tmp_path, monkeypatch):
    from pyarrow import parquet

    reads, read = [], parquet.ParquetFile.read_row_group
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", lambda *a, **k: reads.append(a[1]) or read(*a, **k))
    for name in "ab":
        parquet.write_table(pa.Table.from_pylist(CHATS), tmp_path / f"{name}.parquet", row_group_size=3)
    records, _ = open_records(tmp_path, holdout=0.0)
    texts = [record.fields["messages"][0]["content"] for record in records]
    assert texts == [str(i) for i in range(7)] * 2 and sorted(reads) == [0, 0, 1, 1, 2, 2], "each once"
    assert records[13].fields and records[0].fields and len(reads) == 6
    monkeypatch.setattr(columns, "MEMORY", 1)
    (tmp_path / "c").mkdir()
    (tmp_path / "a.parquet").rename(tmp_path / "c" / "c.parquet")
    records, _ = open_records(tmp_path / "c", holdout=0.0)
    assert [records[i].fields["messages"][0]["content"] for i in (6, 5, 3, 6)] == ["6", "5", "3", "6"]
    assert reads[6:] == [2, 1, 2] and len(columns.GROUPS.tables) == 1
    data = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data[:4] + b"\xff" * 150 + data[154:])
    refused(tmp_path / "b.parquet", "b.parquet, record 1 is broken")


# ======================================================================================================================
# Files.
# ======================================================================================================================


def test_compressed_files(tmp_path, monkeypatch):
    (tmp_path / "gz.00000-of-00001.json.gz").write_bytes(gzip.compress(lines("a", "b")))
    with pa.CompressedOutputStream(str(tmp_path / "b.jsonl.zst"), "zstd") as out:
        out.write(lines("c"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text"))
    for name, found in (("gz.00000-of-00001.json.gz", ["a", "b"]), ("b.jsonl.zst", ["c"]), ("c.txt.gz", ["text"])):
        assert [record["text"] for record in fields(tmp_path / name)] == found
    file = tmp_path / "gz.00000-of-00001.json.gz"
    assert wheres(file)[1] == f"{file}, line 2"
    monkeypatch.setattr(files, "unpack", None)  # fails if it is unpacked again
    assert len(fields(file)) == 2
    monkeypatch.undo()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_that_are_broken(tmp_path, suffix):
    file, text = tmp_path / f"a.jsonl.{suffix}", lines(*"abcdefgh" * 2000)
    whole = gzip.compress(text) if suffix == "gz" else bytes(pa.compress(text, "zstd"))
    for data in (whole[: len(whole) // 2], b"no archive at all", whole[:30] + bytes([whole[30] ^ 255]) + whole[31:]):
        file.write_bytes(data)
        refused(file, f"{file} cannot be unpacked")
    assert not list(cache.folder("data").rglob("*.unfinished"))
    file.write_bytes(gzip.compress(b'{"text": "\xff"}\n') if suffix == "gz" else pa.compress(b'{"text": 1\n', "zstd"))
    refused(file, f"{file}, line 1 is")


def test_globs(tmp_path):
    for name in ("train-1.jsonl", "train-0.jsonl", "valid.jsonl", "test.jsonl", "sub/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines(name))
    found = lambda pattern: [[pathlib.Path(f).name for f in part] for part in find_files(f"{tmp_path}/{pattern}")]
    assert found("*.jsonl") == [["train-0.jsonl", "train-1.jsonl"], ["valid.jsonl"]]
    assert found("**/train*.jsonl") == [["train.jsonl", "train-0.jsonl", "train-1.jsonl"], []]
    assert found("te*.jsonl") == [["test.jsonl"], []] and set(files.hashes(f"{tmp_path}/te*")) == {"test.jsonl"}
    refused(f"{tmp_path}/x*.jsonl", "No file matches", "x*.jsonl", kind=FileNotFoundError)
    (tmp_path / "[a]*.jsonl").write_bytes(lines("as it stands"))
    assert fields(tmp_path / "[a]*.jsonl") == [{"text": "as it stands"}]


@pytest.fixture
def store():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_object_stores(tmp_path, store, monkeypatch):
    """Files are copied once, and again when they have changed; messages and hashes use their names in the store."""
    store.pipe({"/b/d/train.jsonl": lines("a", "b"), "/b/d/valid.jsonl": lines("c"), "/b/d/README.md": b""})
    train, valid = open_records("memory://b/d")
    assert [r.fields["text"] for r in train] == ["a", "b"] and valid and valid[0].fields["text"] == "c"
    assert train[1].where == "memory:///b/d/train.jsonl, line 2"
    assert set(files.hashes("memory://b/d")) == {"train.jsonl", "valid.jsonl"}
    assert find_files("memory://b/*/train*") == (["memory:///b/d/train.jsonl"], [])
    assert find_files("memory://b/d/valid.jsonl") == (["memory:///b/d/valid.jsonl"], [])
    get, before = type(store).get_file, files.hashes("memory://b/d")
    monkeypatch.setattr(type(store), "get_file", None)
    assert len(fields("memory://b/d/train.jsonl")) == 2
    monkeypatch.setattr(type(store), "get_file", get)
    store.pipe("/b/d/train.jsonl", lines("a", "b", "d"))
    assert len(open_records("memory://b/d")[0]) == 3
    assert files.hashes("memory://b/d")["train.jsonl"] != before["train.jsonl"]
    store.pipe({"/z/a.jsonl.gz": gzip.compress(lines("a"))})
    assert fields("memory://z/a.jsonl.gz") == [{"text": "a"}]
    write_megatron(tmp_path / "a", [[[7, 8]]])
    store.pipe({f"/m/{name}": (tmp_path / name).read_bytes() for name in ("a.bin", "a.idx")})
    assert fields("memory://m") == [{"tokens": [7, 8]}] and set(files.hashes("memory://m")) == {"a.bin", "a.idx"}


def test_object_stores_that_refuse(store, monkeypatch):
    refused("memory://b/none", "memory://b/none is no file and no folder", kind=FileNotFoundError)
    refused("nosuch://b/a.jsonl", "nosuch://b/a.jsonl cannot be read: Protocol not known: nosuch")
    for url, extra in (("gs://b/a", "gcsfs: pip install -e '.[gcs]'"), ("s3://b/a", "s3fs: pip install -e '.[s3]'")):
        monkeypatch.setitem(sys.modules, extra.partition(":")[0], None)
        refused(url, f"Reading {url} needs {extra}", kind=ImportError)
    store.pipe("/b/a.jsonl", lines("a", "b"))
    short = lambda self, path, to, **_: pathlib.Path(to).write_bytes(lines("a"))
    monkeypatch.setattr(type(store), "get_file", short)
    refused("memory://b/a.jsonl", "memory:///b/a.jsonl cannot be copied: it came with 14 bytes of 28", kind=OSError)
    monkeypatch.setattr(type(store), "find", lambda *_, **__: 1 / 0)
    refused("memory://b", "memory://b cannot be listed: ZeroDivisionError", kind=OSError)
    assert not list(cache.folder("data").rglob("*.jsonl*"))


class Site(http.server.ThreadingHTTPServer):
    """Serves `files` from memory: path -> the pieces of a body, and its headers. `sent` has the paths sent in full."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Page)
        self.files, self.sent, self.closing = {}, [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Page(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self):
        pieces, headers = self.server.files.get(self.path, (None, {}))
        self.send_response(404 if pieces is None else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has disconnected
            for piece in pieces or ():
                self.wfile.write(piece)
            self.server.sent.append(self.path)

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def test_files_of_web_servers(site, tmp_path):
    """A file is fetched again if its size, its ETag or its modification time differs, and only then."""
    read = lambda path: [record["text"] for record in fields(f"{site.url}/{path}")]
    old, new = {"ETag": '"1"', "Last-Modified": "Mon, 23 Nov 2026 10:00:00 GMT"}, {"ETag": '"2"'}
    for headers in (old, old | new, old | {"Last-Modified": "Tue, 24 Nov 2026 10:00:00 GMT"}):
        for text in ("a", "b"):  # the second has the same headers, so it is not read
            site.files["/a.jsonl"] = [lines(text)], headers | {"Content-Length": "14"}
            assert read("a.jsonl") == ["a"]
    site.files["/a.jsonl"] = [lines("a", "c")], old | {"Content-Length": "28"}
    assert read("a.jsonl") == ["a", "c"]
    site.files["/b.jsonl?page=1/2"] = [lines("d")], new
    assert read("b.jsonl?page=1/2") == ["d"], "without Content-Length"
    packed = gzip.compress(lines("e", "f"))
    site.files["/c.jsonl"] = [packed], new | {"Content-Encoding": "gzip", "Content-Length": str(len(packed))}
    site.files["/d.jsonl.gz"] = site.files["/c.jsonl"]
    assert read("c.jsonl") == read("d.jsonl.gz") == ["e", "f"]
    write_megatron(tmp_path / "a", [[[7, 8]]])
    for name in ("a.bin", "a.idx"):
        site.files[f"/{name}"] = [(tmp_path / name).read_bytes()], new
    assert fields(f"{site.url}/a.bin") == [{"tokens": [7, 8]}]
    assert set(files.hashes(f"{site.url}/a.bin")) == {"a.bin", "a.idx"}


def test_a_web_server_that_does_not_tell_files_apart(site):
    site.files["/a.jsonl?token=abc"] = [lines("a")], {"Content-Length": "14"}
    with pytest.warns(UserWarning) as warned:
        fields(f"{site.url}/a.jsonl?token=abc")
    (said,) = {str(warning.message) for warning in warned}
    assert said.startswith(f"The server of {site.url}/a.jsonl?token=*** gives neither an ETag nor Last-Modified")


def test_web_servers_that_refuse(site, monkeypatch):
    """Each refusal is one sentence, and nothing is left of the data received."""
    endless = lambda piece: iter(lambda: piece, None)
    tag, whole = {"ETag": "1"}, gzip.compress(lines(*"abcdefgh" * 99))
    cases = {
        "drip": (endless(b"x"), tag | {"Content-Length": "1000000"}, r"its server sent [\d,]+ bytes in the last 80 s"),
        "endless": (endless(b"x" * 2**18), tag, "its server answers with more than 1 MiB, the most that belongs there"),
        "slow": (endless(b"x" * 2**18), tag, r"its server has not ended its answer after 1 hours, and [\d,]+ bytes"),
        "bomb": ([gzip.compress(bytes(2**22))], tag | {"Content-Encoding": "gzip"}, "its server answers with more"),
        "short": ([b"x" * 7], tag | {"Content-Length": "9"}, "it came with 7 bytes of 9; start again"),
        "half": ([whole[:40]], tag | {"Content-Encoding": "gzip"}, "EOFError: Compressed file ended before"),
        "br": ([b"x"], tag | {"Content-Encoding": "br"}, "its server sends it in the Content-Encoding br; only gzip"),
        "stall": (iter(lambda: site.closing.wait() and b"", None), tag, "its server sent nothing for 0.05 seconds"),
    }
    for name, (pieces, headers, why) in cases.items():
        site.files[f"/{name}.jsonl"] = pieces, headers
        clock = itertools.count(step=20.0 if name in ("drip", "slow") else 0.0)  # the seconds that a piece takes
        monkeypatch.setattr(pacing, "time", types.SimpleNamespace(monotonic=clock.__next__))
        monkeypatch.setattr(web, "LARGEST", 2**40 if name == "slow" else 2**20)
        monkeypatch.setattr(web, "SECONDS", 3600 if name == "slow" else 2**40)
        monkeypatch.setattr(web, "TIMEOUT", 0.05 if name == "stall" else 30)
        monkeypatch.setattr(pacing, "SLOWEST", 0 if name == "slow" else 10_000)
        with pytest.raises(OSError, match=f"^{site.url}/{name}.jsonl cannot be copied: {why}"):
            fields(f"{site.url}/{name}.jsonl")
    with pytest.raises(OSError, match=f"^{site.url}/none.jsonl cannot be read: HTTP Error 404: Not Found"):
        fields(f"{site.url}/none.jsonl")
    assert not list(cache.folder("data").rglob("*.jsonl*"))


def test_what_took_long_is_kept(tmp_path, monkeypatch):
    """The places of a large file's records are kept until the file changes."""
    monkeypatch.setattr(index, "LARGE", 1)
    file, scans = tmp_path / "a.jsonl", []
    file.write_bytes(lines("a", "b"))
    assert fields(file) == fields(file) == [{"text": "a"}, {"text": "b"}]
    (kept,) = cache.folder("data").rglob("index.npy")
    kept.write_bytes(kept.read_bytes()[:-16] + np.array([0, 9], np.uint64).tobytes())
    assert wheres(file)[1] == f"{file}, line 9" and not scans, "it was read from there"
    file.write_bytes(lines("a", "b", "c"))
    assert wheres(file)[1:] == [f"{file}, line 2", f"{file}, line 3"]


def test_only_one_process_copies(tmp_path):
    """A half that was left over is not taken for the whole file, nor is one that is still being written."""
    code = (
        "import sys\nfrom convert import cache\n"
        "def make(to):\n to.write_text('h')\n print('made', flush=True)\n input()\n to.write_text('whole')\n"
        "print('asks', flush=True)\nprint(cache.keep('key', 'file', make).read_text())"
    )
    (cache.folder("data") / cache.name_of("key")).mkdir(parents=True)
    (cache.folder("data") / cache.name_of("key") / "file.unfinished").write_text("ha")
    start = lambda: subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with start() as first:
        assert [first.stdout.readline() for _ in range(2)] == ["asks\n", "made\n"]
        with start() as second:
            assert second.stdout.readline() == "asks\n"
            assert first.communicate("go on\n")[0] == "whole\n" == second.communicate()[0]


# ======================================================================================================================
# Data sets by name.
# ======================================================================================================================


class Stream:
    """The parts of `datasets.IterableDataset` that are used."""

    def __init__(self, rows):
        self.rows = rows

    def take(self, n):
        return Stream(self.rows[:n])

    def with_format(self, kind):
        return self

    def iter(self, batch_size):
        yield from (pa.Table.from_pylist(self.rows[i : i + 2]) for i in range(0, len(self.rows), 2))


def test_data_sets_by_name(tmp_path, monkeypatch):
    splits = {}
    for split in ("train", "test"):
        write_arrow(tmp_path / f"{split}.arrow", CHATS[: 5 if split == "train" else 2])
        splits[split] = types.SimpleNamespace(cache_files=[{"filename": str(tmp_path / f"{split}.arrow")}])
    asked = []

    def load_dataset(name, config, split=None, streaming=False):
        asked.append((name, config, split, streaming))
        if name == "org/gone":
            raise RuntimeError("no\nsuch set")
        if streaming:
            return Stream(CHATS if split == "train" else [])
        return splits[split] if split else splits

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    train, valid = open_records("hf:org/set")
    assert valid and (len(train), len(valid)) == (5, 2)
    assert set(files.hashes("hf:org/set")) == {"train/00000", "test/00000"}
    assert len(open_records("hf:org/set:en:test", holdout=0.0)[0]) == 2 and asked[-1][1:] == ("en", "test", False)
    for _ in range(2):
        assert len(open_records("hf:org/set::train:3", holdout=0.0)[0]) == 3
    assert asked[-1][1:] == (None, "train", True) and sum(streaming for *_, streaming in asked) == 1
    refused("hf:org/gone", "hf:org/gone cannot be loaded: RuntimeError: no such set", kind=OSError)
    refused("hf:org/set::empty:3", "hf:org/set::empty:3 cannot be loaded: ValueError: it has no records", kind=OSError)
    refused("hf:a:b:c:d", "hf:a:b:c:d is no name of a data set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("hf:org/set", "needs datasets: pip install -e '.[hf]'", kind=ImportError)


@pytest.mark.live
def test_data_sets_by_the_library_itself(tmp_path, monkeypatch):
    """The library's saved folders, cached files and streams are read."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(lines(*"abcde"))
    (tmp_path / "set" / "test.jsonl").write_bytes(lines(*"fg"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    train, valid = open_records(f"hf:{tmp_path}/set")
    assert "".join(r.fields["text"] for r in train) == "abcde" and valid and len(valid) == 2
    assert len(open_records(f"hf:{tmp_path}/set::train:3", holdout=0.0)[0]) == 3
    whole = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "hf"))
    whole["train"].save_to_disk(tmp_path / "saved", num_shards=2)
    assert "".join(record["text"] for record in fields(tmp_path / "saved")) == "abcde"


# ======================================================================================================================
# Users' functions, and precomputed ids.
# ======================================================================================================================


def test_functions_of_the_user(tmp_path):
    """Users' functions get all fields, and are part of the hash."""
    from pyarrow import parquet

    code, data = tmp_path / "rows.py", tmp_path / "a.parquet"
    code.write_text(
        "def chat(fields):\n    return {'prompt': fields['q'], 'completion': str(7 // fields['n'])}\n"
        "none = lambda fields: None\n"
    )
    parquet.write_table(pa.Table.from_pylist([{"q": "a", "n": 1, "text": "-"}, {"q": "b", "n": 0, "text": "-"}]), data)
    records, _ = open_records(f"{data}@{code}:chat", holdout=0.0)
    assert records[0] == Record(f"{data}, record 1", {"prompt": "a", "completion": "7"}, tmp_path)
    refused(f"{data}@{code}:chat", f"{data}, record 2: {code}:chat raised ZeroDivisionError: ")
    refused(f"{data}@{code}:none", f"{data}, record 1: {code}:none returned None, and must return a dict")
    refused(f"{data}@{code}:other", f"{code} has no function 'other'")
    refused(f"{data}@nowhere.py:chat", "There is no nowhere.py", kind=FileNotFoundError)
    assert set(files.hashes(f"{data}@{code}:chat")) == {"a.parquet", "rows.py"}
    write_tfrecord(tmp_path / "a.tfrecord", [tf_example(q=b"c", n=5, raw=b"\xff")])
    code.write_text("chat = lambda fields: fields")
    assert fields(f"{tmp_path}/a.tfrecord@{code}:chat") == [{"q": "c", "n": [5], "raw": b"\xff"}]
    (tmp_path / "a.json").write_text("[1]")
    refused(f"{tmp_path}/a.json@{code}:chat", "a.json, record 1: a record must be a JSON object, not a int")


def test_questions():
    """Questions become chats, or prompts with completions if there is no chat template."""
    tokenizer, plain = zoo.tokenizer("tiny"), zoo.tokenizer("tiny")
    plain.chat_template = None
    encoded = lambda tokenizer, **fields: encode(Record("a.csv, line 2", fields), tokenizer, vocab_size=2048)
    chat = lambda asked: [{"role": "user", "content": asked}, {"role": "assistant", "content": "No."}]
    for found, asked in (
        ({"question": "Why?", "answer": "No.", "input": "-"}, "Why?"),
        ({"instruction": "Why?", "input": "This.", "output": "No."}, "Why?\n\nThis."),
        ({"instruction": "Why?", "input": "", "output": "No."}, "Why?"),
        ({"instruction": "Why?", "output": "No."}, "Why?"),
    ):
        assert encoded(tokenizer, **found) == encoded(tokenizer, messages=chat(asked))
        assert encoded(plain, **found) == encoded(plain, prompt=f"{asked}\n", completion="No.")


def test_columns_of_the_user(tmp_path):
    """Columns of every format are renamed before the record's kind is recognised, or a user's function gets it."""
    from pyarrow import parquet

    rows, names = [{"q": "Why?", "said": "No.", "text": "-"}] * 2, ("prompt=q", "completion=said")
    table = pa.Table.from_pylist(rows)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text("q,said,text\nWhy?,No.,-\nWhy?,No.,-\n")
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    tokenizer = zoo.tokenizer("tiny")
    wanted = encode(Record("", {"prompt": "Why?", "completion": "No."}), tokenizer, vocab_size=2048)
    for kind in "jsonl", "csv", "parquet", "arrow":
        train, valid = open_records(tmp_path / f"a.{kind}", 0.5, names)
        assert valid is not None and valid[0].fields == train[0].fields
        assert train[0].fields == {"prompt": "Why?", "completion": "No.", "text": "-"}
        assert encode(train[0], tokenizer, vocab_size=2048) == wanted
        where = train[0].where
        train, _ = open_records(tmp_path / f"a.{kind}", 0.5, ("text=answer",))
        with pytest.raises(ValueError) as error:
            train[0]
        said = "there is no column 'answer', which --columns names text; it has q, said, text."
        assert str(error.value) == f"{where}: {said}"
    swapped, _ = open_records(tmp_path / "a.jsonl", 0.0, ("text=q", "prompt=text"))
    assert swapped[0].fields == {"said": "No.", "text": "Why?", "prompt": "-"}
    (tmp_path / "rows.py").write_text("shout = lambda fields: {'text': fields['prompt'].upper()}")
    shouted, _ = open_records(f"{tmp_path}/a.csv@{tmp_path}/rows.py:shout", 0.0, names)
    assert shouted[0].fields == {"text": "WHY?"}


def test_columns_that_cannot_be(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines("a"))
    for names, said in (
        (("question",), "--columns 'question' must be FIELD=COLUMN, such as prompt=question"),
        (("prompt=",), "--columns 'prompt=' must be FIELD=COLUMN"),
        (("body=text",), "--columns 'body=text' names 'body', which is none of the fields: messages, conversations,"),
        (("text=a", "text=b"), "--columns names 'text' twice, as 'a' and 'b'"),
    ):
        with pytest.raises(ValueError) as error:
            open_records(tmp_path / "a.jsonl", 0.0, names)
        assert str(error.value).startswith(said)
    with pytest.raises(ValueError, match=r"--columns FIELD=COLUMN renames other keys, and DATA@file.py:function makes"):
        encode(Record("a.jsonl, line 1", {"body": "a"}), zoo.tokenizer("tiny"), vocab_size=2048)


def test_tokens():
    """Precomputed tokens are all learnt, or as `loss_mask` says; with a mask they are not cut."""
    tokenizer = zoo.tokenizer("tiny")
    encoded = lambda **fields: encode(Record("a.jsonl, line 1", fields), tokenizer, vocab_size=9)
    assert encoded(tokens=[1, 8]) == [Example([1, 8], [1, 1], whole=False)]
    assert encoded(tokens=[1, 8], loss_mask=[0, True], id=3) == [Example([1, 8], [0, 1], whole=True)]
    for wrong, words in (
        ({"tokens": [1, 9]}, "token 9 is beyond the model's vocabulary of 9"),
        ({"tokens": [1, -1]}, "tokens has -1, and may have whole numbers from 0"),
        ({"tokens": [1, "a"]}, "tokens has 'a', and may have whole numbers from 0"),
        ({"tokens": [1, 0.0]}, "tokens has 0.0, and may have"),
        ({"tokens": [1, 2], "loss_mask": [1]}, "loss_mask must be a list of 0 and 1, 2 of them"),
        ({"tokens": [1, 2], "loss_mask": [1, 2]}, "loss_mask must be a list of 0 and 1"),
        ({"tokens": [1, 2], "loss_mask": ["a", []]}, "loss_mask must be a list of 0 and 1"),
        ({"tokens": "1 2"}, "the record has tokens (str), but must have messages"),
    ):
        with pytest.raises(ValueError) as error:
            encoded(**wrong)
        assert str(error.value).startswith("a.jsonl, line 1: ") and words in str(error.value)


def test_flipped_arrow(tmp_path):
    """A flipped bit puts a text's offset far outside the file; reading there would end the process."""
    table, path = pa.table({"text": [f"text {n}" for n in range(9)]}), tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    content = bytearray(path.read_bytes())
    places = table.column("text").chunk(0).buffers()[1].to_pybytes()[:40]
    content[content.index(places) + 4 * 5 + 3] ^= 64
    path.write_bytes(content)
    records, _ = open_records(path, 0.0)
    assert records[3].fields == {"text": "text 3"}
    with pytest.raises(ValueError, match=r"a.arrow, record 5 is broken: Column 0"):
        records[4]
