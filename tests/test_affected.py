"""tests.affected finds all tests that a change can reach, and no others."""

import json

import pytest

from tests import affected
from tests.zoo import tiny


pytest_plugins = ["pytester"]
FILES = {
    "zoo/__init__.py": "from zoo.load import load\nfrom zoo.mesh import make_mesh",
    "zoo/load.py": "from zoo.registry import CONFIGS",
    "zoo/registry.py": "from zoo.models import FAMILIES",
    "zoo/mesh.py": "",
    "zoo/page.py": "PAGE = open('page.html')",
    "zoo/page.html": "",
    "zoo/nn/layers.py": "",
    "zoo/models/__init__.py": "",
    "zoo/models/llama.py": "from zoo.nn.layers import Linear",
    "zoo/models/qwen3.py": "from zoo.nn import rope",
    "zoo/nn/rope.py": "",
    "kernels/__init__.py": "from kernels import masks, dispatch\ndef attention(): return dispatch.call()",
    "kernels/masks.py": "",
    "kernels/dispatch.py": "",
    "kernels/attention/triton.py": "from kernels import masks",
    "train/loop.py": "def f():\n    import zoo\n    return zoo.load()",
    "tests/zoo/tiny/__init__.py": "",
    "tests/zoo/programs.py": "",
    "tests/zoo/test_parity.py": "from tests.zoo import tiny",
    "tests/zoo/test_llama.py": "from zoo.models import llama",
    "tests/zoo/test_mesh.py": "import zoo\nzoo.make_mesh()",
    "tests/kernels/test_attention.py": "from kernels import attention",
    "tests/kernels/test_sums.py": "",
    "tests/train/conftest.py": "import pytest\nfrom train import loop\n@pytest.fixture\ndef base(): pass",
    "tests/train/test_taking.py": "def test_it(base): pass",
    "tests/train/test_other.py": "def test_it(): pass",
    "tests/train/test_running.py": "COMMAND = ['-m', 'train.loop']",
    "tests/train/test_docs.py": "PAGE = ROOT / 'docs' / 'sft.md'",
    "tests/train/test_page.py": "import zoo.page",
}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    root = tmp_path_factory.mktemp("house")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return affected.House(root)


def whole(house, *changed):
    selection = affected.select(changed, house)
    return {file.rsplit("/")[-1] for file, cases in selection.items() if cases is affected.WHOLE}


def test_by_imports_names_strings_and_fixtures(house):
    """A change behind zoo/__init__.py reaches only the files that take the changed name from it."""
    of_train = {"test_taking.py", "test_running.py"}
    assert whole(house, "train/loop.py") == whole(house, "zoo/load.py") == of_train
    assert whole(house, "zoo/mesh.py") == {"test_mesh.py"}
    assert whole(house, "zoo/__init__.py") == {"test_mesh.py"} | of_train
    assert whole(house, "tests/train/test_other.py") == {"test_other.py"}
    assert whole(house, "zoo/models/gone.py", "tests/zoo/programs.py") == set()


def test_files_that_are_no_code(house):
    assert whole(house, "docs/sft.md") == {"test_docs.py", "test_readme.py"}
    assert whole(house, "zoo/page.html") == {"test_page.py"}
    assert whole(house, "CHANGELOG.md", ".ci/run") == set()
    assert affected.select(["pyproject.toml"], house) is None and affected.select(["zoo/unknown.bin"], house) is None


def test_a_family_reaches_its_own_cases(house):
    """A family's file, its modules and its tiny checkpoints reach its cases, but not through the registry."""
    own, named = (affected.Cases(frozenset(["llama"]), rest) for rest in (False, True))
    expected = {"tests/zoo/test_parity.py": own, "tests/zoo/test_llama.py": named}
    assert affected.select(["zoo/models/llama.py"], house) == expected
    assert affected.select(["zoo/nn/layers.py"], house) == expected
    assert affected.select(["tests/zoo/golden/llama.npz"], house) == expected
    both = affected.select(["zoo/models/llama.py", "zoo/nn/rope.py"], house)["tests/zoo/test_parity.py"]
    assert both == affected.Cases(frozenset(["llama", "qwen3"]), rest=False)
    llama, gpt3 = (f"t.py::test[{tiny.MODULES[family].STACK}-x]" for family in ("llama", "gpt3"))
    assert own.have(llama) and not own.have(gpt3) and not own.have("t.py::test")
    assert named.have(llama) and not named.have(gpt3) and named.have("t.py::test")


def test_a_backend_reaches_its_own_cases(house):
    cases = affected.Cases(frozenset(["triton"]), rest=True)
    assert affected.select(["kernels/attention/triton.py"], house) == {"tests/kernels/test_attention.py": cases}
    assert cases.have("t.py::test[chunks-triton]") and cases.have("t.py::test") and not cases.have("t.py::test[tpu]")
    assert whole(house, "kernels/dispatch.py") == {"test_attention.py"}


def test_only_these_cases_are_run(pytester):
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.parametrize('name', ['llama', 'gpt3'])\ndef test(name): 0\ndef test_b(): 0",
        test_b="def test(): pass",
    )
    pytester.path.joinpath("cases").write_text(json.dumps({"test_a.py": (["gpt3"], False)}))
    result = pytester.runpytest("-p", "tests.affected", "--cases", "cases")
    result.assert_outcomes(passed=2, deselected=2)


def test_the_files_that_it_names_are_there():
    assert all((affected.ROOT / file).is_file() for file in (*affected.ALL, *affected.CHECKPOINTS))
