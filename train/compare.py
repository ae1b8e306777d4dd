"""A script that draws several runs in one page: `python -m train.compare RUN...`."""

import pathlib
from typing import Annotated

import tyro

from train.watch import page


def compare(
    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")],
    out: pathlib.Path = pathlib.Path("compare.html"),
) -> None:
    """Draws runs over each other, with the differences of their options, data and models, and samples side by side.

    The page is one file that needs no server and no network. `python -m train.report RUN` draws one run.

    Args:
        runs: Folders of runs, such as runs/sft runs/sft-2.
        out: File to write.
    """
    try:
        page.write(runs, out)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"Written to {out}.")


if __name__ == "__main__":
    tyro.cli(compare, prog="python -m train.compare")
