"""What the Mosaic GPU kernels share: where they can run, how they are launched, and how blocks come to shared memory.

Every block of threads has three warpgroups, of 128 threads each. Two multiply; the third one only copies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from kernels.device import device


ROWS = 64  # of the left side of a warpgroup's product
COPIER = 2  # the warpgroup after the two that multiply
HOPPER = ("H100", "H200", "GH200")


def refusal(dtype: DTypeLike) -> str | None:
    """Why no kernel can run on this device, with this JAX, and multiply this dtype; or None."""
    platform, kind = device()
    if platform == "cpu":
        return "it cannot be interpreted: JAX's interpreter takes no product whose left side is in registers"
    if not any(name in kind for name in HOPPER):
        return f"it is for NVIDIA's Hopper GPUs, and this is a {kind}"
    if jax.__version_info__ < (0, 12):
        return f"it needs jax 0.12 or newer, and this is {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {jnp.dtype(dtype)}"
    return None


class Ring(NamedTuple):
    """Slots in shared memory that the copier fills and both others read: step n uses slot n % slots of each buffer.

    There are two barriers for each slot. `ready` completes when all copies into it have arrived: each buffer's counts
    as one arrival. `free` completes when both readers have arrived, each once for every step, after its last use of the
    slot; the copier waits for it before it fills the slot again, so from the second round on. Nobody skips a step, so
    step n's wait is for the n // slots-th completion, and nobody can be a whole round ahead of it.
    """

    buffers: tuple[Any, ...]
    ready: Any
    free: Any

    @classmethod
    def of(cls, slots: int, *blocks: tuple[tuple[int, ...], DTypeLike]) -> "Ring":
        """What to allocate, for blocks of these shapes and dtypes."""
        return cls(
            tuple(plgpu.SMEM((slots, *shape), dtype) for shape, dtype in blocks),
            plgpu.Barrier(num_arrivals=len(blocks), num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        )

    def fill(self, n: Int[Array, ""], *sources: Any) -> None:
        """Starts the copies of step n's blocks, once there is room."""
        slot = self._slot(n)
        pl.when(n >= self.buffers[0].shape[0])(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.ready.at[slot])

    def take(self, n: Int[Array, ""]) -> list[Any]:
        """Step n's blocks, once they are there."""
        slot = self._slot(n)
        plgpu.barrier_wait(self.ready.at[slot])
        return [buffer.at[slot] for buffer in self.buffers]

    def release(self, n: Int[Array, ""]) -> None:
        """Ends this reader's use of step n's blocks. There is no step before 0."""
        plgpu.barrier_arrive(self.free.at[self._slot(n)], predicate=n >= 0)

    def _slot(self, n: Int[Array, ""]) -> Int[Array, ""]:
        return lax.rem(n, jnp.int32(self.buffers[0].shape[0]))


def launch(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: dict[str, int],
    results: Any,
    scratch: dict[str, Any],
    cost: pl.CostEstimate,
) -> Any:
    """Runs `kernel(*operands, *results, **scratch)`, which gets Refs, in three warpgroups for each index of the grid.

    The grid's first axis runs fastest. Powers of two are computed by the GPU's own instruction, to 22 bits.
    """
    return plgpu.kernel(
        kernel,
        out_type=results,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        cost_estimate=cost,
    )(*operands)


def copying(function: Callable[[], None]) -> None:
    """Runs the function in the copier, which needs few registers and leaves the others to those that multiply."""
    _warpgroup(lax.axis_index("warpgroup") == COPIER, 24, "decrease", function)


def multiplying(function: Callable[[], None], only: int | None = None) -> None:
    """Runs the function in both warpgroups that multiply, or in one of them."""
    me = lax.axis_index("warpgroup")
    _warpgroup(me != COPIER if only is None else me == only, 240, "increase", function)


def _warpgroup(condition: Array, registers: int, action: Any, function: Callable[[], None]) -> None:
    @pl.when(condition)
    def _() -> None:
        plgpu.set_max_registers(registers, action=action)
        function()
