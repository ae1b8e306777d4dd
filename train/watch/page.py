"""Runs as one HTML page that needs no server and no network: curves to zoom, samples side by side, and settings.

All its content comes from a run's folder: metrics.jsonl, samples.jsonl, run.json and goodput.json. So the page can be
made at any time.
"""

import datetime
import fnmatch
import html
import itertools
import json
import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from train.watch.metrics import read_metrics


REPORT = "report.html"  # in the folder of every run
RUN = "run.json"  # in the folder, too: the run's identity, options and starts
GOODPUT = "goodput.json"  # in the folder, too, see train/base/goodput.py
REFRESH = 15  # seconds after which an open page reloads while the run goes on
BUCKETS = 1000  # parts of a curve; the lowest and highest point of each are kept, as a chart is 2,000 pixels wide
TEMPLATE = pathlib.Path(__file__).with_name("page.html")

# The sections of the page, with patterns of their charts' titles. The first pattern that fits a title decides the
# chart's section and its place there. Any other metric is drawn in the last section.
SECTIONS = {
    "Rewards": ("reward", "*reward*", "pass@*", "length", "ended", "turns", "tool_calls", "tool_errors", "truncated",
                "branches", "entropy", "*kl*", "*clip*"),
    "Learning": ("loss", "*loss*", "accuracy", "perplexity", "margin", "*divergence*", "eval*", "grad_norm",
                 "learning_rate", "attention_logit"),
    "Speed and memory": ("tokens_per_second", "*_per_second", "mfu", "goodput*", "*memory*", "*_bytes", "*seconds*",
                         "*time*"),
    "Mixture of experts": ("balance", "router*", "*expert*"),
    "Layers": ("activation*", "*norm*"),
    "Other": ("*",),
}  # fmt: skip
TILES = ("loss", "validation_loss", "reward", "accuracy", "grad_norm", "learning_rate", "tokens_per_second", "mfu")


def write(folders: Sequence[str | os.PathLike], path: str | os.PathLike) -> None:
    """Writes the page of these runs to `path`, in one move, so that a browser never reads half of it.

    Raises:
        ValueError: a folder has no metrics.jsonl.
    """
    runs = [read(pathlib.Path(folder)) for folder in folders]
    names = [run["name"] for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run["name"]) > 1:
            run["name"] = str(folder)
    title = ", ".join(run["name"] for run in runs)
    keys = dict.fromkeys(key for run in runs for key in run["curves"])
    data = {
        "runs": [{name: value for name, value in run.items() if name != "about"} for run in runs],
        "sections": sections(keys),
        "tiles": [key for key in TILES if key in keys],
        "tables": tables([run["about"] for run in runs]),
        "written": max(run["written"] for run in runs),
        "refresh": REFRESH if any(run["running"] for run in runs) else 0,
    }
    text = TEMPLATE.read_text(encoding="utf-8").replace("{{title}}", html.escape(title))
    text = text.replace("{{data}}", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))  # no </script> in it
    new = pathlib.Path(f"{path}.tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Reads a run's folder: its name and state, its curves by metric, its samples, and "about", tables of settings.

    Raises:
        ValueError: there is no metrics.jsonl.
    """
    metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
    if not metrics.exists():
        raise ValueError(f"{folder} has no metrics.jsonl, so it is no run's folder, or of a run without a step.")
    lines = read_metrics(metrics)
    try:
        about = json.loads((folder / RUN).read_text())
    except (OSError, ValueError):
        about = {}  # the curves do not need it
    starts, options, identity = about.get("starts") or [{}], about.get("options", {}), about.get("identity", {})
    step, steps = lines[-1]["step"] if lines else 0, options.get("--steps")
    ended = starts[-1].get("ended")
    running = bool(starts[-1]) and ended is None
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    word = "Running" if running else "Finished" if step == steps else "Stopped"
    return {
        "name": folder.resolve().name,
        "state": f"{word}, at step {step:,}{of}",
        "running": running,
        "error": (ended or {}).get("error", ""),
        "written": metrics.stat().st_mtime,
        "curves": curves(lines),
        "tokens": _thinned(*_summed(lines)),
        "samples": [
            {name: line[name] for name in ("step", "prompt", "text")}
            for line in (read_metrics(samples) if samples.exists() else [])
            if {"prompt", "text"} <= line.keys()
        ],
        "about": {
            "Goodput": goodput(folder) | slowest(lines),
            "Options": options,
            "Data": flat(identity.get("data", {})),
            "Model": flat({name: value for name, value in identity.items() if name not in ("data", "config")})
            | flat(identity.get("config", {}), "config."),
            "Start": flat({name: value for name, value in starts[-1].items() if name != "ended"}),
            "Starts": {
                f"{number}: {_clock(start.get('time'))}": f"from step {start.get('step', 0):,}" + _end(start)
                for number, start in enumerate(starts, 1)
                if start
            },
        },
    }


def curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    """Returns metric -> {"steps", "values", "bad"}, for every metric that is a number.

    Values that are not finite are left out, and their steps are in "bad". The curves of a long run are thinned.
    """
    found: dict[str, tuple[list, list, list]] = {}
    for line in lines:
        for key, value in line.items():
            bad = value in ("nan", "inf", "-inf")  # as metrics.jsonl writes them
            if key != "step" and (bad or type(value) in (int, float)):
                steps, values, wrong = found.setdefault(key, ([], [], []))
                (wrong if bad else steps).append(line["step"])
                values += [] if bad else [value]
    return {
        key: _thinned(steps, values) | {"bad": bad[:BUCKETS]} for key, (steps, values, bad) in found.items() if steps
    }


def sections(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Sorts metrics into sections of charts. A chart has a title, and the metrics that it draws together.

    "validation_loss" is drawn with "loss", and all "norm/..." in a chart "norm".
    """
    charts: dict[str, list[str]] = {}
    for key in keys:
        charts.setdefault(key.rpartition("/")[0] or key.removeprefix("validation_"), []).append(key)
    found: dict[str, list] = {title: [] for title in SECTIONS}
    for title, its in charts.items():
        section, rank = next(
            (section, rank)
            for section, patterns in SECTIONS.items()
            for rank, pattern in enumerate(patterns)
            if fnmatch.fnmatch(title, pattern)
        )
        its = sorted(its, key=lambda key: (key.startswith("validation_"), key))
        found[section].append((rank, title, {"title": title, "keys": its}))
    return [
        {"title": section, "charts": [chart for *_, chart in sorted(its, key=lambda it: it[:2])]}
        for section, its in found.items()
        if its
    ]


def tables(abouts: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Makes the tables of settings, with a column for each run. A table of the differences between runs comes first."""
    found, differing = [], []
    for title in abouts[0]:
        names = dict.fromkeys(name for about in abouts for name in about[title])
        rows = [
            [name, *(_text(about[title].get(name, "")) for about in abouts)]
            for name in (sorted(names) if title in ("Options", "Data", "Model") else names)
        ]
        if title in ("Options", "Data", "Model"):
            differing += [row for row in rows if len(set(row[1:])) > 1]
        found += [{"title": title, "rows": rows, "open": title == "Goodput"}] if rows else []
    return ([{"title": "What differs", "rows": differing, "open": True}] if differing else []) + found


def goodput(folder: pathlib.Path) -> dict[str, str]:
    """Returns phase -> seconds with their share, as text, from the run's goodput.json."""
    try:
        seconds = json.loads((folder / GOODPUT).read_text())["seconds"]
    except (OSError, ValueError, KeyError):
        return {}  # an older run
    whole = sum(value for name, value in seconds.items() if name != "away") or 1.0
    return {
        name: f"{value:,.1f} s" + (f", {value / whole:.1%}" if name != "away" else "")
        for name, value in seconds.items()
        if value
    }


def slowest(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names the process that the others waited for, by the medians of the last hundred steps' "own_seconds"."""
    each = [line["own_seconds"] for line in lines[-100:] if "own_seconds" in line]
    each = [own for own in each if len(own) == len(each[-1])]  # the number of processes may have changed
    medians = [statistics.median(seconds) for seconds in zip(*each, strict=True)]
    if not medians:
        return {}  # a run of one process
    most = max(medians)
    return {
        "slowest process": f"process {medians.index(most)}: {most:.3g} s of its own a step; the median process has "
        f"{statistics.median(medians):.3g} s"
    }


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested JSON to dotted name -> value. Elements of a list of objects are named by their indices."""
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {prefix.removesuffix("."): value}
    return {name: each for key, inner in value.items() for name, each in flat(inner, f"{prefix}{key}.").items()}


def _thinned(steps: Sequence[int], values: Sequence[float | int]) -> dict[str, list]:
    """Keeps the lowest and highest point of each of `BUCKETS` parts of a curve, and its ends, with six digits."""
    keep = range(len(steps))
    if len(steps) > 2 * BUCKETS:
        edges = [len(steps) * n // BUCKETS for n in range(BUCKETS + 1)]
        parts = [range(*pair) for pair in itertools.pairwise(edges)]
        ends = [choose(part, key=values.__getitem__) for part in parts for choose in (min, max)]
        keep = sorted({0, len(steps) - 1, *ends})
    number = lambda value: float(f"{value:.6g}") if isinstance(value, float) else value
    return {"steps": [steps[i] for i in keep], "values": [number(values[i]) for i in keep]}


def _summed(lines: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """Returns steps, and the number of tokens that were learnt from until each step."""
    steps, sums, total = [0], [0], 0
    for line in lines:
        tokens = line.get("tokens")
        if isinstance(tokens, int | float) and math.isfinite(tokens):
            total += int(tokens)
            steps.append(line["step"])
            sums.append(total)
    return steps, sums


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _clock(seconds: float | int | None) -> str:
    return "?" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _end(start: Mapping[str, Any]) -> str:
    """Describes the end of a start of the run, in words."""
    if not (ended := start.get("ended")):
        return ""
    error = f": {ended['error']}" if ended.get("error") else ""
    return f" to step {ended['step']:,}, {_clock(ended['time'])}{error}"
