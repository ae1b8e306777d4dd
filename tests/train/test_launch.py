"""The launcher's decisions, with simulated processes, and the requests that stop a run.

The thorough tests at the end kill real processes, which then come back.
"""

import http.server
import importlib
import os
import signal
import subprocess
import sys
import threading
import types

import pytest

import train
from tests.close import close
from tests.reliability import nightly, trials
from tests.train import storm
from tests.train.conftest import command
from tests.zoo.programs import MODEL
from train import launch
from train.base import cluster, preemption
from train.base.command import command as command_of_script
from train.base.stop import REASONS, StopRequest, stopped
from train.run import launcher
from train.sft import SFTOptions
from train.step.microbatches import elastic


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns a function that runs a plan: the events of each attempt, with simulated processes and a clock that
    sleeping advances. It returns the exit code, the calls, and the messages.
    """
    now, started = [0.0], []

    class Child:
        returncode = None

        def __init__(self, call, *, start_new_session):
            assert start_new_session
            o = dict(word.split("=", 1) for word in call if "=" in word)
            address, place, count = (o[name] for name in ("JAX_COORDINATOR_ADDRESS", "NODE_RANK", "NNODES"))
            attempt = int(address.split(":")[1]) - 9900
            self.pid, self.fate, self.process = self, o["--plan"].split(",")[attempt - 1], place
            started.append(f"{attempt} {address[0]} {place}/{count} {o.get('ZOO_FULL_PROCESSES')} {o['--at']}")

        def poll(self):
            if self.returncode is None:
                ends = {f"kill{self.process}": -signal.SIGKILL, "end": 0, "fail": 1}
                ends["wait"] = 0 if (tmp_path / "stop").exists() else None
                self.returncode = ends.get(self.fate)
            return self.returncode

        def wait(self):
            assert self.returncode is not None

    def killpg(child, number):
        if child.returncode is not None:
            raise ProcessLookupError
        child.returncode = -number

    monkeypatch.setattr(launcher, "subprocess", types.SimpleNamespace(Popen=Child, run=subprocess.run))
    monkeypatch.setattr(launcher.os, "killpg", killpg)
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(launcher, "time", clock)

    def launched(plan, **options):
        usual = dict(processes=4, hosts="echo a b c d", start="{command} --at={host}{slot}")
        o = launcher.LaunchOptions(**usual | options)
        said = []
        code = launcher.Launcher(o, ["train", f"--out={tmp_path}", f"--plan={plan}"], said.append).run()
        return code, sorted(started), said

    return launched


def calls(attempt, hosts, full):
    return [f"{attempt} a {n}/{len(hosts)} {full} {host}" for n, host in enumerate(hosts)]


def test_it_goes_on_with_what_is_left_and_returns_to_full_size(launched):
    """Without b there are two processes, since three do not divide four. After b's rest they stop; then four."""
    code, called, said = launched("kill1,wait,end", elastic=True)
    everyone = ["a0", "b1", "c2", "d3"]
    assert code == 0
    assert called == [*calls(1, everyone, 4), *calls(2, ["a0", "c2"], 4), *calls(3, everyone, 4)]
    assert [text.partition(" (")[0].partition(":")[0] for text in said] == [
        "Starting 4 of 4 processes.",
        "Process 1 was lost",
        "Starting 2 of 4 processes.",
        "There are more hosts again",
        "Starting 4 of 4 processes.",
    ]


def test_without_elastic_it_starts_as_many_again(launched):
    code, called, _ = launched("kill0,end", processes=2)
    assert code == 0 and called == [*calls(1, ["a0", "b1"], None), *calls(2, ["a0", "b1"], None)]


def test_a_command_that_fails_is_not_tried_for_ever(launched, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
    code, called, said = launched("fail,fail,fail,fail", processes=1, retries=2)
    assert code == 1 and len(called) == 3
    assert said[-1] == "The command has failed 3 times in a row without coming further than step 5."


def test_a_command_that_fails_before_its_first_step_is_not_tried_again(launched):
    code, called, said = launched("fail,end", processes=1)
    assert code == 1 and len(called) == 1
    assert said[-1] == "The command has ended before its first step (exit code 1), and would again."


def test_a_command_needs_a_folder():
    assert str(launcher.out_of(["python", "-m", "train.sft", "--out", "a"])) == "a"
    for words in (["python", "-m", "train.sft"], []):
        with pytest.raises(ValueError, match="Give the command an --out"):
            launcher.out_of(words)
    with pytest.raises(ValueError, match="Write the command after --"):
        launch.main(["--processes", "2"])


@pytest.mark.parametrize(
    "microbatches, rows, shares, processes, full, parts",
    [
        (1, 8, 1, 1, 2, 2),
        (2, 32, 4, 2, 4, 4),
        (1, 24, 6, 6, 8, 2),  # 24 / 8 = 3 rows on a device with all, 24 / 6 / 2 = 2 now
        (1, 24, 3, 3, 8, 4),  # not 3 parts, which would differ in size
        (1, 8, 3, 3, 4, 1),  # the mesh does not divide the rows, and its message says so
    ],
)
def test_microbatches_keep_the_rows_on_a_device(microbatches, rows, shares, processes, full, parts):
    assert elastic(microbatches, rows=rows, shares=shares, processes=processes, full=full) == parts


JOBSET = {"JAX_COORDINATOR_ADDRESS": "run-job-0-0.run", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    "environment, found",
    [
        ({}, (None, None, None)),
        (JOBSET, (None, None, None)),  # JAX asks Kubernetes for the number of processes
        ({"NNODES": "4", "NODE_RANK": "3"}, (None, None, None)),
        (JOBSET | {"NNODES": "4"}, ("run-job-0-0.run:1234", 4, 1)),
        (JOBSET | {"NNODES": "4", "NODE_RANK": "2", "JAX_COORDINATOR_PORT": "6002"}, ("run-job-0-0.run:6002", 4, 2)),
        (
            JOBSET | {"JAX_PROCESS_COUNT": "8", "JOB_INDEX": "1", "PROCESSES_IN_JOB": "4"},
            ("run-job-0-0.run:1234", 8, 5),
        ),
    ],
)
def test_coordinators_of_jobsets(monkeypatch, environment, found):
    monkeypatch.setattr(cluster.os, "environ", environment)
    assert cluster.named() == found


# ======================================================================================================================
# Requests to stop a run.
# ======================================================================================================================


@pytest.fixture
def metadata(monkeypatch):
    """Returns a metadata server's values, which tests change."""
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = values.get(self.path.removeprefix("/computeMetadata/v1/instance/"), "")
            self.send_response(200 if self.headers["Metadata-Flavor"] == "Google" else 403)
            self.end_headers()
            self.wfile.write(value.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield values
    server.shutdown()
    thread.join()
    server.server_close()


def test_notices_of_google_cloud(metadata, tmp_path):
    assert preemption.found(tmp_path) == ""
    metadata["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"  # the machine moves elsewhere
    assert preemption.found(None) == ""
    metadata["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert preemption.found(None) == "Google Cloud (maintenance-event)"
    metadata["preempted"] = "TRUE"
    assert preemption.found(None) == "Google Cloud (preempted)"


@pytest.fixture
def no_nohup():
    """Resets SIGHUP, which a process under nohup ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


STOPS = [*((f"SIG{name}", 75) for name in ("TERM", "USR2", "HUP", "XCPU")), ("SIGINT", 130), ("the file stop", 0)]


@pytest.mark.parametrize("name, code", STOPS)
def test_a_run_is_asked_to_stop(tmp_path, monkeypatch, no_nohup, name, code):
    """A signal, such as Slurm's --signal=USR2@120, or a file asks the run to stop; the file is removed. The exit code
    says whether to start the run again.
    """
    monkeypatch.setattr(preemption, "EVERY", 0.01)
    before = {*threading.enumerate()}
    with StopRequest(tmp_path) as stop:
        assert stop.agreed() == ""
        if name.startswith("SIG"):
            signal.raise_signal(signal.Signals[name])
        else:
            (tmp_path / "stop").touch()
            (looking,) = {*threading.enumerate()} - before
            looking.join()  # it ends when it has found something
        assert stop.agreed() == name and name in REASONS
    assert not (tmp_path / "stop").exists()
    with pytest.raises(SystemExit) as end:
        stopped(name, 3)
    assert end.value.code == code


def test_an_old_file_stop_is_removed(tmp_path, capsys):
    """A file `stop` from before this start is ignored."""
    (tmp_path / "stop").touch()
    os.utime(tmp_path / "stop", (preemption.STARTED - 1,) * 2)
    with StopRequest(tmp_path) as stop:
        assert not (tmp_path / "stop").exists() and not preemption.found(tmp_path) and not stop.requested
    assert "stop was made before this start" in " ".join(capsys.readouterr().out.split())


def test_a_signal_of_every_second(monkeypatch):
    """SIGXCPU, which repeats every second, does not end a run that is saving."""
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"it ends with {code}"))
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGXCPU)
        signal.raise_signal(signal.SIGXCPU)
        assert stop.requested == "SIGXCPU"


def test_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGHUP", "SIGXCPU"])
def test_a_signal_before_the_first_step(monkeypatch, no_nohup, name):
    """A signal before the first step or after the last one ends with the exit code for a restart."""
    codes, before = [], signal.getsignal(signal.Signals[name])
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["train.sft"])
    command_of_script(lambda o: signal.raise_signal(signal.Signals[name]), SFTOptions)
    assert codes == [75] and signal.getsignal(signal.Signals[name]) == before


def test_a_signal_while_modules_are_imported(monkeypatch):
    before, codes = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["-m"])
    try:
        importlib.reload(train)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert codes == [75]


# ======================================================================================================================
# Real processes.
# ======================================================================================================================


@pytest.mark.thorough
def test_a_lost_process_changes_no_step(tmp_path):
    """One of two processes is killed. The other continues with twice the microbatches, like one with eight devices."""
    command("train.pretrain", *storm.arguments(tmp_path / "calm", 5))
    calm = storm.losses(tmp_path / "calm")
    found = storm.storm(tmp_path, kills=1, steps=5, rest=1000.0, calm=calm)
    assert found["kills"] == 1 and found["sizes"] == [2, 1]
    close(found["largest"], 0, terms=2 * MODEL, size=1)  # of the relative differences of losses


@nightly
@pytest.mark.thorough
def test_lost_processes_come_back(tmp_path, record_property):
    """A random one of two processes is killed, again and again, and restarted: no loss has other bits."""
    kills = trials(1, 20, 100)
    found = storm.storm(tmp_path, kills=kills, steps=12 * kills + 10, elastic=False)
    record_property("figure", storm.told(found))
    assert found["kills"] == kills and found["differ"] == 0


@nightly
@pytest.mark.thorough
def test_processes_that_are_lost_and_found(tmp_path, record_property):
    """With --elastic one process continues, and later two again. Sums are then in another order."""
    kills = trials(1, 5, 100)
    found = storm.storm(tmp_path, kills=kills, steps=12 * kills + 10)
    record_property("figure", storm.told(found))
    assert found["kills"] == kills
    close(found["largest"], 0, terms=2 * MODEL, size=1)


@nightly
@pytest.mark.thorough
def test_a_soak(tmp_path, record_property):
    """Faults of all kinds happen: processes are killed, hang or get a SIGTERM, and checkpoints are damaged."""
    kills = trials(1, 10, 100)
    found = storm.storm(tmp_path, kills=kills, steps=13 * kills, elastic=False, faults=storm.FAULTS)
    record_property("figure", storm.told(found))
    assert found["kills"] == kills and found["differ"] == 0
