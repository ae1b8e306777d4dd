"""Counts and times of a server in Prometheus's text format (prometheus.io/docs/instrumenting/exposition_formats)."""

import bisect
import collections
import threading
from collections.abc import Mapping


COUNTERS = {
    "zoo_requests_total": "Answered requests, by path and status.",
    "zoo_prompt_tokens_total": "Tokens of prompts, by model.",
    "zoo_prompt_tokens_found_total": "Tokens of prompts that were in the cache already, by model.",
    "zoo_generated_tokens_total": "Tokens of replies, by model.",
    "zoo_replies_total": "Replies that have ended, by model and reason.",
}
GAUGES = {
    "zoo_replies_running": "Replies that have tokens, and go on.",
    "zoo_replies_waiting": "Replies that wait for their first token.",
}
HISTOGRAMS = {
    "zoo_first_token_seconds": "Time from a request to the first token of each reply.",
    "zoo_token_gap_seconds": "Time between the tokens of a reply, which come a few at a time.",
    "zoo_reply_seconds": "Time from a request to the end of each reply.",
}
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # of the histograms' buckets, in seconds

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counts since the start. Any thread may add."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[str, Labels]] = collections.Counter()
        self._buckets = {name: [0] * (len(BOUNDS) + 1) for name in HISTOGRAMS}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def add(self, name: str, number: int = 1, **labels: str) -> None:
        """Adds to a counter with these labels."""
        with self._lock:
            self._counts[name, tuple(labels.items())] += number

    def observe(self, name: str, seconds: float) -> None:
        """Adds a time to a histogram."""
        with self._lock:
            self._buckets[name][bisect.bisect_left(BOUNDS, seconds)] += 1
            self._sums[name] += seconds

    def text(self, gauges: Mapping[str, float]) -> str:
        """Writes all metrics, with the present values of the gauges."""
        with self._lock:
            counts, buckets, sums = dict(self._counts), {k: [*v] for k, v in self._buckets.items()}, dict(self._sums)
        lines = []
        for name, words in COUNTERS.items():
            lines += _head(name, "counter", words)
            lines += [f"{name}{_labels(labels)} {count}" for (each, labels), count in counts.items() if each == name]
        for name, words in GAUGES.items():
            lines += [*_head(name, "gauge", words), f"{name} {gauges[name]}"]
        for name, words in HISTOGRAMS.items():
            lines += _head(name, "histogram", words)
            for n, bound in enumerate((*BOUNDS, "+Inf")):
                lines.append(f'{name}_bucket{{le="{bound}"}} {sum(buckets[name][: n + 1])}')
            lines += [f"{name}_sum {sums[name]:g}", f"{name}_count {sum(buckets[name])}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, words: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]


def _labels(labels: Labels) -> str:
    escaped = lambda value: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}" if labels else ""
