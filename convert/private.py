"""Keeps passwords and tokens that stand in URLs out of files and messages."""

import re


# user:password@ after ://, and values of a query's keys such as those of signed URLs.
USER = re.compile(r"(?<=://)[^/?#\s@'\"\\]+@")
QUERY = re.compile(r"([?&][\w.%-]*(?:token|key|sig|signature|password|secret|credential)[\w.%-]*=)[^&#\s'\"\\]+", re.I)


def public(text: str) -> str:
    """Replaces passwords and tokens in the URLs of a text by ***."""
    return QUERY.sub(r"\1***", USER.sub("***@", text))
