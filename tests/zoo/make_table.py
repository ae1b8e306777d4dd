"""Writes the README's table of families, with newly measured errors: `python -m tests.zoo.make_table`."""

import pathlib
import re
import tempfile

import equinox as eqx
import jax
import numpy as np

import zoo
from tests.zoo import tiny
from zoo.models import FAMILIES


ROOT = pathlib.Path(__file__).parents[2]


def rows(errors: dict[str, float]) -> list[str]:
    """Returns the table's lines, with a row for each family; `errors` has the largest error of each."""
    out = ["| family | file | lines | models | largest error |", "|---|---|---|---|---|"]
    for name, family in FAMILIES.items():
        file = f"zoo/models/{name}.py"
        lines = len((ROOT / file).read_text().splitlines())
        out.append(f"| {family.title} | [{file}]({file}) | {lines} | {len(family.configs)} | {errors[name]:.1e} |")
    return out


def names() -> list[str]:
    """Returns a line for each family, with the zoo names of its models."""
    return [f"- {family.title}: {', '.join(f'`{name}`' for name in family.configs)}" for family in FAMILIES.values()]


def section(errors: dict[str, float]) -> str:
    """Returns the table and the list of names, as in the README."""
    summary = "<details><summary>All names</summary>"
    return "\n".join(["", *rows(errors), "", summary, "", *names(), "", "</details>", "", ""])


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
    readme = ROOT / "README.md"
    begin = "<!-- families: python -m tests.zoo.make_table -->\n"
    table = section(measure())
    readme.write_text(
        re.sub(f"({re.escape(begin)}).*(<!-- end -->)", rf"\1{table}\2", readme.read_text(), flags=re.DOTALL)
    )
    print(table)
