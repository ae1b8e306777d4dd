"""Prints the import structure of each folder with code as numbers: `python -m tests.house [checkout]`.

- Rooms are the files and folders directly in a folder. Its __init__ is one if it imports or defines anything.
- An arrow runs from a room to a room that it imports, wherever the import is and however often.
- An arrow back up breaks the order that import-linter's layers declare in pyproject.toml. In circles that break no
  layer, the arrows that a greedy search (Eades, Lin and Smyth, 1993) removes to open all circles also count; it removes
  few of them. So a folder has no arrow back up if, and only if, its imports run one way.
- Floors are the rooms on the longest path of arrows, without those back up.
- Circles are the groups of files that all import each other, directly or through other files.
"""

import ast
import functools
import itertools
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping

from tests import affected


Arrow = tuple[str, str]


def main(root: pathlib.Path) -> None:
    house = affected.House(root)
    imports = {module: imported(house, module) for module in house.files if not module.startswith("tests")}
    layers = declared(tomllib.loads((root / "pyproject.toml").read_text()))
    print(f"{'':24}{'rooms':>7}{'floors':>7}{'arrows':>7}{'back up':>8}{'circles':>8}")
    packages = sorted(module for module in imports if house.files[module].endswith("__init__.py"))
    # A folder without an __init__ is not one of the folders measured, but is a room of the whole tree.
    for folder in ["", *packages]:
        inside = [module for module in imports if room(folder, module, house)]
        rooms = {room(folder, module, house) for module in inside}
        if len(rooms) > 1:
            pairs = [(a, b) for a in inside for b in imports[a] if b in inside]
            arrows = {(room(folder, a, house), room(folder, b, house)) for a, b in pairs}
            arrows = {(a, b) for a, b in arrows if a != b}
            back = broken(arrows, layers.get(folder, {}))
            back |= round_trips(arrows - back)
            floors, circles = height(arrows - back), len(list(tied(pairs)))
            print(f"{folder or 'whole':24}{len(rooms):7}{floors:7}{len(arrows):7}{len(back):8}{circles:8}")


def imported(house: affected.House, module: str) -> set[str]:
    """Returns the modules that a module imports."""
    file = house.files[module]
    names = {*house.imports(file), *house.stars[file]}
    found = {next((name for name in prefixes(name) if name in house.files), "") for name in names}
    return found - {"", module}


def prefixes(name: str) -> Iterator[str]:
    """Yields a.b.c, a.b and a of the name a.b.c."""
    parts = name.split(".")
    return (".".join(parts[:n]) for n in range(len(parts), 0, -1))


def room(folder: str, module: str, house: affected.House) -> str | None:
    """Returns the room of `folder` that contains a module; None if there is none."""
    if module == folder:
        body = house.trees[house.files[module]].body
        return "__init__" if any(not isinstance(node, ast.Expr) for node in body) else None
    if folder and not module.startswith(f"{folder}."):
        return None
    return module.removeprefix(f"{folder}." if folder else "").split(".")[0]


def declared(project: Mapping) -> dict[str, dict[str, tuple[int, int]]]:
    """Maps each folder to its rooms that layers name: each with the number of its layer from above, and its own number.

    Rooms of one layer must not import each other and have different numbers; rooms that a colon separates may, and have
    the same.
    """
    found = {}
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers":
            for container, (n, layer) in itertools.product(
                contract.get("containers", [""]), enumerate(contract["layers"])
            ):
                separate = "|" in layer
                for m, name in enumerate(re.split(r"[|:]", layer)):
                    whole = ".".join(filter(None, (container, name.strip(" ()"))))
                    folder, _, last = whole.rpartition(".")
                    found.setdefault(folder, {})[last] = n, m if separate else 0
    return found


def broken(arrows: Iterable[Arrow], layers: Mapping[str, tuple[int, int]]) -> set[Arrow]:
    """Returns the arrows that layers forbid: those to a layer above, and those to another room of the same layer."""
    within = [(a, b) for a, b in arrows if a in layers and b in layers]
    above = lambda a, b: layers[b][0] < layers[a][0] or (layers[b][0] == layers[a][0] and layers[b] != layers[a])
    return {(a, b) for a, b in within if above(a, b)}


def round_trips(arrows: set[Arrow]) -> set[Arrow]:
    """Returns a few arrows without which the others contain no circle."""
    rooms, first, last = {room for arrow in arrows for room in arrow}, [], []
    while rooms:
        left = [arrow for arrow in arrows if rooms.issuperset(arrow)]
        leaves = lambda room: sum(a == room for a, _ in left)  # noqa: B023
        enters = lambda room: sum(b == room for _, b in left)  # noqa: B023
        if sinks := sorted(room for room in rooms if not leaves(room)):
            last, gone = [*sinks, *last], sinks
        else:
            sources = sorted(room for room in rooms if not enters(room))
            gone = sources or [max(sorted(rooms), key=lambda room: leaves(room) - enters(room))]
            first += gone
        rooms -= set(gone)
    place = {room: n for n, room in enumerate([*first, *last])}
    return {(a, b) for a, b in arrows if place[a] > place[b]}


def height(arrows: Iterable[Arrow]) -> int:
    """Returns the number of rooms on the longest path."""
    below = {}
    for a, b in arrows:
        below.setdefault(a, []).append(b)

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, below.get(room, [])), default=0)

    return max(map(floor, below), default=1)


def tied(arrows: Iterable[Arrow]) -> Iterator[set[str]]:
    """Yields the groups of two or more names in which each reaches every other."""
    below = {}
    for a, b in arrows:
        below.setdefault(a, set()).add(b)

    def reach(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for other in below.get(left.pop(), set()) - seen:
                seen.add(other)
                left.append(other)
        return seen

    reached, done = {name: reach(name) for name in below}, set()
    for name in sorted(below):
        group = {other for other in reached[name] if name in reached.get(other, set())} - {name}
        if group and name not in done:
            done |= group
            yield group | {name}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else affected.ROOT)
