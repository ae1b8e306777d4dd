"""A script that makes pairs to train embeddings on from a Python installation alone: `python -m train.tiny.pairs OUT`.

A pair is of a description, the first paragraph of a piece of Python's documentation, and of what it describes: the
title, such as `textwrap.dedent(text)`, and the rest of the piece. The pairs are those of the corpus that the checkpoint
`tiny` was pre-trained on, in random order.
"""

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import tyro

from train.tiny.__main__ import documents


WORDS = 5  # fewest words of a description


def pairs(library: Path) -> Iterator[dict[str, str]]:
    """Yields the pairs of the running Python, whose standard library is the folder `library`. No description is twice.

    Topics of `help()` are left out: their titles are single words.
    """
    seen = set()
    for document in documents(library):
        title, description, *rest = document.split("\n\n")
        description = " ".join(description.split())
        if len(description.split()) >= WORDS and description not in seen and not title.isidentifier():
            seen.add(description)
            yield {"anchor": description, "positive": "\n\n".join([title, *rest])}


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes a file of pairs from the documentation of the running Python, in some seconds.

    Args:
        out: file of JSON lines.
    """
    found = list(pairs(Path(sysconfig.get_path("stdlib"))))
    random.Random(0).shuffle(found)
    out.write_text("".join(json.dumps(pair) + "\n" for pair in found))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.tiny.pairs")
