"""Compares a command's output in the documentation with the command's actual output.

A `console` block of a page is a transcript: a line that begins with `$ ` is a command, and the lines below it are its
output, in a terminal of 200 columns. Words and whole numbers must be equal; other numbers may differ by `TOLERANCE`.
Times, speeds and dates are not compared. `...` stands for omitted output: any characters within a line, or any lines if
it is a line of its own.

`python -m tests.documented` runs the commands that take seconds. For one that takes minutes:

    COLUMNS=200 python -m train.dpo | python -m tests.transcripts "python -m train.dpo"
"""

import dataclasses
import difflib
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Sequence


ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

TOLERANCE = 0.01  # relative: processors round differently, and training amplifies the differences
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
CLOCK, DATE = r"\d+:\d\d(?::\d\d)?", r"\d{4}-\d\d-\d\d"
UNCOMPARED = {r"\.\.\.": ".*", DATE: DATE, CLOCK: CLOCK, rf"{NUMBER}(?= ?(?:ms|s|min|h|\w+/s)\b)": NUMBER}
PARTS = re.compile("|".join(f"({part})" for part in [*UNCOMPARED, NUMBER]))


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A command of a page with the output that the page shows; `line` is the command's line number."""

    page: pathlib.Path
    line: int
    command: str
    shown: tuple[str, ...]

    def difference(self, printed: str) -> str:
        """Returns the page, the line and a diff of the first difference from the actual output; "" if there is none."""
        lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
        if (found := first_difference(self.shown, lines)) is None:
            return ""
        at, diff = found
        where = f"{self.page.name}:{self.line + 1 + at}: `{self.command}` prints something else than is shown:"
        return "\n".join([where, *diff])


def files(page: pathlib.Path) -> dict[str, str]:
    """Returns the Python files that a page shows: a paragraph that names one stands before its block."""
    found = re.finditer(
        r"^[^\n]*`(\w+\.py)`[^\n]*\n\n```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return {each[1]: each[2] for each in found}


def transcripts(page: pathlib.Path) -> list[Transcript]:
    """Returns the transcripts of a page."""
    found = []
    for block in re.finditer(r"^```console\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        lines = [line.rstrip() for line in block[1].splitlines()]
        above = block.string.count("\n", 0, block.start(1))
        starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in itertools.pairwise([*starts, len(lines)]):
            found.append(Transcript(page, above + start + 1, lines[start][2:], tuple(lines[start + 1 : end])))
    return found


def first_difference(shown: Sequence[str], printed: Sequence[str]) -> tuple[int, list[str]] | None:
    """Returns the number of the first shown line that was not printed, and a diff from there; None if all were."""
    reached = {0}  # the numbers of printed lines that the shown lines so far can match
    for at, line in enumerate(shown):
        if line == "...":
            after = set(range(min(reached), len(printed) + 1))
        else:
            after = {n + 1 for n in reached if n < len(printed) and alike(line, printed[n])}
        if not after:
            near = difflib.get_close_matches(line, [printed[n] for n in sorted(reached) if n < len(printed)], 1, 0.0)
            start = next((n for n in sorted(reached) if near and printed[n] == near[0]), len(printed))
            rest = list(itertools.takewhile(lambda each: each != "...", shown[at:]))
            return at, diff(rest, printed[start : start + len(rest)])
        reached = after
    return None if len(printed) in reached else (len(shown), diff([], printed[max(reached) :]))


def diff(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    lines = []
    for old, new in itertools.zip_longest(shown, printed):
        if old is not None and new is not None and alike(old, new):
            lines.append(f"  {old}")
        else:
            lines += [f"- {old}"] * (old is not None) + [f"+ {new}"] * (new is not None)
    return lines


def alike(shown: str, printed: str) -> bool:
    """Whether a line was printed as shown, except for times, speeds, dates and the tolerance of numbers."""
    pattern, wanted, end = "", [], 0
    for part in PARTS.finditer(shown):
        pattern += re.escape(shown[end : part.start()])
        end = part.end()
        kind = part.lastindex or 0  # a match is always of one group
        if kind <= len(UNCOMPARED):
            pattern += [*UNCOMPARED.values()][kind - 1]
        elif part[0].replace(",", "").isdigit():
            pattern += re.escape(part[0])
        else:
            pattern += f"({NUMBER})"
            wanted.append(part[0])
    found = re.fullmatch(pattern + re.escape(shown[end:]), printed)
    return found is not None and all(
        math.isclose(number(want), number(got), rel_tol=TOLERANCE)
        for want, got in zip(wanted, found.groups(), strict=True)
    )


def number(text: str) -> float:
    return float(text.replace(",", ""))


def main(command: str, printed: str) -> int:
    """Compares a command's output with all its transcripts. Returns the number of stale ones."""
    found = [each for page in PAGES for each in transcripts(page) if each.command == command]
    if not found:
        sys.exit(f"No page has a transcript of `{command}`.")
    differences = [difference for each in found if (difference := each.difference(printed))]
    print(*differences, f"{len(differences)} of {len(found)} transcripts of `{command}` are stale.", sep="\n")
    return len(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.read()) > 0)
