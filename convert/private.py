"""Keeps passwords and tokens in URLs out of files and messages."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any


# user:password@ after ://, and values of a query's keys such as those of signed URLs.
USER = re.compile(r"(?<=://)[^/?#\s@'\"\\]+@")
QUERY = re.compile(r"([?&][\w.%-]*(?:token|key|sig|signature|password|secret|credential)[\w.%-]*=)[^&#\s'\"\\]+", re.I)


def public(text: str) -> str:
    """Replaces passwords and tokens in the URLs of a text by ***."""
    return QUERY.sub(r"\1***", USER.sub("***@", text))


def public_json(value: Any) -> Any:
    """Applies `public` to all strings of a JSON value. Objects that JSON does not have become strings."""
    return json.loads(public(json.dumps(value, default=str)))


def warn_of_secrets(arguments: Sequence[str]) -> None:
    """Warns if an argument holds a password or token, which nothing can remove from the list of processes."""
    if any(public(word) != word for word in arguments):
        print(
            "WARNING: a URL of the command line has a password or token, which every user of this machine can see in "
            "the list of processes. Put it into the environment, the store's own file of credentials, or a file for "
            "--config.",
            file=sys.stderr,
        )
