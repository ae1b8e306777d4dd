"""One run in several processes, on one machine or many: how they find each other, agree, and end together.

JAX runs the same program in every process, and each holds the parts of the arrays that lie on its own devices. What
happens only once (printing, writing files, deciding) is done by process 0.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
import rich
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost


T = TypeVar("T")
TIMEOUT = 20  # seconds without a sign of life after which a process is taken for dead
PATIENCE, LIMIT = 60, 1800  # seconds of waiting for a process that lives, until it is named, and until the run ends

_passed = 0


def initialize(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the other processes of the run, if there are any. To be called before anything asks for devices.

    Args:
        coordinator: host:port of process 0, where it will listen.
        processes: how many there are.
        process: which of them this one is, from 0.

    What is not given is found by JAX on Cloud TPUs and under Slurm, Kubernetes (Jobs and JobSets) and Open MPI. Without
    any of these, nothing happens: the run has one process. In all processes but the first, rich prints nothing.

    Raises:
        ValueError: if there are other processes, but not enough is known to reach them.
    """
    asked = (coordinator, processes, process) != (None, None, None) or launched()
    if not asked and "tpu" not in (jax.config.jax_platforms or ""):  # which JAX sets on Cloud TPUs
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself, see train.stop
    try:
        jax.distributed.initialize(
            coordinator, processes, process,
            heartbeat_timeout_seconds=TIMEOUT, shutdown_timeout_seconds=TIMEOUT,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        if asked:
            raise ValueError(
                f"This process can't join the others ({error}). Give each of them the same --coordinator host:port and "
                "--processes, and its own --process from 0."
            ) from error
        return
    rich.reconfigure(quiet=jax.process_index() > 0)


def launched() -> bool:
    """Whether the environment says that a launcher has started several processes."""
    several = lambda name: int(os.environ.get(name, 1)) > 1
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return (
        (several("SLURM_NTASKS") and "SLURM_STEP_NODELIST" in os.environ)  # srun's, not those of salloc or sbatch
        or several("OMPI_COMM_WORLD_SIZE")
        or several("MEGASCALE_NUM_SLICES")
        or "," in hosts
        or ("KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ)
    )


def agree(value: int) -> int:
    """The largest of the values with which the processes call this, each at the same point of the run."""
    passing()
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def passing() -> None:
    """Counts a point of the run that all processes pass in the same order, for `watching`."""
    global _passed
    _passed += 1


@contextlib.contextmanager
def watching(every: float = 5) -> Iterator[None]:
    """Meanwhile ends this process if another one of the run `end`s, and names one that the others wait for.

    JAX notices processes that die or are suspended, and none that lives and hangs, such as in a function of the user's:
    the others would wait in their next computation for ever. So each says every few seconds how many points it has
    passed, and where one has waited `PATIENCE` seconds for another that has passed fewer, this is told on stderr. It
    may be at work, reading or judging; after `LIMIT` seconds the run ends. One that hangs within a computation of all
    has passed as many as the others, and is not noticed.
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
        except jax.errors.JaxRuntimeError:  # another process has died, of which JAX tells
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


def together(action: Callable[[], T]) -> T:
    """`action()`, which fails in all processes if it does in one.

    Raises:
        OSError: the action's own; with the words of any other error of it; or saying that another process has failed.
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
    """Ends this process with a sentence; in a run of several at once, since the others may never get to its end."""
    if not jax.distributed.is_initialized():
        raise SystemExit(reason)
    print(f"Process {jax.process_index()}: {reason}", file=sys.stderr, flush=True)
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # where process 0 is lost, or there is none
        client: Any = multihost.get_jax_distributed_client()
        client.key_value_set(f"ended/{jax.process_index()}", reason, allow_overwrite=True)
    if jax.process_index() == 0:
        time.sleep(2)  # without it JAX aborts the others, which may be about to say the same
    os._exit(1)
