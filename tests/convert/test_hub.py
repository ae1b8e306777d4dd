"""Folders, and downloads from a small Hub on the loopback, in processes of their own because conftest.py is offline."""

import collections
import contextlib
import hashlib
import http.server
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from convert.files import COMPANIONS, read_json
from convert.hub import folder, weights_hash
from convert.tensors import open_tensors
from tests.zoo import tiny


ROOT = pathlib.Path(__file__).parents[2]
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
SHARDED = json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# a model",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "modeling_llama.py": b"raise SystemExit",
}


def tensor_file(name):
    return save({name: np.arange(3)})


REPOSITORIES = {
    "org/one": {**FILES, "model.safetensors": tensor_file("x"), "model.fp16.safetensors": tensor_file("z")},
    "org/many": {
        **FILES,
        "model.safetensors.index.json": SHARDED.encode(),
        "model-00001-of-00002.safetensors": tensor_file("x"),
        "model-00002-of-00002.safetensors": tensor_file("y"),
        "consolidated.safetensors": tensor_file("z"),
    },
    "org/pickles": FILES,
    "org/escape": {**FILES, "model.safetensors.index.json": SHARDED.replace("model-00002", "../model-00002").encode()},
    "org/gguf": {"README.md": b"# a model", "a-Q8_0.gguf": b"GGUF", "mmproj-a.gguf": b"GGUF"},
    "org/ggufs": {"a-Q8_0.gguf": b"GGUF", "b-00001-of-00002.gguf": b"GGUF", "b-00002-of-00002.gguf": b"GGUF"},
    "org/gated": {**FILES, "model.safetensors": tensor_file("x")},
}
COMMON = {"config.json", "tokenizer.json", "chat_template.jinja", "README.md"}


class Handler(http.server.BaseHTTPRequestHandler):
    """The requests of huggingface_hub to the Hub: a revision's commit, its tree, and its files."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server.hub
        api = re.fullmatch(r"/api/models/(\w+/\w+)/(revision|tree)/([^?]+)(\?.*)?", self.path)
        file = re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/(.+)", self.path)
        if not api and not file:  # the library also requests other things
            return self.answer(404, b"")
        hub.requests.append(self.path)
        for pattern, answers in hub.faults.items():
            if answers and re.search(pattern, self.path):
                status, *rest = answers.pop(0) if isinstance(answers[0], tuple) else (answers.pop(0), b"trouble")
                return self.drip() if status == "drip" else self.answer(status, *rest)
        repo = (api or file)[1]
        if repo not in REPOSITORIES:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if api:
            commit = COMMITS.get(api[3], api[3])
            if commit not in COMMITS.values():
                return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if api[2] == "revision":
                return self.answer(200, json.dumps({"id": repo, "sha": commit, "siblings": []}).encode())
            return self.answer(200, json.dumps([self.entry(*item) for item in REPOSITORIES[repo].items()]).encode())
        if repo == "org/gated" and self.headers["Authorization"] != "Bearer hf_right":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if file[3] not in REPOSITORIES[repo]:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = REPOSITORIES[repo][file[3]]
        headers = {
            "ETag": f'"{hub.etag + file[3] if hub.etag else self.etag(file[3], content)}"',
            "X-Repo-Commit": file[2],
        }
        if self.command == "GET" and hub.damaged[file[3]]:
            hub.damaged[file[3]] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
            first, last = map(int, part.groups())
            return self.answer(206, content[first : last + 1], headers)
        return self.answer(200, content, headers)

    @staticmethod
    def etag(name, content):
        if name.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def entry(self, name, content):
        out = {"type": "file", "path": name, "size": len(content), "oid": self.etag("", content)}
        if name.endswith(".safetensors"):
            out["lfs"] = {"oid": self.etag(name, content), "size": len(content), "pointerSize": 100}
        return out

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.server.hub.sent += len(body)
            self.wfile.write(body)

    def drip(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):  # until the client disconnects
            while self.command == "GET":
                self.wfile.write(b" ")
                time.sleep(0.01)  # so that the client receives it in many pieces

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts a Hub, with the folder of a cache beside it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.url, server.home = f"http://127.0.0.1:{server.server_port}", tmp_path_factory.mktemp("hub") / "cache"
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(server, nursery):
    """Returns the Hub as new, with an empty cache.

    It has the `requests` and the bytes `sent` so far, the `faults` to answer with, the number of times that a file
    arrives `damaged`, and the first characters of an `etag` that is no hash.
    """
    shutil.rmtree(server.home, ignore_errors=True)
    server.hub = types.SimpleNamespace(requests=[], faults={}, damaged=collections.Counter(), etag=None, sent=0)
    server.hub.url, server.hub.cache, server.hub.nursery = server.url, server.home, nursery
    return server.hub


CALL = """
import itertools, sys, types
from convert import hub, pacing

weights, waits, repo, *revisions = sys.argv[1:]
if waits == "False":  # a second passes with each piece of an answer, and nothing is waited for
    hub.time = pacing.time = types.SimpleNamespace(sleep=lambda seconds: None, monotonic=itertools.count().__next__)
for revision in revisions:
    try:
        single = repo.endswith(".gguf")
        print(hub.gguf_file(repo) if single else hub.folder(repo, revision or None, weights=weights == "True"))
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
"""


INSPECT = """
import sys
import zoo

for repo in sys.argv[1:]:
    try:
        print(zoo.inspect(repo).num_hidden_layers)
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
"""


SOURCE = """
import zoo
from zoo.source import Source

source = Source.open("org/model")
print(*sorted(path.name for path in source.folder.iterdir()))
print(zoo.load(source).config is source.config, source.weights == source.folder, zoo.fingerprint(source))
"""


# Runs scripts one after another, each in a fork that has imported their modules. Where the environment is another than
# the usual one, modules that read it are imported anew.
NURSERY = """
import json, os, sys, traceback
import convert.hub, zoo

usual = dict(os.environ)
for script, arguments, environment, *files in map(json.loads, sys.stdin):
    child = os.fork()
    if not child:
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(environment)
        if os.environ != usual:
            for name in list(sys.modules):
                if name.partition(".")[0] in ("huggingface_hub", "convert", "zoo"):
                    del sys.modules[name]
        sys.argv, status = ["", *arguments], 0
        try:
            exec(script, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def nursery(server):
    environment = {
        "PATH": os.environ["PATH"],
        "JAX_PLATFORMS": "cpu",
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(server.home),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", NURSERY],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process


def ask(hub, repo, *revisions, weights=True, waits=True, **environment):
    """Calls `folder` in a fresh process. Returns a line for each revision: a path, or "Error: message"."""
    return run(hub, CALL, str(weights), str(waits), repo, *(revisions or [""]), **environment)


def inspect(hub, *repos, **environment):
    """Returns the number of layers of each repository's model, read in a fresh process, or "Error: message"."""
    return run(hub, INSPECT, *repos, **environment).splitlines()


def run(hub, script, *arguments, **environment):
    files = [hub.cache.with_name(name) for name in ("printed", "complained")]
    hub.nursery.stdin.write(json.dumps([script, arguments, environment, *map(str, files)]) + "\n")
    hub.nursery.stdin.flush()
    status = hub.nursery.stdout.readline()
    printed, complained = (file.read_text() for file in files)
    assert status == "0\n", complained
    return printed.rstrip("\n")


def names(path):
    return {file.name for file in pathlib.Path(path).rglob("*")}


def test_one_file(hub):
    path = ask(hub, "org/one")
    assert names(path) == COMMON | {"model.safetensors"}
    assert path.endswith("a" * 40)
    assert open_tensors(path).keys() == {"x"}


def test_the_shards_that_the_index_names(hub):
    path = ask(hub, "org/many")
    assert names(path) == COMMON | REPOSITORIES["org/many"].keys() - FILES.keys() - {"consolidated.safetensors"}
    assert open_tensors(path).keys() == {"x", "y"}


def test_gguf(hub):
    """A repository without config.json whose only model is a GGUF file gets it; of several one is named."""
    path = pathlib.Path(ask(hub, "org/gguf"))
    assert {name.name for name in path.iterdir()} == {"README.md", "a-Q8_0.gguf"}
    assert ask(hub, "org/gguf", weights=False) == str(path)
    assert ask(hub, "org/gguf", HF_HUB_OFFLINE="1") == str(path)
    assert ask(hub, "org/ggufs") == (
        "ValueError: org/ggufs has 2 GGUF files; name one of them, as org/ggufs/a-Q8_0.gguf: a-Q8_0.gguf, "
        "b-00001-of-00002.gguf."
    )
    parts = pathlib.Path(ask(hub, "org/ggufs/b-00001-of-00002.gguf"))
    assert {name.name for name in parts.parent.iterdir()} == {"b-00001-of-00002.gguf", "b-00002-of-00002.gguf"}
    assert ask(hub, "org/ggufs/c.gguf") == "FileNotFoundError: org/ggufs has no file c.gguf."


def test_without_weights(hub):
    assert names(ask(hub, "org/one", weights=False)) == COMMON
    assert not [path for path in hub.requests if "safetensors" in path]


def test_a_source_fetches_weights_when_they_are_needed(hub, tmp_path, monkeypatch):
    """The weights are of the commit that was opened, whatever becomes of the branch."""
    folder = tiny.write(tmp_path / "model", "qwen3")
    monkeypatch.setitem(REPOSITORIES, "org/model", {file.name: file.read_bytes() for file in folder.iterdir()})
    first, last = run(hub, SOURCE).splitlines()
    assert first == "config.json"
    assert last == f"True True {weights_hash(folder)}"
    assert [path for path in hub.requests if path.endswith("main")] == ["/api/models/org/model/revision/main"]


def test_inspecting(hub, tmp_path, monkeypatch):
    """Only headers are fetched, and compared with the config; pickles and a missing network are reported."""
    folder = tiny.write(tmp_path / "model", "qwen3")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    header = 8 + int.from_bytes(files["model.safetensors"][:8], "little")
    # With more weights than are fetched along with the header.
    files["model.safetensors"] = files["model.safetensors"][:header] + bytes(10**6)
    deep = re.sub(rb'"num_hidden_layers": \d+', b'"num_hidden_layers": 30', files["config.json"])
    monkeypatch.setitem(REPOSITORIES, "org/model", files)
    monkeypatch.setitem(REPOSITORIES, "org/deep", files | {"config.json": deep})
    monkeypatch.setitem(REPOSITORIES, "org/pickle", {"config.json": files["config.json"]})
    layers, lacking, pickles = inspect(hub, "org/model", "org/deep", "org/pickle")
    assert layers == str(json.loads(files["config.json"])["num_hidden_layers"])
    assert names(hub.cache) >= {"config.json"} and not names(hub.cache) & {"model.safetensors", "tokenizer.json"}
    assert hub.sent < 400_000
    assert re.match(
        "ValueError: org/deep lacks .* tensors that its config.json calls for: model.layers.",
        lacking,
    )
    assert pickles.startswith("ValueError: org/pickle has neither model.safetensors nor model.safetensors.index.json")
    assert inspect(hub, "org/model", HF_HUB_OFFLINE="1") == [
        "FileNotFoundError: org/model is not complete in the cache; unset HF_HUB_OFFLINE to download it."
    ]


@pytest.mark.parametrize("revision", ["v1", "b" * 40])
def test_everything_is_of_one_commit(hub, revision):
    assert ask(hub, "org/many", revision).endswith("b" * 40)
    assert {re.search("resolve/(.+?)/", path)[1] for path in hub.requests if "resolve" in path} == {"b" * 40}


def test_the_cache_serves_offline(hub):
    path = ask(hub, "org/many")
    hub.requests.clear()
    assert ask(hub, "org/many", "", "a" * 40, HF_HUB_OFFLINE="1").splitlines() == [path, path]
    assert ask(hub, "org/many", "a" * 40) == path
    assert not hub.requests


def test_a_cache_that_lacks_the_weights_does_not(hub):
    ask(hub, "org/many", weights=False)
    answer = ask(hub, "org/many", HF_HUB_OFFLINE="1")
    assert answer == "FileNotFoundError: org/many is not complete in the cache; unset HF_HUB_OFFLINE to download it."


def test_offline_and_never_downloaded(hub):
    answer = ask(hub, "org/one", HF_HUB_OFFLINE="1")
    assert answer == "FileNotFoundError: org/one is not complete in the cache; unset HF_HUB_OFFLINE to download it."
    assert not hub.requests


def test_no_network(hub):
    answer = ask(hub, "org/one", HF_ENDPOINT="http://127.0.0.1:9")
    assert re.fullmatch(
        r"ConnectionError: http://127\.0\.0\.1:9 could not be reached \(.*refused.*\), and the cache lacks all or part "
        r"of org/one; try again later\.",
        answer,
    )


def test_a_gated_repository(hub):
    assert ask(hub, "org/gated") == (
        f"PermissionError: org/gated is gated: accept its licence at {hub.url}/org/gated, then log in with "
        "`hf auth login` or set HF_TOKEN."
    )
    assert names(ask(hub, "org/gated", HF_TOKEN="hf_right")) == COMMON | {"model.safetensors"}


def test_a_missing_repository(hub):
    assert ask(hub, "org/none") == (
        "FileNotFoundError: There is neither a folder org/none here nor a repository org/none on the Hub that you may "
        "read; check the name, or, if it is private, log in with `hf auth login` or set HF_TOKEN."
    )


def test_a_missing_revision(hub):
    revisions = ["v2", "d" * 40]
    answers = ask(hub, "org/one", *revisions).splitlines()
    assert answers == [f"FileNotFoundError: org/one has no branch, tag or commit '{name}'." for name in revisions]


@pytest.mark.parametrize("fault, status", [("revision", 401), ("resolve", 403)])
def test_a_refused_token(hub, fault, status):
    hub.faults[fault] = [status] * 9
    assert ask(hub, "org/one", HF_TOKEN="hf_wrong") == (
        f"PermissionError: The Hub denies access to org/one (status {status}); take a token that may read it: log in "
        "with `hf auth login` or set HF_TOKEN."
    )


def test_pickles_are_refused_and_not_downloaded(hub):
    answer = ask(hub, "org/pickles")
    assert answer.startswith(
        "ValueError: org/pickles has neither model.safetensors nor model.safetensors.index.json, and"
    )
    assert not [path for path in hub.requests if path.endswith((".bin", ".py"))]


def test_an_index_that_leaves_the_repository(hub):
    answer = ask(hub, "org/escape")
    assert re.fullmatch(r"ValueError: .*model\.safetensors\.index\.json puts y in '\.\./model-00002.*", answer)


def test_a_busy_hub_is_asked_again(hub):
    hub.faults["revision"] = [429, 503]
    assert names(ask(hub, "org/one", weights=False, waits=False)) == COMMON


def test_a_hub_that_stays_busy(hub):
    hub.faults["revision"] = [429] * 9
    assert ask(hub, "org/one", waits=False).startswith(
        f"ConnectionError: {hub.url} answered 429, and the cache lacks all or part of org/"
    )
    assert len(hub.requests) == 4


FIRST = "model-00001-of-00002.safetensors"


def test_answers_that_the_hub_would_not_give(hub, tmp_path):
    """A proxy's page, answers too large, too deep or too slow, and names that lead out of the cache, are refused."""
    out = "../../../../out"
    file = lambda etag, commit="a" * 40: (200, b"", {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
    answers = [
        ((200, b"<html>Log in</html>"), r"answers with what is no JSON \(.*\), such as a page of a proxy"),
        ((200, b"[" * 10**6), "answers with what is no JSON"),
        ((200, b'"' + b" " * 2**25 + b'"'), "answers with more than 32 MiB, the most that belongs there"),
        ((200, b"{}"), "leaves out what it has to say .*"),
        ((200, b"[]"), "leaves out what it has to say .*"),
        ((200, json.dumps({"id": "org/one", "sha": out}).encode()), f"names the commit '{out}', which is no hash"),
        (("drip",), r"sent \d+ bytes in the last 6\d seconds"),
    ]
    files = [
        (file(out), f"gives a file the ETag '{out}', which would lead out of the cache"),
        (file(f"{tmp_path}/out"), f"gives a file the ETag '{tmp_path}/out', which would"),
        (file("1", out), f"gives a file the X-Repo-Commit '{out}', which would"),
    ]
    hub.faults = {"/revision/": [answer for answer, _ in answers], "config.json": [answer for answer, _ in files]}
    told = ask(hub, "org/one", *[""] * (len(answers) + len(files)), waits=False).splitlines()
    for line, (_, expected) in zip(told, answers + files, strict=True):
        assert re.match(f"ConnectionError: {hub.url} {expected}.*; try again later, and look at HF_ENDPOINT", line)
    assert not [path for path in tmp_path.rglob("*out*") if path.is_file()]


def test_a_file_that_drips(hub):
    """A file that arrives too slowly is given up, however large it is; a shard that the repository lacks is named."""
    head = {"ETag": '"1"', "X-Repo-Commit": "a" * 40, "Content-Length": "1000000"}
    hub.faults = {f"resolve/.*{FIRST}": [(200, b"", head), ("drip",)]}
    told = ask(hub, "org/many", waits=False)
    assert re.match(rf"ConnectionError: {hub.url} sent \d+ bytes in the last 6\d seconds; try again later", told)
    hub.faults = {FIRST: [(404, b"", {"X-Error-Code": "EntryNotFound"})]}
    told = ask(hub, "org/many")
    assert re.match(r"FileNotFoundError: org/many lacks a file that .*index\.json of its commit a+ names", told)


def test_a_damaged_file_is_fetched_once_more(hub):
    hub.damaged.update({"config.json": 1, FIRST: 1})
    assert open_tensors(ask(hub, "org/many")).keys() == {"x", "y"}
    assert sum(path.endswith(FIRST) for path in hub.requests) == 4  # each time its headers first


def test_files_that_arrive_damaged_again(hub):
    """Each file is checked on arrival, before the next one. If a mirror's ETags are no hashes, the API has them."""
    hub.damaged.update({FIRST: 2})
    hub.etag = "v1-"
    assert ask(hub, "org/many") == (
        f"OSError: Damaged on arrival, twice, and removed from the cache: {FIRST} of org/many; load it again later."
    )
    assert FIRST not in names(hub.cache)
    assert open_tensors(ask(hub, "org/many")).keys() == {"x", "y"}


@pytest.mark.parametrize("etag", [None, "v1-"])
def test_what_an_interrupted_download_left_is_checked(hub, monkeypatch, etag):
    """An interrupted download's files are checked, and a checked file is not read again, however long ago that was."""
    hub.etag = etag
    path = pathlib.Path(ask(hub, "org/one"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache / "hub"))  # offline, in this process
    weights = path / "model.safetensors"
    before, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\1")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert folder("org/one") == path
    shutil.rmtree(hub.cache / "hub" / "models--org--one" / "verified")  # as if killed before the check was recorded
    with pytest.raises(OSError, match="is not complete" if etag is None else "lies unchecked in the cache.*its folder"):
        folder("org/one")
    assert weights.exists() == (etag is not None)
    monkeypatch.undo()
    assert open_tensors(ask(hub, "org/one"))["x"].view().tolist() == [0, 1, 2]


def test_read_json_only_of_files(tmp_path):
    """A file that would never end, or fill the memory, is not opened."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match=f"{path} is no regular file"):
            read_json(path)
    with pytest.raises(ValueError, match="huge has 1,099,511,627,776 bytes, where a few kB of JSON belong"):
        read_json(tmp_path / "huge")


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert folder(tmp_path) == tmp_path
    assert folder(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "one").mkdir(parents=True)
    assert folder("org/one") == pathlib.Path("org/one")
    assert folder("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "source", ["./org", "../org/one", "~/org", "/org/one", "org/one/two", "one", pathlib.Path("org/one")]
)
def test_what_is_neither_folder_nor_repository(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"no folder {re.escape(str(source))}; .* is written org/name"):
        folder(source)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(NotADirectoryError, match=r"model\.safetensors is a file; name the folder that holds it"):
        folder(tmp_path / "model.safetensors")


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a local folder, which has no revision 'v1'"):
        folder(tmp_path, "v1")


def test_companions_leave_the_config_and_the_weights_alone():
    assert not {"config.json", "model.safetensors", "model.safetensors.index.json"} & set(COMPANIONS)
    assert not [pattern for pattern in COMPANIONS if pathlib.PurePath("config.json").match(pattern)]


def test_read_json(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 8, "name": "é", "nested": {"name": [1.5, null]}}', encoding="utf-8"
    )
    assert read_json(tmp_path / "config.json") == {"hidden_size": 8, "name": "é", "nested": {"name": [1.5, None]}}


def test_infinity_as_python_and_transformers_write_it(tmp_path):
    (tmp_path / "config.json").write_text('{"limits": [0.0, Infinity, {"__float__": "Infinity"}]}')
    assert read_json(tmp_path / "config.json") == {"limits": [0.0, math.inf, math.inf]}


@pytest.mark.parametrize(
    "text, message",
    [
        (b'{"a": 1,\n\n}', r"config\.json, line 3: "),
        (b"", r"config\.json, line 1: Expecting value"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', r"config\.json: the key 'b' appears twice"),
        (b'{"a": NaN}', r"config\.json: NaN is not JSON"),
        (b'{"a": [-Infinity]}', r"config\.json: -Infinity is not JSON"),
        (b'["a"]', r"config\.json holds a list where a JSON object belongs"),
        (b'{"a": "\xff"}', r"config\.json: 'utf-8' codec can't decode"),
        (b'{"a": ' + b"[" * 200_000, r"config\.json: maximum recursion depth"),
        (b'{"a": 1' + b"0" * 5000 + b"}", r"config\.json: Exceeds the limit"),
    ],
    ids=["line", "empty", "twice", "nan", "infinity", "list", "bytes", "deep", "long number"],
)
def test_json_that_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "config.json")


def test_the_hash_of_weights(tmp_path):
    """Blobs in the Hub's cache are named by their hashes, so their hash equals a folder's without reading them."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "snapshot").mkdir()
    for name, content in (("a.safetensors", b"a"), ("b.safetensors", b"b")):
        (tmp_path / "folder" / name).write_bytes(content)
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / hashlib.sha256(content).hexdigest())
    folder, snapshot = (weights_hash(tmp_path / name) for name in ("folder", "snapshot"))
    assert folder == snapshot
    (tmp_path / "folder" / "b.safetensors").write_bytes(b"c")
    assert weights_hash(tmp_path / "folder") != snapshot
