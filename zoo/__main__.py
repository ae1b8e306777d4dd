"""The command line: `python -m zoo verify SOURCE`, `chat SOURCE`, `serve SOURCE`, `merge SOURCE ADAPTER OUT`,
`to-hub CHECKPOINT OUT`, `to-orbax MODEL OUT`."""

import pathlib
import shutil
import sys
from typing import Annotated

import tyro

import zoo
from zoo import lora
from zoo.chat import chat
from zoo.orbax import to_hub, to_orbax
from zoo.serve import serve
from zoo.source import Source
from zoo.verify import report
from zoo.weights import peft


def verify(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    html: pathlib.Path | None = None,
    tokens: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 64,
    seed: int = 0,
) -> None:
    """Check a checkpoint against transformers: config, tensors, logits, layers, decoding, round trip.

    Both models are held in float32, which takes eight bytes of memory per parameter. Exits with 1 if a check fails.

    Args:
        source: a zoo name, a Hub repository org/name, or a folder.
        html: the file for the report. None: NAME-verify.html beside the folder NAME, or in the current folder if SOURCE
            is not a folder.
        tokens: number of random tokens to compare on. To test a sliding window, take more than its length.
        seed: random seed of the tokens.
    """
    folder = pathlib.Path(source).expanduser()
    beside = folder.resolve().parent / f"{folder.resolve().name}-verify.html"
    html = html or (beside if folder.is_dir() else pathlib.Path(f"{folder.name}-verify.html"))
    sys.exit(0 if report(source, html, tokens=tokens, seed=seed) else 1)


def merge(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    adapter: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="ADAPTER")],
    out: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="OUT")],
) -> None:
    """Merge an adapter into a model's weights, and write the result in the Hub's layout and the model's dtype.

    Args:
        source: the model that the adapter was trained on: a zoo name, a Hub repository org/name, or a folder.
        adapter: a folder in PEFT's layout, such as a training run with --lora.rank writes.
        out: the folder to write.
    """
    opened = Source.open(source)
    for warning in peft.warnings_of(adapter, quantize=None, weights=zoo.fingerprint(opened)):
        print(warning)
    zoo.save(lora.merge(peft.load(zoo.load(opened), adapter)), out)
    if template := peft.template_of(adapter):
        shutil.copy(template, out)
    print(f'Merged; zoo.load("{out}") and transformers read it.')


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "verify": verify,
                "chat": chat,
                "serve": serve,
                "merge": merge,
                "to-hub": to_hub,
                "to-orbax": to_orbax,
            },
            prog="python -m zoo",
            description=__doc__,
        )
    except (ValueError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
