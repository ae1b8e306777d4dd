"""Helpers for the Mosaic GPU kernels: where they can run, how they are launched, and how shared memory is filled.

Every thread block has three warpgroups, of 128 threads each. Two multiply; the third only copies.
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

from kernels.backends.device import device


ROWS = 64  # rows of the left operand of a warpgroup's product
COPIER = 2  # the warpgroup after the two that multiply
HOPPER = (9, 0)  # its compute capability


def refusal(dtype: DTypeLike) -> str | None:
    """Returns why no kernel can multiply this dtype on this device with this JAX, or None."""
    here = device()
    if here.platform == "cpu":
        return "it cannot be interpreted: JAX's interpreter takes no product whose left side is in registers"
    if here.capability != HOPPER:
        return f"it is for NVIDIA's Hopper GPUs, and this is a {here.kind}"
    if jax.__version_info__ < (0, 11, 2):
        return f"it needs jax 0.11.2 or newer, and this is {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {jnp.dtype(dtype)}"
    return None


class Ring(NamedTuple):
    """A ring buffer in shared memory: the copier fills it, both other warpgroups read it. Step n uses slot n % slots.

    Each slot has two barriers. `ready` completes when the copies into it have arrived, one arrival for each buffer.
    `free` completes when both readers have arrived, each once per step, after its last use of the slot. The copier
    waits for `free` before it fills a slot again, so from the second round on. No warpgroup skips a step. So step n
    waits for the n // slots-th completion, and no warpgroup can get a whole round ahead of another.
    """

    buffers: tuple[Any, ...]
    ready: Any
    free: Any

    @classmethod
    def of(cls, slots: int, *blocks: tuple[tuple[int, ...], DTypeLike]) -> "Ring":
        """Returns the buffers and barriers to allocate for blocks of these shapes and dtypes."""
        return cls(
            tuple(plgpu.SMEM((slots, *shape), dtype) for shape, dtype in blocks),
            plgpu.Barrier(num_arrivals=len(blocks), num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        )

    def fill(self, n: Int[Array, ""], *sources: Any) -> None:
        """Starts the copies of step n's blocks, after waiting for their slot to be free."""
        slot = self._slot(n)
        pl.when(n >= self.buffers[0].shape[0])(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.ready.at[slot])

    def take(self, n: Int[Array, ""]) -> list[Any]:
        """Waits for step n's blocks, and returns them."""
        slot = self._slot(n)
        plgpu.barrier_wait(self.ready.at[slot])
        return [buffer.at[slot] for buffer in self.buffers]

    def release(self, n: Int[Array, ""]) -> None:
        """Ends this reader's use of step n's blocks. Does nothing for n below 0."""
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

    The grid's first axis runs fastest. exp2 is the GPU's own instruction, exact to 22 bits. jax 0.11 takes no estimate
    of the cost, which only tells XLA's scheduler how long a kernel takes.
    """
    estimate: dict[str, Any] = {"cost_estimate": cost} if jax.__version_info__ >= (0, 12) else {}
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
        **estimate,
    )(*operands)


def copying(function: Callable[[], None]) -> None:
    """Runs the function in the copier, which keeps few registers and leaves the others to those that multiply."""
    _warpgroup(lax.axis_index("warpgroup") == COPIER, 24, "decrease", function)


def multiplying(function: Callable[[], None], only: int | None = None) -> None:
    """Runs the function in both warpgroups that multiply, or in only one of them."""
    me = lax.axis_index("warpgroup")
    _warpgroup(me != COPIER if only is None else me == only, 240, "increase", function)


def _warpgroup(condition: Array, registers: int, action: Any, function: Callable[[], None]) -> None:
    @pl.when(condition)
    def _() -> None:
        plgpu.set_max_registers(registers, action=action)
        function()
