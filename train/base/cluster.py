"""Functions for a training in several processes, on one machine or many: joining, agreeing, and ending together.

JAX runs the same program in every process. Each process holds the parts of the arrays that are on its own devices.
Process 0 does the work that has to be done once: printing, writing files, deciding.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
import rich
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from convert.private import public
from train.base import environment


T = TypeVar("T")
TIMEOUT = 20  # seconds without a heartbeat after which a process counts as dead
PATIENCE, LIMIT = 60, 1800  # seconds of waiting for a live process until a warning names it, and until the run ends
CHUNK = 2**26  # bytes that `broadcast` sends at a time

_passed = 0


def initialize() -> None:
    """Joins the other processes of the run, if there are any. Call it before anything requests devices.

    `named` finds the others. If it does not, JAX finds them on Cloud TPUs and under Slurm, Kubernetes (Jobs and
    JobSets) and Open MPI. If none of these applies, nothing happens: the run has one process. In all processes but
    process 0, rich prints nothing.

    Raises:
        ValueError: there are other processes, but not enough is known to reach them.
    """
    coordinator, processes, process = named()
    asked = coordinator is not None or launched()
    if not asked and "tpu" not in (jax.config.jax_platforms or ""):  # JAX sets it on Cloud TPUs
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM, which train.base.stop does
    try:
        jax.distributed.initialize(
            coordinator, processes, process,
            heartbeat_timeout_seconds=TIMEOUT, shutdown_timeout_seconds=TIMEOUT,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        if asked:
            raise ValueError(
                f"This process can't join the others ({error}). Set the same JAX_COORDINATOR_ADDRESS (host:port of "
                "process 0) and NNODES (their number) for each of them, and its own NODE_RANK, from 0."
            ) from error
        return
    rich.reconfigure(quiet=jax.process_index() > 0)


def named() -> tuple[str | None, int | None, int | None]:
    """Returns the address of process 0, the number of processes and this process's number, by environment variables.

    `train.launch`, XPK's JobSets and those of GKE's guides set them. All three values are None unless all are set.
    """
    number = lambda *names: next((int(os.environ[name]) for name in names if name in os.environ), None)
    host = os.environ.get("JAX_COORDINATOR_ADDRESS") or os.environ.get("JAX_COORDINATOR_IP")
    processes, process = number("NNODES", "JAX_PROCESS_COUNT"), number("NODE_RANK", "JOB_COMPLETION_INDEX")
    if "NODE_RANK" not in os.environ and process is not None:
        process += (number("JOB_INDEX") or 0) * (number("PROCESSES_IN_JOB") or 0)  # several Jobs in one JobSet
    if not host or processes is None or process is None:
        return None, None, None
    port = os.environ.get("JAX_COORDINATOR_PORT", "1234")  # XPK's
    return host if ":" in host else f"{host}:{port}", processes, process


def full_processes() -> int:
    """Returns the number of processes when none is lost, which `train.launch --elastic` sets; 0 without it."""
    return int(environment.number("ZOO_FULL_PROCESSES", 0))


def launched() -> bool:
    """Whether environment variables show that a launcher has started several processes."""
    several = lambda name: int(os.environ.get(name, 1)) > 1
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return (
        (several("SLURM_NTASKS") and "SLURM_STEP_NODELIST" in os.environ)  # set by srun, not by salloc or sbatch
        or several("OMPI_COMM_WORLD_SIZE")
        or several("MEGASCALE_NUM_SLICES")
        or "," in hosts
        or ("KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ)
    )


def agree(value: int) -> int:
    """Returns the largest value among the processes. All processes have to call it at the same point of the run."""
    reached_sync_point()
    words = np.array([value], np.int64).view(np.int32)  # JAX would cut 64 bits to 32
    return int(np.asarray(multihost_utils.process_allgather(words)).reshape(-1, 2).view(np.int64).max())


def gather(values: Sequence[bool]) -> np.ndarray:
    """Returns the values of each process, (processes, values).

    All processes have to call it at the same point of the run, with equally many values.
    """
    reached_sync_point()
    return np.asarray(multihost_utils.process_allgather(np.array(values, np.uint8))).reshape(-1, len(values)) > 0


def of_each(number: float) -> list[float]:
    """Returns the number of each process. All processes have to call it at the same point of the run."""
    reached_sync_point()
    return np.asarray(multihost_utils.process_allgather(np.float32(number))).reshape(-1).tolist()


def broadcast(data: bytes, source: int) -> bytes:
    """Returns the `data` of the process `source`. All processes have to call it at the same point of the run."""
    mine = len(data) if jax.process_index() == source else 0
    size, shared = agree(mine // CHUNK) * CHUNK + agree(mine % CHUNK), []
    for start in range(0, size, CHUNK):
        length = min(CHUNK, size - start)
        part = np.zeros(1 << (length - 1).bit_length(), np.uint8)  # few sizes, since each size compiles a program
        if mine:
            part[:length] = np.frombuffer(data, np.uint8, length, start)
        shared.append(np.asarray(multihost_utils.broadcast_one_to_all(part, jax.process_index() == source))[:length])
    return b"".join(part.tobytes() for part in shared)


def reached_sync_point() -> None:
    """Records that this process reached the next sync point; `watching` reports processes that fall behind."""
    global _passed
    _passed += 1


@contextlib.contextmanager
def watching(every: float = 5) -> Iterator[None]:
    """Watches the other processes of the run: ends this one if another calls `end`, and names one that holds up others.

    JAX notices processes that die or are suspended, but not a live process that hangs, such as in a function of the
    user's: the others would wait for it for ever in their next computation. So each process publishes the number of
    sync points that it has passed, every `every` seconds. When a process has waited `PATIENCE` seconds for one that has
    passed fewer, it prints a warning to stderr. The late process may be at work, reading data or computing rewards;
    after `LIMIT` seconds the run ends. A process that hangs within a common computation has passed as many points as
    the others, and is not noticed.
    """
    client, done = multihost.get_jax_distributed_client() if jax.process_count() > 1 else None, threading.Event()
    thread = threading.Thread(target=_watch, args=(client, every, done), daemon=True)
    if client:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if client:
            thread.join()


def _watch(client: Any, every: float, done: threading.Event) -> None:
    me, here, since, told = jax.process_index(), -1, time.monotonic(), False
    while not done.wait(every):
        if here != _passed:
            here, since, told = _passed, time.monotonic(), False
        try:
            client.key_value_set(f"passed/{me}", str(here), allow_overwrite=True)
            passed = {int(key.rpartition("/")[2]): int(count) for key, count in client.key_value_dir_get("passed/")}
            ended = client.key_value_dir_get("ended/")
        except jax.errors.JaxRuntimeError:  # another process has died, which JAX reports
            return
        if ended:
            end("Another process of this run has failed, and says why.")
        late = sorted(process for process, count in passed.items() if count < here)
        waited = time.monotonic() - since
        if late and waited > LIMIT:
            end(f"Process {late[0]} has not come to where the others are for {waited:.0f} s, so the run ends.")
        if late and waited > PATIENCE and not told and me == min(passed.keys() - late):
            told = True
            print(
                f"Process {me} has waited {waited:.0f} s for process {late[0]}, which lives and has not come this far. "
                f"If it is not at work, end it: the run goes on from its last checkpoint. It ends after {LIMIT:,} s.",
                file=sys.stderr, flush=True,
            )  # fmt: skip


def all_or_raise(action: Callable[[], T]) -> T:
    """Returns `action()`; if it raises in one process, raises in all.

    Raises:
        OSError: the action's own OSError; any other error of the action, with its message; or the action has failed in
            another process.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    if agree(failure is not None):
        if isinstance(failure, OSError):
            raise failure
        raise OSError(failure or "Another process of this run has failed, and says why.") from failure
    return result  # pyright: ignore[reportReturnType]


def end(reason: str) -> NoReturn:
    """Ends this process with a message; if the run has several processes, at once, since the others may never end."""
    reason = public(reason)
    if not jax.distributed.is_initialized():
        raise SystemExit(reason)
    print(f"Process {jax.process_index()}: {reason}", file=sys.stderr, flush=True)
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # process 0, or the client, may be gone
        client: Any = multihost.get_jax_distributed_client()
        client.key_value_set(f"ended/{jax.process_index()}", reason, allow_overwrite=True)
    if jax.process_index() == 0:
        time.sleep(2)  # without process 0 JAX aborts the others, which should first read the reason
    os._exit(1)
