"""The command line: `python -m zoo verify SOURCE`, `chat SOURCE`, `serve SOURCE`, `evaluate SOURCE --tasks TASK`,
`merge SOURCE ADAPTER OUT`, `to-hub CHECKPOINT OUT`, `to-orbax MODEL OUT`,
`to-gguf SOURCE OUT.gguf`."""

import pathlib
import shutil
import sys
import traceback
from typing import Annotated, Literal

import tyro

import zoo
from kernels.backends.errors import out_of_jax, show_all_frames
from zoo import evaluation, lora
from zoo.chat import LoadOptions, chat
from zoo.gguf import to_gguf
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
    ignore_keys: tuple[str, ...] = (),
) -> None:
    """Check a checkpoint against transformers: config, tensors, logits, layers, decoding, round trip.

    Both models are held in float32, which takes eight bytes of memory per parameter. Exits with 1 if a check fails.

    Args:
        source: a zoo name, a Hub repository org/name, a folder, or a GGUF file.
        html: the file for the report. None: NAME-verify.html beside the folder NAME, or in the current folder if SOURCE
            is not a folder.
        tokens: number of random tokens to compare on. To test a sliding window, take more than its length.
        seed: random seed of the tokens.
        ignore_keys: keys of config.json to skip where they would be refused (docs/config.md).
    """
    folder = pathlib.Path(source).expanduser()
    beside = folder.resolve().parent / f"{folder.resolve().name}-verify.html"
    html = html or (beside if folder.is_dir() else pathlib.Path(f"{folder.name}-verify.html"))
    sys.exit(0 if report(source, html, tokens=tokens, seed=seed, ignore=ignore_keys) else 1)


def evaluate(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    tasks: tuple[str, ...],
    limit: int | None = None,
    batch: int = 32,
    max_new_tokens: int = 256,
    adapter: pathlib.Path | None = None,
    quantize: Literal["int8", "fp8", "nf4", "stored"] | None = None,
    dtype: str | None = None,
    mesh: str | None = None,
    ignore_keys: tuple[str, ...] = (),
) -> None:
    """Evaluate a model on tasks of lm-eval, and print its tables.

    Args:
        source: a zoo name, a Hub repository org/name, a folder, or a GGUF file.
        tasks: names of lm-eval's own tasks, and YAML files, or folders of such files, of yours.
        limit: number of questions of each task, from its beginning. None: all.
        batch: number of texts that are scored or written at a time.
        max_new_tokens: largest number of tokens of a generated text, unless the task sets another.
        adapter: folder with an adapter of the model, in PEFT's layout.
        quantize: hold the layers' weights in 8 or 4 bits; stored: as the checkpoint has them (docs/weights.md).
        dtype: data type of the weights: float32, bfloat16 or float16. None: the checkpoint's.
        mesh: number of devices along each axis, such as tensor=4 or fsdp=2,tensor=2. None: one device.
        ignore_keys: keys of config.json to skip where they would be refused (docs/config.md).
    """
    known = [evaluation.Tasks(name) for name in tasks]  # a wrong name is refused here, before a long load
    load = LoadOptions(adapter=adapter, quantize=quantize, dtype=dtype, ignore_keys=ignore_keys)
    opened = load.open(source)
    model, _ = load.model(opened, None if mesh is None else zoo.make_mesh(mesh))
    for results in evaluation.run(
        model, load.tokenizer(opened), known, limit=limit, batch=batch, max_new_tokens=max_new_tokens
    ):
        print(evaluation.table(results))


def merge(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")],
    adapter: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="ADAPTER")],
    out: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="OUT")],
    mxfp4: bool = False,
    ignore_keys: tuple[str, ...] = (),
) -> None:
    """Merge an adapter into a model's weights, and write the result in the Hub's layout and the model's dtype.

    Args:
        source: the model that the adapter was trained on: a zoo name, a Hub repository org/name, a folder, or a GGUF
            file.
        adapter: a folder in PEFT's layout, such as a training run with --lora.rank writes.
        out: the folder to write.
        mxfp4: write gpt-oss's experts in MXFP4, as it is released.
        ignore_keys: keys of config.json to skip where they would be refused (docs/config.md).
    """
    opened = Source.open(source, ignore=ignore_keys)
    for warning in peft.warnings_of(adapter, quantize=None, weights=zoo.fingerprint(opened)):
        print(warning)
    zoo.save(lora.merge(peft.load(zoo.load(opened), adapter)), out, mxfp4=mxfp4)
    if template := peft.template_of(adapter):
        shutil.copy(template, out)
    print(f'Merged; zoo.load("{out}") and transformers read it.')


if __name__ == "__main__":
    zoo.keep_programs()
    show_all_frames()
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "verify": verify,
                "chat": chat,
                "serve": serve,
                "evaluate": evaluate,
                "merge": merge,
                "to-hub": to_hub,
                "to-orbax": to_orbax,
                "to-gguf": to_gguf,
            },
            prog="python -m zoo",
            description=__doc__,
        )
    except (ValueError, OSError, ImportError) as error:
        if refused := out_of_jax(error):
            traceback.print_exc()
            raise SystemExit(f"{refused}. Please report it with the traceback above.") from None
        raise SystemExit(f"{type(error).__name__}: {error}") from error
