"""Draws what one should see of each recipe: runs them at a size for a CPU, and takes a picture of each run's page.

    python -m benchmarks.recipes [NAME ...]

It needs Chromium. The pictures, docs/recipes/NAME.png, are of report.html, which every run writes.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import rich

from benchmarks.gpu import matches
from tests.zoo.browser import COMMAND


DOCS = pathlib.Path(__file__).parents[1] / "docs"
SIZE = "1560,536"  # pixels of a picture: the numbers, and the curves of what is learnt
# The commands of each recipe, the last of which writes the run of the picture.
RECIPES = {
    "chat-model": ["python -m train.sft --hold-out 0.1 --eval-every 10 --out runs/chat-model"],
    "domain": ["python -m train.sft --data corpus/ --hold-out 0.1 --steps 60 --eval-every 10 --out runs/domain"],
    "reasoning": ["python -m train.grpo --out runs/reasoning"],
    "tools": [
        "python -m train.environments.tiny caller",
        "python -m train.environments calculator calls.jsonl --solved 0.15 --count 16000",
        "python -m train.environments calculator questions.jsonl",
        "python -m train.sft --model caller --data calls.jsonl --seq-len 256 --batch 8 --steps 800 --lr 3e-3"
        " --out runs/caller",
        "python -m train.grpo --model runs/caller/model --environment calculator --data questions.jsonl --seq-len 96"
        " --max-new-tokens 24 --lr 3e-4 --steps 60 --hold-out 0.064 --eval-every 10 --out runs/tools",
    ],
    "preferences": [
        "python -m train.sft --out runs/chat-model",
        "python -m train.dpo --model runs/chat-model/model --eval-every 5 --out runs/preferences",
    ],
    "vision": [
        "python -m train.tiny.shapes runs/drawings",
        "python -m train.sft --model runs/drawings/model --data runs/drawings/data --vision --seq-len 80 --packing off"
        " --batch 32 --steps 1400 --lr 4e-3 --weight-decay 0.05 --compute-dtype float32 --out runs/vision",
    ],
    "distillation": [
        "python -m train.sft --out runs/chat-model",
        "python -m train.distill --teacher runs/chat-model/model --steps 60 --lr 1e-3 --hold-out 0.1 --eval-every 10"
        " --out runs/distillation",
    ],
    "long-context": [
        "python -m train.sft --data corpus/ --seq-len 256 --remat full --mesh fsdp=2,context=4 --batch 4 --steps 40"
        " --hold-out 0.1 --eval-every 10 --out runs/long-context",
    ],
    "pod": [
        "python -m train.sft --mesh replica=2,fsdp=4 --batch 8 --steps 60 --hold-out 0.1 --eval-every 10"
        " --out runs/pod",
    ],
}  # fmt: skip
EIGHT = ("long-context", "pod")  # on eight devices that the CPU stands in for


def main(*names: str) -> None:
    """Runs recipes whose names one of these patterns matches, or all."""
    if COMMAND is None:
        raise SystemExit("The pictures need Chromium, and there is none in the PATH.")
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        (here / "corpus").mkdir()
        for page in DOCS.glob("*.md"):
            shutil.copy(page, here / "corpus" / f"{page.stem}.txt")
        for name in (name for name in RECIPES if matches(name, names or ("*",))):
            flags = "--xla_force_host_platform_device_count=8" if name in EIGHT else ""
            for command in RECIPES[name]:
                rich.print(f"$ {command}")
                words = [sys.executable, *command.split()[1:]]
                subprocess.run(words, cwd=here, check=True, env=os.environ | {"XLA_FLAGS": flags})
            picture = DOCS / "recipes" / f"{name}.png"
            page = (here / "runs" / name / "report.html").as_uri()
            flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}")
            subprocess.run([COMMAND, *flags, f"--screenshot={picture}", page], check=True, capture_output=True)
            rich.print(f"Written to {picture}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
