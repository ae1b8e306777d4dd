"""Gates that must run again: the mechanism on a small tree of sources, and the code that some of our gates reach."""

import inspect
from pathlib import Path

import pytest

from kernels.attention import triton as attention_triton
from kernels.decode_attention import triton as decode_attention_triton
from kernels.delta_rule import tpu as delta_rule_tpu
from kernels.delta_rule import triton as delta_rule_triton
from tests.kernels import gates, gpu, tpu
from tests.kernels.sources import Sources
from zoo.models import gemma3, qwen3


TREE = {
    "ops/__init__.py": '''
"""Operations."""

from ops import table
from ops.shared import alone as renamed
from ops.shared import fine, halve

__all__ = ["double", "product"]


def product(x):
    """Multiplies."""
    return table.run("product", fine(x))


def double(x: "float") -> "float":
    return renamed(x)


double.rule(halve)
''',
    "ops/table.py": """
import importlib
import re
from importlib import resources

FILES = {
    "product": {"triton": "product_triton", "tpu": "product_tpu"},
    "total": {"triton": "total_triton"},
    "half": {"triton": "half_triton"},
}


def rank(file):
    return re.findall(f"{'RANK'} = (.)", resources.files("ops").joinpath(f"{file}.py").read_text())


def run(name, x):
    module = importlib.import_module(f"ops.{min(FILES[name].values(), key=rank)}")
    return getattr(module, name)(x) or module.refusal(x)
""",
    "ops/product_triton.py": """
from ops.sizes import sizes

RANK = 1


def product(x):
    return x * sizes("product_triton")


def refusal(x):
    return None


def unused(x):
    return 1
""",
    "ops/product_tpu.py": "RANK = 2\n\n\ndef product(x):\n    return 2 * x\n",
    "ops/half_triton.py": "import functools\n\nRANK = 1\nhalf = functools.partial(lambda a, b: a * b, 0.5)\n",
    "ops/total_triton.py": 'from ops.sizes import sizes\n\n\ndef total(x):\n    return sizes("total_triton")\n',
    "ops/sizes.py": """
from importlib import resources


def sizes(module):
    return resources.files("ops").joinpath(f"tables/{module}.json").read_text()
""",
    "ops/tables/product_triton.json": '{"rows": 1, "columns": 2}',
    "ops/tables/total_triton.json": '{"rows": 1}',
    "ops/shared.py": """
LIMIT = 1


def fine(x):
    return x


def alone(x):
    limit = LIMIT
    return x


def halve(x):
    return x / 2
""",
    "models/__init__.py": """
import importlib

ALL = [importlib.import_module(f"{__name__}.{name}").MODEL for name in "ab"]
""",
    "models/a.py": "MODEL = 1\nOTHER = 1\n",
    "models/b.py": "MODEL = 2\n",
    "tests/conftest.py": "import os\n\nos.environ['A'] = '1'\n\n\ndef pytest_configure():\n    print(1)\n",
    "tests/compilers.py": "needs_compiler = needs_libtpu = lambda test: test\n",
    "tests/test_ops.py": """
import subprocess
import sys

import models
import ops
from tests.compilers import needs_compiler, needs_libtpu

CASES = {"a": 1}


@needs_compiler
def test_product():
    assert ops.product(2) == 2


@needs_libtpu
def test_product_on_a_tpu():
    assert ops.product(2) == 4


@needs_compiler
def test_half():
    assert ops.table.run("half", 2) == 1


@needs_compiler
def test_double():
    assert compile(__file__)


@needs_compiler
def test_models():
    assert models.ALL, "model a"


@needs_compiler
def test_command():
    subprocess.run([sys.executable, "-m", "ops.total_triton"])


def compile(file):
    return ops.double(1)


def test_no_gate():
    assert ops.double(2) == 2
""",
}
GATES = {f"test_{name}" for name in ("product", "product_on_a_tpu", "half", "double", "models", "command")}


def families(strings):
    return {"models.a"} if "model a" in strings else set()


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def hashes(tree):
    sources = Sources(tree, families)
    found = gates.gates(sources)
    return {name.partition("::")[2]: gates.reached(sources, name, found[name]).hash() for name in found}


CHANGES = {
    "a docstring": ("ops/__init__.py", '"""Multiplies."""', '"""Gives a product."""', ""),
    "a new docstring": ("ops/shared.py", "LIMIT = 1", '"""Shared."""\n\nLIMIT = 1', ""),
    "a comment and the form": ("ops/shared.py", "x / 2", "(\n        x / 2  # half\n    )", ""),
    "an annotation": ("ops/__init__.py", '"float"', '"int"', ""),
    "what nobody names": ("ops/product_triton.py", "return 1", "return 2", ""),
    "a test that is no gate": ("tests/test_ops.py", "double(2) == 2", "double(3) == 3", ""),
    "another implementation": ("ops/product_tpu.py", "2 * x", "3 * x", "product_on_a_tpu"),
    "an implementation": ("ops/product_triton.py", "return x *", "return x +", "product"),
    "a refusal": ("ops/product_triton.py", "return None", "return 'no'", "product"),
    "how implementations are found": ("ops/table.py", "or module", "and module", "product product_on_a_tpu half"),
    "an implementation that is assigned": ("ops/half_triton.py", "a * b", "a / b", "half"),
    "its rank": ("ops/product_triton.py", "RANK = 1", "RANK = 3", "product product_on_a_tpu"),
    "a rank on another platform": ("ops/product_tpu.py", "RANK = 2", "RANK = 0", "product product_on_a_tpu"),
    "its sizes": ("ops/tables/product_triton.json", "1", "3", "product"),
    "the form of its sizes": ("ops/tables/product_triton.json", ', "columns"', ',\n"columns"', ""),
    "an export under another name": ("ops/shared.py", "limit = LIMIT\n    return x", "return LIMIT", "double"),
    "a constant": ("ops/shared.py", "LIMIT = 1", "LIMIT = 2", "double"),
    "what is added to a definition": ("ops/shared.py", "x / 2", "x / 3", "double"),
    "another import": ("ops/__init__.py", "import alone as", "import fine as", "double"),
    "what a gate finds by its file": ("tests/test_ops.py", '{"a": 1}', '{"a": 2}', "double"),
    "a model that is named": ("models/a.py", "MODEL = 1", "MODEL = 3", "models"),
    "the rest of its module": ("models/a.py", "OTHER = 1", "OTHER = 3", ""),
    "another model": ("models/b.py", "MODEL = 2", "MODEL = 3", ""),
    "a module that is run": ("ops/total_triton.py", "return sizes", "return -sizes", "command"),
    "what that reads": ("ops/tables/total_triton.json", "1", "2", "command"),
    "settings of all tests": ("tests/conftest.py", "'1'", "'2'", " ".join(name[5:] for name in GATES)),
    "the rest of them": ("tests/conftest.py", "print(1)", "print(2)", ""),
}


@pytest.mark.parametrize("file, old, new, changed", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_by_the_gates_that_reach_it(tree, file, old, new, changed):
    before = hashes(tree)
    assert before.keys() == GATES
    assert old in TREE[file]
    (tree / file).write_text(TREE[file].replace(old, new))
    after = hashes(tree)
    assert {name for name in GATES if after[name] != before[name]} == {f"test_{name}" for name in changed.split()}


@pytest.mark.thorough
def test_what_our_gates_reach():
    sources = Sources(gates.ROOT, gates.families)
    found = gates.gates(sources)
    file = lambda module: str(Path(inspect.getsourcefile(module)).relative_to(gates.ROOT))

    def files(gate):
        return set(gates.reached(sources, gate, found[gate]).files())

    of_kernels = files("tests/kernels/test_compile_gpu.py::test_on_an_h200")
    assert of_kernels >= {file(attention_triton), file(decode_attention_triton), file(gpu)}
    assert not of_kernels & {file(delta_rule_triton), file(delta_rule_tpu), file(tpu)}
    assert not [name for name in of_kernels if name.startswith(("zoo/", "train/data/"))]
    of_step = files("tests/kernels/test_compile_caches.py::test_no_copy_of_a_layers_cache")
    assert {file(qwen3), file(gemma3), file(attention_triton), file(gpu), file(tpu)} <= of_step
    assert not [name for name in of_step if name.startswith("train/data/")]


def test_what_has_to_run_again():
    now = {"changed": "1", "new": "1", "same": "1", "older": "1", "without": "1"}
    passed = lambda hash, **versions: {"sources": hash, "versions": versions}
    record = {name: passed("1", jax="0.12.0", libtpu="0.0.50") for name in now if name != "new"}
    record |= {"changed": passed("2", jax="0.12.0"), "gone": passed("1", jax="0.1")}
    here = {name: {"jax": "0.12.0", "libtpu": "0.0.50"} for name in now}
    here |= {"older": {"jax": "0.12.0", "libtpu": "0.0.51"}, "without": {"jax": "0.10.2"}}
    assert gates.stale(record, now, here) == {
        "changed": "its sources have changed",
        "new": "it has not passed yet",
        "older": "it passed with older versions than libtpu 0.0.51",
    }


def test_a_gate_passes_with_all_its_cases():
    cases = [
        ("tests.a.test_b", f"test_{name}", good) for name, good in [("c[1]", True), ("c[2]", False), ("d[x[0]]", True)]
    ]
    assert gates.passed(cases) == {"tests/a/test_b.py::test_d"}
