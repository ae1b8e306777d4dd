"""The GPU benchmarks run to the end in a rehearsal on the CPU, small and interpreted, and write their files."""

import importlib
import inspect
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import kernels as kernels_
from benchmarks import first, gpu, kernels, profile, serve, train, tune
from benchmarks.cases import CASES, Attention
from benchmarks.gpu import Failed, Target, Worker, regions
from benchmarks.tune import TABLES, neighbours, write


ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def environment():
    """Restores the environment, because the scripts set variables for the processes that they start."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def here(monkeypatch):
    """Runs the workers' functions in this process, since starting one takes longer.

    JAX is as strict as in a worker, and warnings are not errors.
    """

    # `benchmarks.common.import_transformers` hides it, and other tests of this process need it.
    monkeypatch.setitem(sys.modules, "kernels", sys.modules["kernels"])

    class Pipe:
        """Both ends of a pipe: passes one call to the worker's loop, and receives the answer."""

        def __init__(self, *call):
            self.calls, self.answer = [call], None

        def recv(self):
            if not self.calls:
                raise EOFError
            return self.calls.pop()

        def send(self, answer):
            self.answer = answer

    def call(self, function, *args, patience, **options):
        pipe = Pipe(function, args, options)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gpu.work(pipe)
        failure, result, _ = pipe.answer
        if failure:
            raise Failed(failure)
        return result

    monkeypatch.setattr(Worker, "__call__", call)


def written(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.thorough
def test_kernels(tmp_path, capsys, here):
    kernels.main(rehearse=True, only=("Qwen3-30B-A3B up",), out=tmp_path)
    record = written(tmp_path)
    for name in ("xla", "triton", "lax.ragged_dot"):
        rows = [row for row in record["rows"] if row["by"] == name]
        assert [row["pass"] for row in rows] == ["forward", "dx", "dw"], name
        assert all(0 < row["error"] < row["bound"] and row["ms"] > 0 and not row["note"] for row in rows), name
    torch = [row for row in record["rows"] if row["by"] == "torch grouped_mm"]
    assert all("ms" in row or row["note"] == "not installed: torch" for row in torch) and len(torch) == 3
    assert any(target["name"].startswith("grouped dx, Qwen3-30B-A3B up /") for target in record["targets"])
    assert record["versions"]["jax"] and "Left out, as there was no more time: nothing" in capsys.readouterr().out


@pytest.mark.thorough
def test_states(tmp_path, here):
    kernels.main(rehearse=True, only=("states of Nemotron*",), out=tmp_path)
    rows = written(tmp_path)["rows"]
    for name in ("xla", "triton"):
        own = [row for row in rows if row["by"] == name]
        assert [row["pass"] for row in own] == ["forward", "backward"], name
        assert all(0 < row["error"] < row["bound"] and row["ms"] > 0 and not row["note"] for row in own), name
    torch = [row for row in rows if row["by"] == "torch mamba_ssm"]
    assert all("ms" in row or row["note"].startswith("not installed") for row in torch) and len(torch) == 2


def test_a_wrong_kernel_makes_the_run_fail(tmp_path, monkeypatch):
    wrong = dict(ms=[1.0], error=float("nan"), bound=1e-2, memory=0)
    answers = {"platform": ("cpu", "cpu"), "refusals": {"mosaic": None, "cudnn": "it has no softcap"}, "measure": wrong}
    monkeypatch.setattr(Worker, "__call__", lambda _, function, *__, **___: answers[function.split(".")[-1]])
    with pytest.raises(SystemExit, match="WRONG: mosaic in causal D128 T8k, forward"):
        kernels.main(rehearse=True, only=("causal D128 T8k",), out=tmp_path)
    rows = written(tmp_path)["rows"]
    assert [row["note"] for row in rows if row["by"] == "mosaic"] == ["WRONG", "WRONG"]
    assert [row["note"] for row in rows if row["by"] == "cudnn"] == ["refuses: it has no softcap"]


def test_what_is_left_out_is_listed(tmp_path, here):
    kernels.main(rehearse=True, only=("*D128*",), seconds=0, out=tmp_path)
    assert written(tmp_path)["settings"]["skipped"] == ["causal D128 T8k"]


@pytest.mark.thorough
def test_tune(tmp_path, capsys, here):
    pattern = "ragged_dot.triton.matrices"
    tune.main(rehearse=True, only=("Qwen3-30B-A3B up",), kernels=(pattern,), candidates=1, out=tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith("ragged_dot.triton matrices 2 bytes rows16, by Qwen3-30B-A3B up, forward\n")
    assert printed.count(" ms\n") >= 2 and "WRONG" not in printed and "Error" not in printed
    with pytest.raises(SystemExit, match="--out"):
        tune.main(rehearse=True)


def test_search_goes_on_from_the_best():
    times = {16: 3.0, 32: 2.0, 64: 1.0, 128: math.inf}  # the last one does not compile
    milliseconds = lambda sizes: times[sizes["kv"]]
    assert tune.search(milliseconds, {"kv": 16}, candidates=40) == ({"kv": 64}, 1 / 3)
    assert tune.search(milliseconds, {"kv": 64}, candidates=40) == ({"kv": 64}, 1.0)
    assert tune.search(milliseconds, {"kv": 16}, candidates=1) == ({"kv": 32}, 2 / 3)


def test_a_tuned_row_changes_nothing_else(tmp_path):
    sizes = {"rows": 64, "columns": 128, "depth": 64, "warps": 8, "stages": 3}
    for shape_class in ("deep", "rows16"):
        write(tmp_path, "sm_90", ("ragged_dot.triton", "matrices", "2 bytes", shape_class), sizes)
    table, before = written(tmp_path / "ragged_dot"), json.loads((TABLES / "ragged_dot" / "triton.json").read_text())
    assert table["matrices"].pop("sm_90") == {"2 bytes": {"deep": sizes, "rows16": sizes}}
    before["matrices"].pop("sm_90", None)
    assert table == before


def test_a_shortlist_is_tried_and_nothing_else():
    times = {16: 3.0, 32: 2.0, 64: 1.0}
    milliseconds = lambda sizes: times[sizes["kv"]]
    assert tune.quickest(milliseconds, {"kv": 16}, [{"kv": 32}]) == ({"kv": 32}, 2 / 3)
    assert tune.quickest(milliseconds, {"kv": 32}, [{"kv": 16}]) == ({"kv": 32}, 1.0)


def test_neighbours_differ_by_one_step():
    sizes = {"kv": 16, "warps": 8, "stages": 2}
    assert neighbours(sizes) == [
        sizes | change for change in ({"kv": 32}, {"warps": 4}, {"stages": 1}, {"stages": 3})
    ]  # fmt: skip


@pytest.mark.thorough
def test_first(tmp_path, here):
    """Both kernels are right in each call, in the padding too, and a step reports what the compiler has counted."""
    first.main(rehearse=True, out=tmp_path)
    *calls, step = written(tmp_path)["rows"]
    assert [(row["check"], row["call"]) for row in calls] == [
        (f"attention by {name}", n) for name in ("xla", "triton") for n in (1, 2, 3)
    ]
    assert all(0 < row[part] < 1e-2 for row in calls for part in ("out", "dq", "dk", "dv", "padding"))
    assert step["counted"] > 1e5 and "attention" in step["how"] and not step["note"]


@pytest.mark.thorough
def test_garbage_in_padding_makes_the_run_fail(tmp_path, monkeypatch, here):
    """Results of padding that XLA leaves unwritten, and a step that fails, are reported."""
    own = kernels_.attention

    def garbage(q, k, v, tokens, *, implementation, **options):
        out = own(q, k, v, tokens, implementation="reference", **options)
        spoilt = jax.numpy.where((tokens.segments == 0)[..., None, None], jax.numpy.nan, out)
        return out if implementation == "reference" else spoilt

    monkeypatch.setattr(kernels_, "attention", garbage)
    monkeypatch.setattr(first, "step", lambda tiny: 1 / 0)
    with pytest.raises(SystemExit, match="--xla_gpu_enable_command_buffer="):
        first.main(rehearse=True, out=tmp_path)
    notes = [row["note"] for row in written(tmp_path)["rows"]]
    assert notes == ["WRONG: out dq dk dv"] * 6 + ["FAILED: ZeroDivisionError: division by zero"]


def test_the_script_for_a_card_gives_options_that_exist(tmp_path):
    """Every command of gpu.sh in a rehearsal names a module's own options, and README.md has every part."""
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(tmp_path)]
    environment = os.environ | {"REHEARSE": "1", "PYTHON": "echo COMMAND"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^COMMAND -m benchmarks\.(\w+) (.*)$", printed, re.MULTILINE)
    assert {module for module, _ in commands} == {"first", "kernels", "profile", "train", "serve", "tune"}
    for module, options in commands:
        known = inspect.signature(importlib.import_module(f"benchmarks.{module}").main).parameters
        assert set(re.findall(r"--([a-z-]+)", options)) <= set(known), module
    (parts,) = re.findall(r"parts=\((.*)\)$", (ROOT / "benchmarks" / "gpu.sh").read_text(), re.MULTILINE)[1:]
    (table,) = re.findall(
        r"^\| part \|.*\n((?:\|.*\n)+)", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE
    )
    assert ", ".join(re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE)).replace(",", "") == parts


@pytest.mark.thorough
def test_train(tmp_path, here):
    train.main(rehearse=True, only=("qwen3-8b*",), out=tmp_path)
    zoo, torch = written(tmp_path)["rows"]
    assert zoo["tokens/s"] > 0 and 0 < zoo["trained"] < zoo["parameters"] and not zoo["note"]
    assert abs(zoo["losses"][0] - np.log(256)) < 0.5
    assert not torch["note"] or torch["note"].startswith("not installed")


def test_a_loop_has_the_time_that_its_body_leaves():
    event = profile.Event
    lines = [[event("dot.3", 2, 3), event("while.1", 0, 10), event("dot.2", 6, 2)], [event("dot.9", 0, 5)]]
    rows = profile.summed(lines, steps=2)
    assert [(row["kernel"], row["kind"], row["calls"], row["ms"] * 2e6) for row in rows] == [
        ("dot", "products", 1.5, 10.0),
        ("while", "other", 0.5, 5.0),
    ]
    assert sum(row["share"] for row in rows) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("attention_forward__1", "attention"),
        ("loop_dynamic_slice_fusion_4", "copies"),
        ("input_scatter_fusion_2", "scatters"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("loop_add_fusion", "elementwise"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert profile.kind(name) == kind


@pytest.mark.thorough
def test_profile_and_serve(tmp_path, here):
    profile.main(rehearse=True, only=("llama3.2-3b",), out=tmp_path / "profile")
    rows = written(tmp_path / "profile")["rows"]
    whole = next(row for row in rows if row["kernel"] == "all")
    kinds = [row for row in rows if row["kernel"].startswith("all ")]
    assert whole["ms"] > 0 and np.isclose(sum(row["ms"] for row in kinds), whole["ms"])
    assert any(row["kind"] == "products" for row in kinds)
    serve.main(rehearse=True, only=("qwen3-8b, bf16, batch 1",), out=tmp_path / "serve")
    (row,) = written(tmp_path / "serve")["rows"]
    assert not row["note"] and row["tokens/s"] > 0 and 0 < row["cache"] < row["weights"]


@pytest.mark.parametrize("case", [case.tiny() for case in CASES if isinstance(case, Attention)], ids=lambda c: c.name)
def test_pairs_of_tokens_that_see_each_other(case):
    i, j = np.indices((case.seq, case.seq))
    seen = (j <= i) | (not case.causal)
    seen &= (i - j < case.window) | (not case.window)
    for length in filter(None, (case.chunk, case.documents and case.seq // case.documents)):
        seen &= i // length == j // length
    assert case.pairs() == seen.sum()
    assert case.pairs(16) == seen.reshape(4, 16, 4, 16).any(axis=(1, 3)).sum() * 16**2


def test_worker_outlives_failures():
    with Worker() as worker:
        for function, argument, reason in (
            ("math.sqrt", -1, "ValueError"),
            ("os._exit", 3, "its process died"),
            ("signal.sigwait", [signal.SIGUSR2], "it took more than"),
            ("nothing_of_this_name.at_all", 0, "not installed: nothing_of_this_name"),
        ):
            with pytest.raises(Failed, match=reason):
                worker(function, argument, patience=0.1 if function == "signal.sigwait" else 600)
        assert worker("math.sqrt", 4, patience=600) == 2


def test_regions_are_long_enough_and_of_one_call():
    queued = []

    def queue(calls: int) -> float:
        queued.append(calls)
        return 1e-3 * calls

    assert regions(queue, seconds=0.02, count=5) == pytest.approx([1.0] * 5)
    assert queued[0] == 1 and queued[-5:] == queued[-1:] * 5 and 20 <= queued[-1] <= 40


def test_verdicts():
    verdict = lambda value: Target("", value, acceptable=0.9, aim=1.0).verdict
    assert [verdict(v) for v in (1.0, 0.95, 0.5, None)] == ["aim reached", "acceptable", "MISSED", "not measured"]
