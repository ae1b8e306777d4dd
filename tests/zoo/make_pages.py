"""Writes docs/models/, a page for each family: `python -m tests.zoo.make_pages [FAMILY ...]`.

Names, parameters and words come from the families' files and from tests.zoo.tiny, and plans from benchmarks/results.
The sizes of weights and caches, and which kernels serve, are computed from shapes alone, and kept in pages.json. They
are computed for the configs that are not there yet, and anew for the families that are named.
"""

import functools
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

import kernels
from benchmarks.largest import METHODS, ROW
from tests.zoo import tiny
from zoo.models import FAMILIES
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.quantized import quantize
from zoo.surgery import cast
from zoo.weights.checkpoint import skeleton


ROOT = pathlib.Path(__file__).parents[2]
NAMED = {name: family for name, family in FAMILIES.items() if family.configs}  # the others have no released sizes
PAGES, KEPT = ROOT / "docs/models", pathlib.Path(__file__).with_name("pages.json")
# Column -> what JAX calls the device.
CARDS = {"H100": ("NVIDIA H100", "gpu"), "RTX 4090": ("NVIDIA GeForce RTX 4090", "gpu"), "T4": ("Tesla T4", "gpu"),
         "TPU v6e": ("TPU v6 lite", "tpu")}  # fmt: skip
FORMATS = ("bfloat16", "int8", "nf4")
LENGTH = 32_768  # tokens of the cache in the table of sizes


# ------------------------------------------------------------------------------------------------------------- computed


def sizes(family: Family, config: AbstractConfig) -> dict[str, int | None]:
    """Returns the bytes of the weights in each format (None: it can't hold them), and of the cache of a text."""
    model = skeleton(family, config)
    count = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
    length = min(LENGTH, config.max_position_embeddings)
    found = {"cache": count(eqx.filter_eval_shape(lambda: model.init_cache(1, length, jnp.bfloat16)))}
    in_format = lambda model, format: quantize(cast(model, "bfloat16"), format) if format else cast(model, "bfloat16")
    for format in FORMATS:
        try:
            found[format] = count(eqx.filter_eval_shape(in_format, model, "" if format == "bfloat16" else format))
        except ValueError:  # rows of an odd length
            found[format] = None
    return found


def serving(family: Family, config: AbstractConfig) -> dict[str, dict[str, str]]:
    """Returns operation -> card -> the implementations that serve a prefill and a step of decoding in bfloat16."""
    model = eqx.filter_eval_shape(functools.partial(cast, dtype="bfloat16"), skeleton(family, config))
    ids = lambda seq: jax.ShapeDtypeStruct((1, seq), jnp.int32)
    length = min(4096, config.max_position_embeddings)

    def run(model: AbstractModel, prompt: Any, token: Any) -> None:
        model.hidden(prompt)
        model.decode(token, model.init_cache(1, length, jnp.bfloat16), positions=token)

    found: dict[str, dict[str, str]] = {}
    for card, (kind, platform) in CARDS.items():
        mesh = AbstractMesh((1,), ("device",), abstract_device=AbstractDevice(kind, None, platform))
        with jax.sharding.use_abstract_mesh(mesh):
            for call in kernels.explain(run, model, ids(length), ids(1)):
                known = found.setdefault(call.operation, {}).get(card, "")
                if call.implementation not in known.split(", "):
                    found[call.operation][card] = ", ".join(filter(None, (known, call.implementation)))
    return found


def compute(family: Family, again: bool, kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a family: those that are kept, and those of configs that are not among them."""
    configs = list(models(family))
    kept = {} if again else kept
    known = kept.get("sizes", {})
    first = skeleton(family, configs[0][0])
    return {
        "kernels": kept.get("kernels") or serving(family, configs[0][0]),
        "printed": kept.get("printed") or str(eqx.filter_eval_shape(functools.partial(cast, dtype="bfloat16"), first)),
        "sizes": {names[0]: known.get(names[0]) or sizes(family, config) for config, names in configs},
    }


# ---------------------------------------------------------------------------------------------------------------- pages


def models(family: Family) -> Iterator[tuple[AbstractConfig, list[str]]]:
    """Yields each config of a family with the names of its models."""
    found: dict[AbstractConfig, list[str]] = {}
    for name, released in family.configs.items():
        found.setdefault(released.config, []).append(name)
    yield from found.items()


def parameters(family: str, model: str) -> int:
    """Returns the number of parameters that the Hub shows for a model."""
    known = tiny.MODULES[family].PARAMETERS
    return known[max((name for name in known if model.startswith(name)), key=len)]


def words(name: str) -> tuple[str, str]:
    """Returns the first sentence of a family's file and the rest, with links to papers."""
    doc = sys.modules[NAMED[name].Config.__module__].__doc__ or ""
    doc = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", doc.strip())
    first, _, rest = doc.partition("\n\n")
    join = lambda text: "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    return join(first), join(rest)


def linked(family: Family, model: str) -> str:
    """Returns a model's zoo name, which links to its repository."""
    repository = family.configs[model].repository
    return f"[`{model}`](https://huggingface.co/{repository})" if repository else f"`{model}`"


def gigabytes(size: int | None) -> str:
    return "" if size is None else _three_digits(size / 1e9)


def billions(count: int) -> str:
    """Writes a number of parameters, such as 596 M."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "B"), (1e6, "M")) if count >= unit), (1e3, "K"))
    return f"{_three_digits(count / unit)} {name}"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def plans(family: Family) -> list[str]:
    """Returns the lines of the table of plans of a family's models: those of benchmarks/results."""
    training = json.loads((ROOT / "benchmarks/results/plans.json").read_text())["rows"]
    largest = json.loads((ROOT / "benchmarks/results/largest.json").read_text())["rows"]
    rows = []
    for each in largest:
        card, method, model, *_ = each["case"]
        if model in family.configs:
            rows.append((model, card, "", f"{METHODS[method][0]}, 1 x {ROW:,}", each))
    for each in training:
        model, topology, mesh, batch, seq, _ = each["case"]
        if model in family.configs:
            rows.append((model, topology, mesh, f"all weights, {batch} x {seq:,} a device", each))
    return [
        f"| `{model}` | {card} | {mesh} | {method} | {each['needs, GB']} of {each['of, GB']}"
        f"{'' if each['fits'] else ', does not fit'} |"
        for model, card, mesh, method, each in rows
    ]


def page(name: str, numbers: Mapping[str, Any]) -> str:
    """Returns a family's page."""
    family, (first, rest) = NAMED[name], words(name)
    file = f"zoo/models/{name}.py"
    out = [f"<!-- python -m tests.zoo.make_pages {name} -->", f"# {family.title}", "", first, "", rest, ""]
    out += [f"The code is [{file}](../../{file}), and its tests' checkpoints are `tests/zoo/tiny/{name}.py`.", ""]
    out += [f"`parts=({part!r},)` of `zoo.load` adds {what}." for part, what in family.parts.items()]
    out += [
        "",
        "## Models",
        "",
        "Weights and the cache of one text in GB, without what a program needs beside them.",
        "",
    ]
    out += [f"| models | parameters | layers | width | positions | {' | '.join(FORMATS)} | cache, {LENGTH:,} tokens |"]
    out += ["|---|---|---|---|---|" + "---|" * len(FORMATS) + "---|"]
    for config, names in models(family):
        known = numbers["sizes"][names[0]]
        shape = f"{config.num_hidden_layers} | {config.hidden_size:,} | {config.max_position_embeddings:,}"
        memory = " | ".join(gigabytes(known[format]) for format in (*FORMATS, "cache"))
        count = billions(parameters(name, names[0]))
        out.append(f"| {', '.join(linked(family, each) for each in names)} | {count} | {shape} | {memory} |")
    out += ["", "Where a model has fewer positions than that, the cache is of all its positions.", ""]
    out += ["## What is in it", "", f"`print(model)` of `{next(iter(family.configs))}`, in bfloat16:", ""]
    out += ["```text", numbers["printed"], "```", "", "## Kernels", ""]
    out += ["Which implementation serves a prefill and a step of decoding in bfloat16, by `kernels.explain`. Where"]
    out[-1] += " cuDNN is installed, it comes before Triton if it can. [Kernels](../kernels.md#cards) has more cards."
    out += ["", f"| | {' | '.join(CARDS)} |", "|---|" + "---|" * len(CARDS)]
    for operation, by_card in sorted(numbers["kernels"].items()):
        out.append(f"| `{operation}` | {' | '.join(by_card.get(card, '') for card in CARDS)} |")
    if rows := plans(family):
        out += [
            "",
            "## Training",
            "",
            "What `train.plan` finds that a device needs, in GB ([Plans](../plan.md#plans)).",
            "",
        ]
        out += ["| model | devices | mesh | what | needs |", "|---|---|---|---|---|", *rows]
    out += ["", "## How it is proved", "", "Its logits are compared with transformers' on tiny checkpoints that have"]
    out[-1] += " every feature of the family; the [README](../../README.md#families) has the largest error, and"
    out[-1] += " [families](../families.md#add-a-family-in-five-steps) says what else is tested."
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"


def is_current(name: str, kept: Mapping[str, Any]) -> bool:
    """Whether a family's page is what would be written now, and has the sizes of every model."""
    known = kept.get(name, {"sizes": {}})
    sized = all(names[0] in known["sizes"] for _, names in models(NAMED[name]))
    return sized and (PAGES / f"{name}.md").read_text() == page(name, known)


def index() -> str:
    """Returns the page that lists the families."""
    out = [
        "<!-- python -m tests.zoo.make_pages -->",
        "# Models",
        "",
        "A page for each family, with its sizes, the memory",
    ]
    out[-1] += ' that they take, and the kernels that serve them. Models are loaded by name: `zoo.load("qwen3-0.6b")`.'
    out += ["", "| family | models | parameters | |", "|---|---|---|---|"]
    for name, family in NAMED.items():
        counts = [parameters(name, model) for model in family.configs]
        sizes = " to ".join(dict.fromkeys(map(billions, (min(counts), max(counts)))))
        out.append(f"| [{family.title}]({name}.md) | {len(family.configs)} | {sizes} | {words(name)[0]} |")
    out += ["", "## All names", ""]
    out += [
        f"- {family.title}: {', '.join(linked(family, each) for each in family.configs)}" for family in NAMED.values()
    ]
    return "\n".join(out) + "\n"


def write(again: list[str]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    PAGES.mkdir(exist_ok=True)
    for name, family in NAMED.items():
        kept[name] = compute(family, name in again, kept.get(name, {}))
        KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        (PAGES / f"{name}.md").write_text(page(name, kept[name]))
        print(name, flush=True)
    (PAGES / "README.md").write_text(index())


if __name__ == "__main__":
    write(sys.argv[1:])
