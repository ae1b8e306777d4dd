"""The parts of a family: our families have all of them, all kernels serve them, and a user's own family needs no more.

docs/families.md describes how to add one; its code is run here.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import pathlib
import re
import runpy
import sys

import jax
import numpy as np
import pytest

import kernels
import zoo
from tests.train.conftest import devices
from tests.zoo import make_pages, make_table, tiny, touched
from tests.zoo.programs import MECHANISMS, STACKS, TOKENS, by_mechanism, prefill_and_decode
from zoo import models, registry
from zoo.models import qwen3
from zoo.nn.model import AbstractConfig, Released


ROOT = pathlib.Path(__file__).parents[2]
IMPLEMENTATIONS = ("reference", "xla", "triton", "tpu")


def missing(families, modules, golden, names, public, vision) -> list[str]:
    """Returns a sentence for each part that a family lacks.

    `families` are those of zoo/models, `modules` those of tests/zoo/tiny, `golden` has the checkpoints in each file of
    tests/zoo/golden, `names` are those with a repository, `public` are zoo's names, and `vision` are the families that
    have a checkpoint with a tower.
    """
    lacks = []
    for name in sorted(families.keys() | modules.keys()):
        file, checkpoints = f"zoo/models/{name}.py", f"tests/zoo/tiny/{name}.py"
        if name not in families:
            lacks.append(f"{checkpoints} has no {file}: write the family there, from its Config to its FAMILY.")
            continue
        if name not in public:
            lacks.append(f"zoo/__init__.py lacks {name}: `python -m tests.zoo.make_table` writes it there.")
        if name not in modules:
            lacks.append(f"{file} has no {checkpoints}: write its CONFIGS, STACK, PARAMETERS and shapes there.")
        if "vision" in families[name].parts and name not in vision:
            lacks.append(f"{checkpoints} has no SEEING: write checkpoints with a tower there, as in gemma3's.")
        if without := sorted(getattr(modules.get(name), "CONFIGS", {}).keys() - golden.get(name, ())):
            lacks.append(
                f"tests/zoo/golden/{name}.npz has no logits of {', '.join(without)}: `python -m tests.zoo.make_golden "
                f"{name}` writes them, where transformers is installed."
            )
        if unknown := [config for config in families[name].configs if config not in names]:
            lacks.append(
                f"{file} has {', '.join(unknown)} without a repository (or, if its weights were never published, that "
                "of a tokenizer)."
            )
    return lacks


@pytest.fixture
def pieces():
    """Returns the present arguments of `missing` as copies, from which a test may remove something."""
    golden = {path.stem: set(np.load(path).files) for path in (ROOT / "tests/zoo/golden").glob("*.npz")}
    names = registry.REPOSITORIES | registry.TOKENIZERS
    return dict(
        families=dict(models.FAMILIES),
        modules=dict(tiny.MODULES),
        golden=golden,
        names=names,
        public=dict.fromkeys(zoo.__all__),
        vision={checkpoint.family.name: name for name, checkpoint in tiny.SEEING.items()},
    )


def test_nothing_is_missing(pieces):
    assert missing(**pieces) == []
    assert sorted(pieces["golden"]) == sorted(pieces["modules"])


@pytest.mark.parametrize(
    ("piece", "entry", "sentence"),
    [
        ("families", "qwen3", "tests/zoo/tiny/qwen3.py has no zoo/models/qwen3.py: write the family there"),
        ("modules", "qwen3", "zoo/models/qwen3.py has no tests/zoo/tiny/qwen3.py: write its CONFIGS, STACK"),
        ("golden", "qwen3", "tests/zoo/golden/qwen3.npz has no logits of qwen3, qwen3-tied, "),
        ("names", "qwen3-8b", "zoo/models/qwen3.py has qwen3-8b without a repository (or, if its weights were"),
        ("public", "qwen3", "zoo/__init__.py lacks qwen3: `python -m tests.zoo.make_table` writes it there."),
        ("vision", "gemma3", "tests/zoo/tiny/gemma3.py has no SEEING: write checkpoints with a tower there"),
    ],
)
def test_what_is_missing_is_named(pieces, piece, entry, sentence):
    before = missing(**pieces)  # of a family that is being added
    del pieces[piece][entry]
    (lack,) = [sentence for sentence in missing(**pieces) if sentence not in before]
    assert lack.startswith(sentence)


@pytest.mark.parametrize("name", by_mechanism(STACKS, MECHANISMS[:4]))
def test_every_implementation_serves(load, untyped, name):
    """Only a decode step may refuse heads of 8 features and latents of 24, which no released model has.

    Types are those of the same models in test_cache.py, and not checked again.
    """
    calls = kernels.explain(prefill_and_decode, load(name), TOKENS)
    able = lambda call, implementation: implementation == call.implementation or call.others[implementation] is None
    asked = [call for call in calls if call.operation in ("attention", "ragged_dot")]
    assert "attention" in {call.operation for call in asked}
    assert all(able(call, implementation) for call in asked for implementation in IMPLEMENTATIONS)


# The Python of docs/families.md: lines of our own and of a user's files, named in the first line, and lines to type.
BLOCKS = re.findall(r"```python\n(?:# (\S+\.py)\n)?(.*?)```", (ROOT / "docs/families.md").read_text(), flags=re.DOTALL)


def test_quoted_lines_stand_in_their_files():
    quoted = [(file, lines) for file, lines in BLOCKS if file and (ROOT / file).is_file()]
    assert len(quoted) == 5
    assert [(file, lines) for file, lines in quoted if lines not in (ROOT / file).read_text()] == []


def test_files_to_touch_are_counted():
    """The page has the table as it is now: of a dense family at most 3 files, of a hybrid and of one that sees 5."""
    assert touched.table() in (ROOT / "docs/families.md").read_text()
    most = {"a dense family": 3, "a hybrid": 5, "one that sees": 5}
    assert all(len(touched.touched(family)) <= most[kind] for kind, family in touched.EXAMPLES.items())
    naming = lambda text: list(touched.code(f'"""gemma3"""\n# gemma3\n{text}'))
    assert "gemma3" not in naming("") and "gemma3" in naming("zoo.gemma3") and "gemma3" in naming("x = 'gemma3'")


def test_what_a_script_writes_is_current():
    """The README's table is compared in tests/test_readme.py."""
    page, code = ((ROOT / file).read_text() for file in ("docs/vision.md", "zoo/__init__.py"))
    assert f"{make_table.VISION}\n{make_table.vision_section()}<!-- end -->" in page, "python -m tests.zoo.make_table"
    assert make_table.with_families(code) == code, "python -m tests.zoo.make_table"
    assert make_table.index() == (ROOT / "zoo/models/index.json").read_text(), "python -m tests.zoo.make_table"


def test_a_family_that_is_being_added(monkeypatch):
    """A file that the index lacks is found, with its names."""
    index = json.loads(make_table.index())
    for table in index.values():
        for name in [name for name in table if "smollm3" in name]:
            del table[name]
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: json.dumps(index))
    found = runpy.run_path(str(registry.__file__))
    assert found["FAMILIES"]["smollm3"] is zoo.smollm3.FAMILY
    assert "smollm3-3b" in found["CONFIGS"] and "smollm3-3b" in found["REPOSITORIES"]


def test_pages_are_current():
    """The pages of docs/models say what the families' files say; computed numbers are those that are kept."""
    kept = json.loads(make_pages.KEPT.read_text())
    stale = [name for name in make_pages.NAMED if not make_pages.is_current(name, kept)]
    assert not stale and make_pages.index() == (make_pages.PAGES / "README.md").read_text(), (
        f"python -m tests.zoo.make_pages writes the pages of {', '.join(stale) or 'the list'}"
    )


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Writes the page's user files into a folder and makes it current; registrations are undone afterwards."""
    for name in ("FAMILIES", "CONFIGS", "REPOSITORIES", "TOKENIZERS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file, lines in BLOCKS:
        if file and not (ROOT / file).is_file():
            (tmp_path / file).write_text(lines)
    yield tmp_path
    sys.modules.pop("my_family", None)


def test_a_family_of_ones_own(own, untyped, monkeypatch):
    """The page's family is registered, saved, loaded, and generates; its script trains it; it is loaded again."""
    (lines,) = [lines for file, lines in BLOCKS if not file]
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(lines, names)
    assert printed.getvalue() == "".join(line[2:] for line in lines.splitlines(True) if line.startswith("# "))
    assert isinstance(names["text"], str)
    assert json.loads((own / "parallel/config.json").read_text())["architectures"] == ["ParallelForCausalLM"]

    (own / "texts.jsonl").write_text('{"text": "import sys\\nimport os\\n"}\n' * 8)
    options = "--model parallel --data texts.jsonl --steps 1 --seq-len 32 --batch 2 --hold-out 0"
    monkeypatch.setattr(sys, "argv", ["train_mine.py", *options.split(), "--out", "run"])
    devices(monkeypatch, 1)
    monkeypatch.setattr(zoo, "generate", lambda model, tokenizer, prompts, **_: [""] * len(prompts))
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("train_mine")
    trained, before = zoo.load(own / "run/model"), names["model"]
    assert type(trained) is type(before) and registry.family_of(trained).title == "Parallel"
    assert trained.config == before.config
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), trained, before)
    assert not any(jax.tree.leaves(same))
    zoo.save(trained, own / "again")
    assert (own / "again/model.safetensors").read_bytes() == (own / "run/model/model.safetensors").read_bytes()


def make(**changes):
    """Returns a family to register: Qwen3 except for these fields."""
    return dataclasses.replace(qwen3.FAMILY, **{"model_types": ("mine",), "configs": {}} | changes)


def test_names_of_ones_own(own):
    """A user's family may have a name with a repository, and one with only a config."""
    config = dataclasses.replace(zoo.config("qwen3-8b"), rope_theta=2e6)
    own_family = make(configs={"mine-8b": Released(config, "org/mine"), "mine-new": Released(config)})
    before = zoo.names()
    zoo.register(own_family)
    assert registry.FAMILIES["mine"] is own_family and zoo.config("mine-8b") is zoo.config("mine-new") is config
    assert set(zoo.names()) - set(before) == {"mine-8b"} and registry.REPOSITORIES["mine-8b"] == "org/mine"


def test_own_families_that_are_refused(own, untyped):
    """Each family is refused in one sentence, and nothing of it is kept."""
    known = [dict(registry.FAMILIES), dict(registry.CONFIGS), dict(registry.REPOSITORIES), dict(registry.TOKENIZERS)]
    released = Released(zoo.config("qwen3-8b"), "org/mine")
    for family, sentence in [
        (make(model_types=("qwen3",)), "qwen3 is registered already; the family qwen3 needs other names."),
        (make(configs={"qwen3-8b": released}), "qwen3-8b is registered already"),
        (make(configs={"mine-8b": released, "tiny": released}), "tiny is registered already"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            zoo.register(family)
    assert known == [registry.FAMILIES, registry.CONFIGS, registry.REPOSITORIES, registry.TOKENIZERS]

    @dataclasses.dataclass(frozen=True)
    class Config(AbstractConfig):
        vocab_size: int
        hidden_size: int
        num_hidden_layers: int

    where = rf"{__name__}\.Config"
    lacking = "attention_products, head_dim, max_position_embeddings, num_attention_heads, num_key_value_heads"
    with pytest.raises(TypeError, match=f"^{where} has no {lacking}, which a family needs.$"):
        make(Config=Config)
    with pytest.raises(TypeError, match=r"^builtins.dict is no dataclass that derives from zoo\.nn\.model"):
        make(Config=dict)
    with pytest.raises(TypeError, match=r"^mine-8b in the configs of qwen3 is no Released\(config, repository\)\.$"):
        make(configs={"mine-8b": released.config})


def test_a_family_that_is_not_registered(own, monkeypatch):
    monkeypatch.setattr(zoo, "register", lambda family: None)
    my_family = importlib.import_module("my_family")
    config = my_family.Config(64, 32, 48, 1, 2)
    with pytest.raises(ValueError, match=r"^No family has the class my_family.Config: call zoo.register with its FAM"):
        registry.family_of(config)
