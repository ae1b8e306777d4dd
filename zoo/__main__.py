"""The command line: `python -m zoo verify SOURCE`."""

import pathlib
import sys
from typing import Annotated

import tyro

from zoo.verify import report


def verify(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    html: pathlib.Path | None = pathlib.Path("verify.html"),
    tokens: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 64,
    seed: int = 0,
) -> None:
    """Checks a checkpoint against transformers: config, tensors, logits, layers, decoding, round trip.

    Both models are held in float32, so this takes eight bytes of memory a parameter. Exits with 1 if a check fails.

    Args:
        source: a zoo name, a Hub repository org/name, or a folder.
        html: the file to keep the report in; None for none.
        tokens: how many random tokens to compare on. To test a sliding window, take more than it holds.
        seed: of those tokens.
    """
    sys.exit(0 if report(source, html, tokens=tokens, seed=seed) else 1)


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"verify": verify}, description=__doc__)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
