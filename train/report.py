"""A script that writes the page of a run, report.html, again: `python -m train.report RUN`."""

import pathlib

import tyro

from train.watch import page


def rebuild_page(run: tyro.conf.Positional[pathlib.Path]) -> None:
    """Draws a run as report.html in its folder, from the files there. `python -m train.compare` draws several runs.

    Args:
        run: Folder of the run, such as runs/sft.
    """
    try:
        page.write([run], run / page.REPORT)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"Written to {run / page.REPORT}.")


if __name__ == "__main__":
    tyro.cli(rebuild_page, prog="python -m train.report")
