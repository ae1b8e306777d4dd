"""Measures what docs/reliability.md promises, row by row: `python -m tests.reliability --tier N`.

A row names some tests of the suite. CI runs them with tier P's numbers of trials. Tier N is for a night, and R for a
release: they run the same tests with more trials, and also the tests that are too long for CI. With --write, the
results go into the table of docs/reliability.md.
"""

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from typing import Literal, NamedTuple

import pytest
import tyro


ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
TIERS = ("P", "N", "R")
VARIABLE = "RELIABILITY_TIER"
TIER = os.environ.get(VARIABLE, "P")
LIMIT = 3600  # seconds for a row


def trials(p: int, n: int, r: int) -> int:
    """Returns the number of trials that a test makes in the current tier."""
    return (p, n, r)[TIERS.index(TIER)]


nightly = pytest.mark.skipif(TIER == "P", reason="takes a while: python -m tests.reliability --tier N")


class Row(NamedTuple):
    """A promise, its target, the best result of others, and the tests that hold the promise.

    A test adds its measurement to the table by pytest's `record_property("figure", ...)`.
    """

    what: str
    target: str
    peer: str
    tests: tuple[str, ...]


SCRIPTS, CHECKPOINT, PROCESSES = (f"tests/train/test_{name}.py" for name in ("scripts", "checkpoint", "processes"))
FAULTS, LAUNCH, DATA = (f"tests/train/test_{name}.py" for name in ("faults", "launch", "data"))
HUB, TENSORS, BAD = "tests/convert/test_hub.py", "tests/convert/test_tensors.py", "tests/zoo/test_bad_input.py"
TEMPLATES, TOKENIZER = "tests/zoo/test_templates.py", "tests/zoo/test_tokenizer.py"

ROWS = {
    "R1": Row(
        "SIGKILL at any moment",
        "no loss and no weight with other bits",
        "Orbax with Grain: 50 of 50, 0 of 400 losses differ",
        (f"{SCRIPTS}::test_killed_and_resumed",),
    ),
    "R2": Row(
        "SIGKILL during a save",
        "all recover, leftovers removed",
        "Orbax: 50 of 50 recover, leftovers stay",
        (f"{CHECKPOINT}::test_killed_while_saving",),
    ),
    "R3": Row(
        "SIGTERM, SIGUSR2, Ctrl-C, notices",
        "the step is saved, the exit code says so",
        "MaxText: between steps",
        (
            f"{SCRIPTS}::test_told_to_stop",
            f"{SCRIPTS}::test_stopped_at_any_moment",
            f"{CHECKPOINT}::test_a_second_signal_ends_the_process",
            f"{LAUNCH}::test_a_run_is_asked_to_stop",
            f"{LAUNCH}::test_notices_of_google_cloud",
        ),
    ),
    "R4": Row(
        "A full disk",
        "told at once, the run goes on, none lost",
        "Orbax: told at the next save, which is lost",
        (f"{CHECKPOINT}::test_a_full_disk", f"{TENSORS}::test_a_full_disk_leaves_the_earlier_export"),
    ),
    "R5": Row(
        "Damaged checkpoints",
        "all found, the one before is used",
        "Orbax: 0 % of flipped bits found",
        (f"{CHECKPOINT}::test_all_damage_is_found", f"{CHECKPOINT}::test_all_damaged"),
    ),
    "R6": Row(
        "Damaged model folders",
        "no wrong model; errors name the file",
        "transformers: 17.6 % wrong, 22.8 % of errors name the file",
        (f"{BAD}::test_damage_makes_no_wrong_model", f"{TENSORS}::test_mutated_headers_and_indexes"),
    ),
    "R7": Row(
        "Mistakes in model folders",
        "each refused in a sentence",
        "transformers: 17 of 58 wrong",
        (
            BAD,
            f"--deselect={BAD}::test_damage_makes_no_wrong_model",
            f"{TENSORS}::test_bad_input_is_named",
            "tests/zoo/test_config.py::test_refused",
        ),
    ),
    "R8": Row(
        "Swapped or transposed weights",
        "seen by each family's comparison",
        "none tests it",
        ("tests/zoo/test_parity.py::test_swapped_weights_are_seen",),
    ),
    "R9": Row(
        "A Hub that fails or lies",
        "damage found, tries again, one commit",
        "huggingface_hub: 4 of 4 damaged files taken",
        (HUB,),
    ),
    "R10": Row(
        "Offline",
        "from the cache, or a sentence",
        "huggingface_hub: works",
        (
            f"{HUB}::test_the_cache_serves_offline",
            f"{HUB}::test_a_cache_that_lacks_the_weights_does_not",
            f"{HUB}::test_offline_and_never_downloaded",
            f"{HUB}::test_no_network",
        ),
    ),
    "R11": Row(
        "A process of several dies or hangs",
        "told and ended; goes on bit for bit",
        "JAX alone: 100 s, 300 s, never",
        (
            f"{PROCESSES}::test_errors_are_told_and_end_all",
            f"{PROCESSES}::test_a_process_that_lives_and_hangs_is_named_and_ends_the_run",
            f"{PROCESSES}::test_a_process_that_fails_ends_the_others",
            f"{LAUNCH}::test_lost_processes_come_back",
            f"{FAULTS}::test_a_run_that_hangs",
        ),
    ),
    "R12": Row(
        "Other devices and numbers of processes",
        "the state bit for bit, losses within 2e-6",
        "Orbax: the state bit for bit, a loss within 9.5e-7",
        (
            f"{CHECKPOINT}::test_onto_other_devices",
            f"{PROCESSES}::test_a_checkpoint_of_four_processes_is_restored_by_others_bit_by_bit",
            f"{PROCESSES}::test_stopped_killed_and_resumed_by_other_numbers_of_devices",
            f"{LAUNCH}::test_a_lost_process_changes_no_step",
            f"{LAUNCH}::test_processes_that_are_lost_and_found",
        ),
    ),
    "R13": Row(
        "Other data, tokenizer or seed on resume",
        "refused, naming the field",
        "Grain: taken silently",
        (
            f"{CHECKPOINT}::test_another_run_is_refused",
            f"{SCRIPTS}::test_resuming_on_other_data_is_refused",
            f"{SCRIPTS}::test_a_mended_record",
            f"{DATA}::test_fingerprint",
            f"{DATA}::test_the_fingerprint_takes_in_all_that_makes_tokens",
        ),
    ),
    "R14": Row(
        "NaN, infinities and spikes",
        "one step lost, none in a checkpoint",
        "MaxText: 129 steps lost",
        (
            FAULTS,
            f"{CHECKPOINT}::test_a_state_that_is_not_finite_is_refused",
            f"{SCRIPTS}::test_not_finite",
            f"{PROCESSES}::test_bad_steps_of_two_processes",
            "tests/train/test_step.py::test_a_step_that_is_not_finite_changes_nothing",
        ),
    ),
    "R15": Row(
        "Repositories that nobody should trust",
        "nothing runs, no pickle is read",
        "transformers: 3 CVEs in 2026",
        (
            f"{BAD}::test_nothing_of_a_repository_is_run",
            "tests/zoo/test_rules.py::test_no_file_can_run_code",
            f"{HUB}::test_pickles_are_refused_and_not_downloaded",
            f"{HUB}::test_an_index_that_leaves_the_repository",
            f"{HUB}::test_answers_that_the_hub_would_not_give",
            f"{HUB}::test_json_that_is_refused",
            f"{TENSORS}::test_bad_input_is_named",
        ),
    ),
    "R16": Row(
        "Chat templates that attack",
        "all stopped; users write no control token",
        "transformers: no limit of time or memory",
        (
            f"{TEMPLATES}::test_a_template_is_bounded_and_the_next_one_works",
            f"{TEMPLATES}::test_a_template_gets_at_nothing",
            f"{TOKENIZER}::test_what_users_write_is_no_control_token",
            f"{TOKENIZER}::test_pieces_that_a_template_joins_are_no_control_token",
        ),
    ),
    "R17": Row(
        "Tokenizers that do not fit",
        "refused",
        "5 of 5,000 damaged ones have other ids, silently",
        (
            f"{TOKENIZER}::test_bad_folders_and_templates",
            f"{DATA}::test_formats",
            f"{DATA}::test_the_fingerprint_takes_in_all_that_makes_tokens",
        ),
    ),
    "R18": Row(
        "Memory after a resume, and after many saves",
        "at most 1.2 of the state when resumed; 2 % growth",
        "Orbax: restoring takes 1.62 of the state",
        (f"{CHECKPOINT}::test_memory_of_a_resumed_run",),
    ),
    "R19": Row(
        "The same run again",
        "the same bits, and those of last time",
        "Levanter, TorchTitan: the same bits",
        (f"{SCRIPTS}::test_the_same_again", f"{SCRIPTS}::test_told_to_stop"),
    ),
    "R20": Row(
        "Hours of faults of all kinds, at random",
        "the losses of a calm run, bit for bit",
        "none tests it",
        (f"{LAUNCH}::test_a_soak",),
    ),
}


@dataclasses.dataclass
class Arguments:
    """Measure what docs/reliability.md promises."""

    tier: Literal["P", "N", "R"] = "P"
    """Number of trials. P: as in CI. N: as many as a night allows. R: before a release."""
    only: tuple[str, ...] = ()
    """Rows such as R5 R6. None: all."""
    write: bool = False
    """Write the results into the table of docs/reliability.md. Rows that did not run stay."""


def measure(name: str, tier: str) -> str:
    """Runs the tests of a row. Returns their results in a few words."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not live", *ROWS[name].tests]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]  # a format with properties
        run = subprocess.run(command, cwd=ROOT, env=os.environ | {VARIABLE: tier}, capture_output=True, timeout=LIMIT)
        if not report.exists():
            return f"**did not run**: {run.stdout.decode()[-2000:]}"
        cases = xml.etree.ElementTree.parse(report).findall(".//testcase")
    text, seconds = found(cases), time.monotonic() - began
    if "**" in text:
        print(run.stdout.decode()[-4000:], file=sys.stderr)
    return f"{text} (tier {tier}, {seconds:,.0f} s)"


def found(cases: list[xml.etree.ElementTree.Element]) -> str:
    """Returns the figures in a pytest report, and the numbers of tests that passed, failed and were skipped."""
    figures = [p.attrib["value"] for case in cases for p in case.iter("property") if p.attrib["name"] == "figure"]
    failed = [
        case.attrib["name"] for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    words = [*figures, f"{passed} test{'s' * (passed != 1)} passed"] if passed else ["not run"]
    words += [f"**{' and '.join(failed)} failed**"] * bool(failed) + [f"{skipped} left out"] * (skipped > 0 < passed)
    return "; ".join(words)


def with_rows(page: str, figures: dict[str, str]) -> str:
    """Returns the page with these figures in the rows of its table."""
    for name, figure in figures.items():
        row = ROWS[name]
        line = f"| {name} | {row.what} | {figure} | {row.target} | {row.peer} |"
        page, known = re.subn(rf"^\| {name} \|.*$", lambda _, line=line: line, page, flags=re.MULTILINE)
        assert known, f"{PAGE} has no row {name}"
    return page


def machine() -> str:
    jax, python = importlib.metadata.version("jax"), platform.python_version()
    return f"{datetime.date.today()}, {os.cpu_count()} CPU cores, Python {python}, jax {jax}"


def main(o: Arguments) -> int:
    print(machine())
    figures = {}
    for name in o.only or ROWS:
        figures[name] = measure(name, o.tier)
        print(f"| {name} | {ROWS[name].what} | {figures[name]} | {ROWS[name].target} | {ROWS[name].peer} |", flush=True)
        if o.write:
            PAGE.write_text(with_rows(PAGE.read_text(), {name: figures[name]}))
    return int(any("**" in figure for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
