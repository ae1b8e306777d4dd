"""Keeps passwords and tokens that stand in URLs out of files and messages, and files to their owner."""

import os
import pathlib
import re


# user:password@ after ://, and values of a query's keys such as those of signed URLs.
USER = re.compile(r"(?<=://)[^/?#\s@'\"\\]+@")
QUERY = re.compile(r"([?&][\w.%-]*(?:token|key|sig|signature|password|secret|credential)[\w.%-]*=)[^&#\s'\"\\]+", re.I)


def public(text: str) -> str:
    """Replaces passwords and tokens in the URLs of a text by ***."""
    return QUERY.sub(r"\1***", USER.sub("***@", text))


def write(path: pathlib.Path, text: str) -> None:
    """Writes `public(text)` in one move, to a file that only its owner may read: commands may hold other secrets."""
    new = path.with_name(f"{path.name}.tmp")
    new.unlink(missing_ok=True)
    with open(new, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(public(text))
    new.replace(path)
