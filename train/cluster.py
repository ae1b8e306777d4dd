"""One run in several processes, on one machine or many: how they find each other, agree, and end together.

JAX runs the same program in every process, and each holds the parts of the arrays that lie on its own devices. What
happens only once (printing, writing files, deciding) is done by process 0.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax
import numpy as np
import rich
from jax.experimental import multihost_utils


T = TypeVar("T")
TIMEOUT = 20  # seconds without a sign of life after which a process is taken for dead


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
    return int(multihost_utils.process_allgather(np.int32(value)).max())


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
    if jax.process_index() == 0:
        time.sleep(2)  # without it JAX aborts the others, which may be about to say the same
    os._exit(1)
