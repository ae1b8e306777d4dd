"""Tells which device a computation is for: the one it will run on, or the one it is only compiled for."""

from typing import NamedTuple

import jax


class Device(NamedTuple):
    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as the vendor names it: "NVIDIA H200", "TPU v6 lite"


def device() -> Device:
    """Returns the kind of device of the mesh in scope (`jax.set_mesh`); without one, of JAX's default device.

    The devices of a topology (`jax.experimental.topologies`) need not be at hand: programs traced under a mesh of them
    are only compiled for them.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(_platform(abstract.platform), abstract.device_kind)
    default = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return Device(_platform(default.platform), default.device_kind)


def elsewhere(platform: str) -> str | None:
    """Returns why a kernel for "gpu" or "tpu" can't serve on this device, or None. CPUs interpret it, slowly."""
    here = device()
    return None if here.platform in (platform, "cpu") else f"it is for a {platform.upper()}, and this is a {here.kind}"


def _platform(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name
