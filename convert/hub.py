"""Finds the folder of a checkpoint in the Hub's layout: a local folder, or a download in huggingface_hub's cache."""

import concurrent.futures
import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from huggingface_hub import (
    HfApi,
    constants,
    get_safetensors_metadata,
    get_session,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage], the transport's, which the library lets through
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import SafetensorsRepoMetadata

from convert import manifest
from convert.files import (
    CARD,
    COMPANIONS,
    INDEX,
    LARGEST,
    MANIFEST,
    MODULE_CONFIGS,
    MODULE_WEIGHTS,
    MODULES,
    PART,
    WEIGHTS,
    one_gguf,
    read_index,
)
from convert.pacing import paced


HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # git's SHA-1, or SHA-256
T = TypeVar("T")
BUSY = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which a request is retried


class NotTheHub(HTTPError):
    """An error of a server that behaves as the Hub would not, such as a proxy or a broken mirror."""


def folder(
    source: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True, companions: bool = True
) -> pathlib.Path:
    """Returns the local folder that holds a checkpoint, after downloading it if need be.

    Args:
        source: a folder, which is returned as it is, or a Hub repository "org/name". A repository's config.json,
            COMPANIONS, CARD, sentence-transformers' modules and safetensors are downloaded to huggingface_hub's cache,
            all from one commit. HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and the like have the same effect as in that library.
            Each file is checked against the Hub's hash, even if another program or an interrupted download left the
            file in the cache. A repository without config.json that has one GGUF file gets that file, in any case.
        revision: a branch, tag or commit of the repository; None is its main branch.
        weights: False leaves out the safetensors.
        companions: False leaves out the COMPANIONS and the CARD.

    Raises:
        OSError: the folder or repository does not exist, or cannot be downloaded; the message says what to do.
        ValueError: `revision` is given for a local folder, or the repository has no safetensors.
    """
    path = pathlib.Path(os.path.expanduser(source))
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{path} is a local folder, which has no revision {revision!r}; leave the revision out.")
        return path
    if path.exists():
        raise NotADirectoryError(f"{path} is a file; name the folder that holds it.")
    if not isinstance(source, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise FileNotFoundError(f"There is no folder {source}; a repository on the Hub is written org/name.")
    patterns = ["config.json", *[WEIGHTS, INDEX, MANIFEST, MODULE_WEIGHTS] * weights]
    patterns += [*COMPANIONS, MODULES, *MODULE_CONFIGS, CARD] * companions
    download = lambda: snapshot_download(source, revision=revision, allow_patterns=patterns)
    snapshot = pathlib.Path(_patiently(download, source, revision))
    if not (snapshot / "config.json").exists() and (name := _only_gguf(source, snapshot)):
        return gguf_file(f"{source}/{name}", snapshot.name).parent
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    _fetch(source, snapshot, [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)])
    if weights and not (snapshot / WEIGHTS).exists():
        if not (snapshot / INDEX).exists():
            raise _no_safetensors(source)
        _fetch(source, snapshot, set(read_index(snapshot / INDEX).values()))
    return snapshot


def gguf_file(source: str, revision: str | None = None) -> pathlib.Path:
    """Returns the path of the GGUF file "org/name/FILE.gguf" of a repository, after downloading it if need be.

    If its name says that it is one of several parts, all of them are downloaded.

    Raises:
        OSError: there is no such repository or file, or it cannot be downloaded; the message says what to do.
    """
    organisation, repository, file = source.split("/", 2)
    repo, part = f"{organisation}/{repository}", PART.fullmatch(file)
    wanted = (
        [f"{part['name']}-{n:05}-of-{part['count']}.gguf" for n in range(1, int(part["count"]) + 1)] if part else []
    )
    wanted = wanted or [file]
    download = lambda: snapshot_download(repo, revision=revision, allow_patterns=wanted)
    snapshot = pathlib.Path(_patiently(download, repo, revision))
    if missing := [name for name in wanted if not (snapshot / name).exists()]:
        raise FileNotFoundError(f"{repo} has no file {missing[0]}.")
    _fetch(repo, snapshot, wanted)
    return snapshot / file


def _only_gguf(repo: str, snapshot: pathlib.Path) -> str | None:
    """Returns the name of the only GGUF file of a repository, by what was downloaded, or else by the Hub's list."""
    names = [path.name for path in snapshot.glob("*.gguf")]
    if not names and not constants.is_offline_mode():
        names = [name for name in _patiently(lambda: _hashes(repo, snapshot.name), repo, snapshot.name) if
                 name.endswith(".gguf") and "/" not in name]  # fmt: skip
    return one_gguf(names, repo)


def weights_hash(folder: pathlib.Path) -> str:
    """Returns a SHA-256 of the names and contents of a folder's safetensors.

    The Hub's cache names files by their hashes, which were checked on arrival; other files are read and hashed.
    """
    files = sorted(folder.glob("*.safetensors"))
    known = {path.name: path.readlink().name for path in files if path.is_symlink()}
    known = {name: digest for name, digest in known.items() if re.fullmatch("[0-9a-f]{64}", digest)}
    known |= manifest.hashes(folder, [path.name for path in files if path.name not in known])
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def headers(repo: str, commit: str) -> SafetensorsRepoMetadata:
    """Reads the headers of a repository's safetensors: some 100 kB of each file, whatever the file's size.

    Raises:
        OSError: the headers cannot be downloaded; the message says what to do.
        ValueError: the repository has no safetensors, or a file's header is not complete.
    """
    try:
        return _patiently(lambda: get_safetensors_metadata(repo, revision=commit), repo, commit)
    except NotASafetensorsRepoError as error:
        raise _no_safetensors(repo) from error
    except SafetensorsParsingError as error:
        raise ValueError(f"A file of {repo} is not a whole safetensors file: {error}") from error


def _no_safetensors(repo: str) -> ValueError:
    return ValueError(
        f"{repo} has neither {WEIGHTS} nor {INDEX}, and other formats, such as pickle files, are refused; "
        "https://huggingface.co/spaces/safetensors/convert converts a repository. A GGUF file, if it has one, is "
        f"{repo}/FILE.gguf."
    )


def _fetch(repo: str, snapshot: pathlib.Path, names: Iterable[str]) -> None:
    """Downloads those files that a snapshot of the cache lacks or has damaged, several at a time."""

    def fetch(name: str) -> None:
        for _ in range(2):
            path = pathlib.Path(
                _patiently(lambda: hf_hub_download(repo, name, revision=snapshot.name), repo, snapshot.name)
            )
            if _is_whole(repo, path):
                return
            blob = path.resolve()
            path.unlink()
            blob.unlink(missing_ok=True)
        raise OSError(f"Damaged on arrival, twice, and removed from the cache: {name} of {repo}; load it again later.")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, names))


def _patiently(ask: Callable[[], T], repo: str, revision: str | None) -> T:
    """Returns the result of `ask()`, a request to the Hub; retries up to three times while the Hub is busy."""
    pauses = iter((1, 2, 4))
    while True:
        try:
            with _guarded():
                return ask()
        except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            pause = next(pauses, None)
            if pause is None or _status(error) not in BUSY:
                raise _in_plain_words(error, repo, revision) from error
            time.sleep(pause)
        except (AssertionError, AttributeError, KeyError, TypeError) as error:  # an answer lacks what the library needs
            raise _in_plain_words(NotTheHub(f"leaves out what it has to say ({error!r})"), repo, None) from error


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Makes responses to huggingface_hub that are too slow, too large or malformed raise NotTheHub, within the block.

    The library itself has no limits (see `convert.pacing`), and names files as the server says.
    """
    hooks = get_session().event_hooks["response"]
    hooks.append(_check)
    try:
        yield
    finally:
        hooks.remove(_check)


def _check(response: Any) -> None:
    """Checks the headers of an httpx.Response, and wraps its body, which is checked while it arrives."""
    api = str(response.url).startswith(f"{constants.ENDPOINT}/api/") or response.is_error
    response.iter_raw = functools.partial(_paced, response.iter_raw, LARGEST if api else None)
    for key in ("X-Repo-Commit", "X-Linked-Etag", "ETag"):
        value = pathlib.PurePosixPath(response.headers.get(key, "").lstrip("W/").strip('"'))  # as the library parses it
        if value.is_absolute() or ".." in value.parts:
            raise NotTheHub(f"gives a file the {key} {str(value)!r}, which would lead out of the cache")
    if api and response.is_success and response.request.method != "HEAD":
        try:
            answer = json.loads(response.read())
        except (ValueError, RecursionError) as error:
            raise NotTheHub(f"answers with what is no JSON ({error}), such as a page of a proxy") from error
        if isinstance(answer, dict) and not re.fullmatch("[0-9a-f]{40}", str(answer.get("sha", "0" * 40))):
            raise NotTheHub(f"names the commit {str(answer['sha'])[:80]!r}, which is no hash")


def _paced(read: Callable[..., Iterator[bytes]], largest: int | None, *size: int | None) -> Iterator[bytes]:
    """Yields the pieces of a body, as long as they arrive fast enough and add up to at most `largest` bytes."""
    return paced(read(*size), NotTheHub, largest=largest)


def _is_whole(repo: str, path: pathlib.Path) -> bool:
    """Whether a file of a snapshot has the Hub's hash: the one that names its blob, or else the API's.

    The library compares sizes only. A whole file is noted beside the blobs, with its size and modification time, and is
    not read again.

    Raises:
        OSError: the hash has to come from the Hub, which does not answer or is not to be asked (HF_HUB_OFFLINE).
    """
    name = path.readlink().name if path.is_symlink() else ""
    # A blob that is named by its hash is noted once for all commits. Other names do not identify the contents.
    note = path.parents[2] / "verified" / (name if HASH.fullmatch(name) else f"{path.parent.name}-{path.name}")
    state = path.stat()
    seen = f"{state.st_size} {state.st_mtime_ns}"
    if note.is_file() and note.read_text() == seen:
        return True
    whole, offline = _matches(path, name), constants.is_offline_mode()
    if not whole and not offline:  # a mirror may name blobs by its own hashes, or otherwise
        said = _patiently(lambda: _hashes(repo, path.parent.name), repo, path.parent.name).get(path.name, "")
        told = None if said == name else _matches(path, said)
        whole = whole if told is None else told
    if whole is None and offline:
        raise OSError(
            f"{path.name} of {repo} lies unchecked in the cache, and its hash cannot be asked for offline; unset "
            f"HF_HUB_OFFLINE once, or load it as it is by its folder, {path.parent}."
        )
    if whole is False:
        return False
    with contextlib.suppress(OSError):  # the cache may be read-only: then the file is hashed again the next time
        note.parent.mkdir(exist_ok=True)
        note.write_text(seen)
    return True


def _matches(path: pathlib.Path, digest: str) -> bool | None:
    """Whether a file has this hash: SHA-256, or git's SHA-1 for files not in LFS. None if `digest` is no hash."""
    if not HASH.fullmatch(digest):
        return None
    start = hashlib.sha256 if len(digest) == 64 else lambda: hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, start).hexdigest() == digest


@functools.cache
def _hashes(repo: str, commit: str) -> dict[str, str]:
    """Asks the Hub's API for the hash of every file of a commit."""
    tree = HfApi().list_repo_tree(repo, recursive=True, revision=commit)
    return {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in tree if isinstance(file, RepoFile)}


def _status(error: Exception) -> int | None:
    """Returns the HTTP status behind an error of huggingface_hub, or None."""
    for link in (error, error.__cause__):
        if isinstance(link, HfHubHTTPError):
            return link.response.status_code
    return None


def _in_plain_words(error: Exception, repo: str, revision: str | None) -> OSError:
    """Returns an error that says what went wrong and what to do about it."""
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    status = _status(error)
    if isinstance(error, NotTheHub):
        return ConnectionError(
            f"{constants.ENDPOINT} {error}; try again later, and look at HF_ENDPOINT and at proxies, if you have any."
        )
    if isinstance(error, EntryNotFoundError) and status == 404:
        return FileNotFoundError(f"{repo} lacks a file that {INDEX} of its commit {revision} names.")
    if isinstance(error, GatedRepoError):
        return PermissionError(f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then {log_in}.")
    if isinstance(error, RepositoryNotFoundError):
        return FileNotFoundError(
            f"There is neither a folder {repo} here nor a repository {repo} on the Hub that you may read; check the "
            f"name, or, if it is private, {log_in}."
        )
    if isinstance(error, RevisionNotFoundError):
        return FileNotFoundError(f"{repo} has no branch, tag or commit {revision!r}.")
    if status in (401, 403):
        return PermissionError(
            f"The Hub denies access to {repo} (status {status}); take a token that may read it: {log_in}."
        )
    if constants.is_offline_mode():
        return FileNotFoundError(f"{repo} is not complete in the cache; unset HF_HUB_OFFLINE to download it.")
    trouble = f"answered {status}" if status else f"could not be reached ({error.__cause__ or error})"
    return ConnectionError(
        f"{constants.ENDPOINT} {trouble}, and the cache lacks all or part of {repo}; try again later."
    )
