"""Writes the README's table of families from the parity measured now: `python -m tests.zoo.make_table`."""

import pathlib
import re
import tempfile

import equinox as eqx
import jax
import numpy as np

import zoo
from tests.zoo import tiny


ROOT = pathlib.Path(__file__).parents[2]
TITLES = {
    "llama": "Llama 2, 3, 3.1, 3.2, 3.3",
    "llama4": "Llama 4 (text)",
    "mistral": "Mistral 7B",
    "mixtral": "Mixtral",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "qwen2": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE, Qwen3-Coder",
    "deepseek2": "DeepSeek V2",
    "deepseek3": "DeepSeek V3, R1; Kimi K2",
    "gpt_oss": "gpt-oss",
    "gpt3": "GPT-2, GPT-3",
}


def rows(errors: dict[str, float]) -> list[str]:
    """One for each family; `errors` has the largest error of each."""
    out = ["| family | file | lines | names | largest error |", "|---|---|---|---|---|"]
    for name, title in TITLES.items():
        family = getattr(zoo, name)
        lines = len(pathlib.Path(family.__file__).read_text().splitlines())
        names = ", ".join(f"`{variant}`" for variant in family.CONFIGS)
        out.append(f"| {title} | [zoo/{name}.py](zoo/{name}.py) | {lines} | {names} | {errors[name]:.1e} |")
    return out


def measure() -> dict[str, float]:
    """Family -> the largest error of its tiny checkpoints, against the golden logits."""
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
    table = "\n".join(["", *rows(measure()), "", ""])
    readme.write_text(
        re.sub(f"({re.escape(begin)}).*(<!-- end -->)", rf"\1{table}\2", readme.read_text(), flags=re.DOTALL)
    )
    print(table)
