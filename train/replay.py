"""A script that computes an offending step of a run once more: `python -m train.replay RUN/offending-17`.

A run keeps the batch and the state of a step that was not finite, or a spike (see docs/faults.md). The script compares
the step's numbers with the run's, bit by bit, and names the first operation that made a NaN, with its line of code.
"""

import argparse
import importlib
import json
import pathlib
import sys
import typing

from train.base import runfile
from train.base.command import command
from train.run.options import Options


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.replay", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="folder offending-... in that of a run")
    parser.add_argument("options", nargs="*", help="options that are to be others, such as --compute-dtype float32")
    arguments, more = parser.parse_known_args()
    try:
        script = importlib.import_module(json.loads((arguments.folder / "about.json").read_text())["script"])
    except (OSError, ValueError) as error:
        raise SystemExit(f"{arguments.folder} has no step to replay: {error}") from error
    options: type[Options] = typing.get_type_hints(script.main)["o"]
    sys.argv[1:] = ["--config", str(arguments.folder / runfile.RUN), *arguments.options, *more]
    command(lambda o: script.main(o.changed(replay=arguments.folder)), options)


if __name__ == "__main__":
    main()
