"""Finds out which device a computation is for: the one it will run on, or the one it is only compiled for."""

import re
from typing import NamedTuple

import jax


# The CUDA compute capability of GPUs by a word of their names (developer.nvidia.com/cuda-gpus), for compiling without
# the GPU. A GPU that is present reports its own.
CAPABILITIES = {
    (7, 0): r"V100\w*",
    (7, 5): r"T4|RTX 20\d\d|Quadro RTX",
    (8, 0): r"A100|A800|A30",
    (8, 6): r"A10G?|A16|A2|A40|RTX A\d+|RTX 30\d\d",
    (8, 9): r"L4|L40S?|L20|RTX 40\d\d|Ada",
    (9, 0): r"G?H100|G?H200|H800|H20",
    (10, 0): r"G?B100|G?B200",
    (10, 3): r"G?B300",
    (12, 0): r"RTX 50\d\d|RTX PRO \d+",
    (12, 1): r"GB10",
}
UNKNOWN = (8, 6)  # assumed for an NVIDIA GPU of another name: programs for it run on all later GPUs, too
# Kilobytes of shared memory that a block may have (CUDA C++ Programming Guide, technical specifications).
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
LEAST_SHARED = 99  # for all others from 8.0 on


class Device(NamedTuple):
    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as the vendor names it: "NVIDIA H200", "TPU v6 lite"

    @property
    def capability(self) -> tuple[int, int] | None:
        """The CUDA compute capability of an NVIDIA GPU, such as (9, 0); None for all else."""
        if self.platform != "gpu":
            return None
        for here in jax.devices():
            if here.device_kind == self.kind:
                version = re.fullmatch(r"(\d+)\.(\d+)", here.compute_capability)  # an AMD GPU's: "gfx942"
                return version and (int(version[1]), int(version[2]))
        named = (known for known, words in CAPABILITIES.items() if re.search(rf"\b({words})\b", self.kind))
        return next(named, None if "AMD" in self.kind else UNKNOWN)

    @property
    def shared(self) -> int:
        """The kilobytes of shared memory that a block of an NVIDIA GPU may have."""
        return SHARED.get(self.capability or UNKNOWN, LEAST_SHARED)


def device() -> Device:
    """Returns the kind of device of the mesh in scope (`jax.set_mesh`); without one, of JAX's default device.

    The devices of a topology (`jax.experimental.topologies`) need not be present: a program traced under a mesh of such
    devices is only compiled for them.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(_platform(abstract.platform), abstract.device_kind)
    default = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return Device(_platform(default.platform), default.device_kind)


def elsewhere(platform: str, capability: tuple[int, int] = (8, 0)) -> str | None:
    """Returns why a kernel for "gpu" or "tpu" can't run on this device, or None. A CPU interprets the kernel, slowly.

    A kernel for "gpu" needs an NVIDIA GPU of this compute capability or newer.
    """
    here = device()
    if here.platform == "cpu" or (here.platform == platform == "tpu"):
        return None
    if here.platform != platform:
        return f"it is for a {platform.upper()}, and this is a {here.kind}"
    if here.capability is None:
        return f"it is for NVIDIA GPUs, and this is a {here.kind}"
    if here.capability < capability:
        name = lambda version: ".".join(map(str, version))
        return (
            f"it needs a GPU of compute capability {name(capability)} or newer, and this {here.kind} has "
            f"{name(here.capability)}"
        )
    return None


def _platform(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name
