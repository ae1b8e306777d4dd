"""Transcripts of the documentation: what makes one stale, and what does not."""

import pytest

from tests.transcripts import PAGES, alike, transcripts


PAGE = """# Page

```bash
python -m elsewhere
```

```console
$ python -m train.sft
...
step 96: user
Are you right?

step 96/96  loss 0.2151  1,856 tokens/s  0:00:31 left
Validation loss: 5.334 at first, 0.218 at best.
$ python -m other
> Hello?
{"id":"cmpl-...","text":"a"}
```
"""
PRINTED = """Data
  records  433

step 48: user
Are you right?

step 96: user
Are you right?

step 96/96  loss 0.2152  12.5 tokens/s  1:10:00 left
Validation loss: 5.334 at first, 0.219 at best.
"""


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_a_page(page):
    first, second = transcripts(page)
    assert (first.command, first.line, len(first.shown)) == ("python -m train.sft", 8, 6)
    assert (second.command, second.line) == ("python -m other", 15)
    assert not first.difference(PRINTED)
    assert not second.difference('> Hello?\n{"id":"cmpl-53f","text":"a"}\n\n')


@pytest.mark.parametrize(
    ("old", "new", "line", "diff"),
    [
        ("96: user\nAre you right?", "96: user\nAre you wrong?", 11, ["- Are you right?", "+ Are you wrong?"]),
        ("step 96: user", "step 95: user", 10, ["- step 96: user", "+ step 95: user", "  Are you right?"]),
        ("0.219", "0.229", 14, ["- Validation loss: 5.334 at first, 0.218 at best.", "+ Validation loss: 5.334"]),
        ("0.219 at best.\n", "0.219 at best.\nMore.\n", 15, ["+ More."]),
        ("Validation loss: 5.334 at first, 0.219 at best.\n", "", 14, ["- Validation loss: 5.334 at first"]),
    ],
)
def test_a_stale_one(page, old, new, line, diff):
    """A stale transcript is reported with its page, its line and a diff."""
    assert PRINTED.count(old) == 1
    found = transcripts(page)[0].difference(PRINTED.replace(old, new))
    where, *rest = found.splitlines()
    assert where.startswith(f"page.md:{line}: `python -m train.sft` prints something else")
    assert [got.startswith(want) for got, want in zip(rest, diff, strict=False)] == [True] * len(diff), rest


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 0.500", "loss 0.504", True),
        ("loss 0.500", "loss 0.525", False),
        ("loss 0.500", "lost 0.500", False),
        ("1.0e-05 apart", "1.2e-05 apart", False),
        ("24,075 tokens", "24,076 tokens", False),
        ("6.90 MiB", "6.93 MiB", True),
        ("took 12.5 s on 2026-11-24 at 11:20", "took 1 s on 2027-01-02 at 9:01", True),
        ("took 12.5 s", "took 12.5 min", False),
        ("106 s, 2.19 nats", "99 s, 3.19 nats", False),
        ("1,197 tokens/s  15.9 GFLOP/s", "9 tokens/s  1.2 GFLOP/s", True),
        ('{"created":...,"n":1}', '{"created":17,"n":1}', True),
        ('{"created":...,"n":1}', '{"created":17,"n":2}', False),
    ],
)
def test_lines(shown, printed, same):
    assert alike(shown, printed) == same


def test_there_are_some():
    assert sum(len(transcripts(page)) for page in PAGES) > 4
