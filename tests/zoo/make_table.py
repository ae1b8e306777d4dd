"""Writes what lists the families: `python -m tests.zoo.make_table`.

These are the README's table, with newly measured errors; the table of those that take images, in docs/vision.md;
their names in zoo/__init__.py, so that editors and type checkers know them, and in zoo/models/index.json, so that the
file of a name is known before it is imported.
"""

import json
import pathlib
import re
import sys
import tempfile
from types import ModuleType
from typing import get_args

import equinox as eqx
import jax
import numpy as np

import zoo
from tests.zoo import tiny
from zoo.models import FAMILIES
from zoo.nn.heads import Kind
from zoo.nn.model import Family
from zoo.vision.model import AbstractVisionConfig


ROOT = pathlib.Path(__file__).parents[2]
# Marks in pages, before what this script writes; it ends with <!-- end -->.
README, VISION = (f"<!-- {what}: python -m tests.zoo.make_table -->" for what in ("families", "families with vision"))


def rows(errors: dict[str, float]) -> list[str]:
    """Returns the table's lines, with a row for each family; `errors` has the largest error of each."""
    out = ["| family | file | lines | models | largest error |", "|---|---|---|---|---|"]
    for name, family in FAMILIES.items():
        file = f"zoo/models/{name}.py"
        lines = len((ROOT / file).read_text().splitlines())
        out.append(f"| {family.title} | [{file}]({file}) | {lines} | {len(family.configs)} | {errors[name]:.1e} |")
    return out


def section(errors: dict[str, float]) -> str:
    """Returns the table, as in the README."""
    kinds = ", ".join(get_args(Kind))
    heads = f"Every family takes [heads](docs/heads.md) in the place of its output embeddings: {kinds}."
    return "\n".join(["", *rows(errors), "", heads, "", ""])


def vision_section() -> str:
    """Returns the table of docs/vision.md, with a row for each family whose models take images."""
    out = ["", "| family | models, and those named after them | an image | parameters |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        if towers := towers_of(family):
            first = [f"`{model}`" for model in towers if not any(model.startswith(f"{other}-") for other in towers)]
            (tower,) = set(towers.values())
            file, (summary, *_) = tower.__name__.replace(".", "/") + ".py", str(tower.__doc__).split("\n\n")
            image = f"{' '.join(summary.split())} [{file}](../{file})"
            sizes = " to ".join(dict.fromkeys(f"{size / 1e6:.0f}" for size in tower_sizes(name)))
            out.append(f"| {family.title} | {', '.join(first)} | {image} | {sizes} million |")
    return "\n".join([*out, "", ""])


def towers_of(family: Family) -> dict[str, ModuleType]:
    """Returns the names of a family's models that take images, each with the file of its tower."""
    configs = {model: released.config for model, released in family.configs.items()}
    return {
        model: sys.modules[type(config.vision.tower).__module__]
        for model, config in configs.items()
        if isinstance(config, AbstractVisionConfig) and config.vision is not None
    }


def tower_sizes(family: str) -> tuple[int, int]:
    """Returns the least and the largest number of parameters that the part "vision" of a family's models has."""
    module = tiny.MODULES[family]
    text = lambda model: module.PARAMETERS[max((one for one in module.PARAMETERS if model.startswith(one)), key=len)]
    sizes = [size - text(model) for case in module.SEEING for model, size in case.parameters.items()]
    return min(sizes), max(sizes)


def with_families(code: str) -> str:
    """Returns the code of zoo/__init__.py with all families in the lists that end with their names."""
    for begin, entry in ((r"from zoo\.models import \(", "        {},\n"), (r"__all__ \+= \[", '    "{}",\n')):
        listed = "".join(map(entry.format, FAMILIES))
        code = re.sub(rf"({begin}\n)[^])]*?(?= *[])])", rf"\1{listed}", code)
    return code


def index() -> str:
    """Returns zoo/models/index.json: the files of model_types and of zoo names, and the names' repositories."""
    released = {model: found for family in FAMILIES.values() for model, found in family.configs.items()}
    tables = dict(
        model_types={kind: name for name, family in FAMILIES.items() for kind in family.model_types},
        names={model: name for name, family in FAMILIES.items() for model in family.configs},
        repositories={model: found.repository for model, found in released.items() if found.repository},
        tokenizers={model: found.tokenizer for model, found in released.items() if not found.repository},
    )
    return json.dumps(tables, indent=1) + "\n"


def between(begin: str, section: str, page: str) -> str:
    """Returns a page with this section between the mark `begin` and the next end."""
    return re.sub(f"({re.escape(begin)}\n).*?(<!-- end -->)", rf"\1{section}\2", page, flags=re.DOTALL)


def measure() -> dict[str, float]:
    """Returns family -> the largest error of its tiny checkpoints' logits, compared with the golden ones."""
    errors = dict.fromkeys(tiny.MODULES, 0.0)
    forward = eqx.filter_jit(lambda model, tokens: model(tokens))
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        for name, golden in tiny.golden().items():
            model, family = zoo.load(tiny.write(pathlib.Path(folder) / name, name)), tiny.FAMILIES[name]
            difference = np.abs(np.asarray(forward(model, tiny.TOKENS)) - golden).max()
            errors[family] = max(errors[family], difference / np.abs(golden).max())
    return errors


if __name__ == "__main__":
    table = section(measure())
    for file, write in (
        ("README.md", lambda page: between(README, table, page)),
        ("docs/vision.md", lambda page: between(VISION, vision_section(), page)),
        ("zoo/__init__.py", with_families),
        ("zoo/models/index.json", lambda _: index()),
    ):
        (ROOT / file).write_text(write((ROOT / file).read_text()))
    print(table)
