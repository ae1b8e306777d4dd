"""tests.house prints the known numbers of a small tree."""

from tests import house


FILES = {
    "pyproject.toml": """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["train"]
layers = ["script", "run | watch", "data"]
""",
    "zoo/__init__.py": '"""Models."""',
    "zoo/a.py": "import zoo.b",
    "zoo/b.py": "def f():\n    from zoo import c",
    "zoo/c.py": "from zoo.a import f",
    "train/__init__.py": "NAME = 1",
    "train/script.py": "from train import NAME, run",
    "train/run/__init__.py": "",
    "train/run/one.py": "from train.run import two\nfrom train.data import f\nimport zoo.a",
    "train/run/two.py": "from train import watch",
    "train/watch.py": "from train.data import f",
    "train/data.py": "from train import script",
}


def test_numbers(tmp_path, capsys):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    house.main(tmp_path)
    numbers = {name: tuple(map(int, row)) for name, *row in map(str.split, capsys.readouterr().out.splitlines()[1:])}
    assert numbers == {
        "whole": (2, 2, 1, 0, 1),
        # a -> b -> c -> a: one of the three arrows runs back.
        "zoo": (3, 3, 3, 1, 1),
        # Arrows back up: data -> script, and run -> watch, which must be independent of it. No file of run/ is in a
        # circle.
        "train": (5, 3, 6, 2, 0),
        "train.run": (2, 2, 1, 0, 0),
    }
