"""A script that computes an offending step of a run once more: `python -m train.replay RUN/offending-17`.

A run keeps the batch and the state of a step that was not finite, or a spike (see docs/faults.md). The script compares
the step's numbers with the run's, bit by bit, and names the first operation that made a NaN, with its line of code.
"""

import argparse
import json
import pathlib
import runpy
import sys

from train.base import runfile


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.replay", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="folder offending-... in that of a run")
    parser.add_argument("options", nargs="*", help="options that are to be others, such as --compute-dtype float32")
    arguments, more = parser.parse_known_args()
    try:
        script = json.loads((arguments.folder / "about.json").read_text())["script"]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{arguments.folder} has no step to replay: {error}") from error
    config = arguments.folder / runfile.RUN
    sys.argv = [script, "--config", str(config), "--replay", str(arguments.folder), *arguments.options, *more]
    runpy.run_module(script, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
