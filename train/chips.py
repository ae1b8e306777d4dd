"""What is published of the chips that models train on, and how to name many of them: "v5p:4x4x4", "h200:16"."""

import importlib.util
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Chip(NamedTuple):
    """Of one device as JAX counts them, which is a chip; of TPU7x half of one."""

    kind: str  # how its `device_kind` begins
    flops: float  # dense bfloat16 operations a second, a multiplication and an addition being two
    memory: float  # bytes of HBM
    bandwidth: float  # bytes a second from and to HBM
    link: float  # bytes a second that it can send to its neighbours: all ICI links of a TPU, or NVLink
    network: float = 0.0  # bytes a second that it can send out of its node of `NODE` GPUs
    cores: int = 0  # of a GPU: its multiprocessors,
    cache: int = 0  # the bytes of its L2 cache,
    clock: float = 0.0  # GHz
    capability: int = 0  # and its CUDA compute capability


GIB = 2**30
NODE = 8  # GPUs of an HGX or DGX board, which NVLink connects
# TPUs: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x, where the links' sums are given, mostly there and back;
# `link` is one direction. GPUs: the data sheets of H100 SXM, H200 SXM and HGX B200, and of ConnectX-7, of which a DGX
# has one port of 400 Gbit/s for each GPU; the rest as in XLA's xla/backends/gpu/target_config/specs.
# The first whose kind matches is meant, so "TPU v5 lite" comes before "TPU v5".
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 32 * GIB, 1.2e12, 300e9),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * GIB, 0.819e12, 200e9),
    "v5p": Chip("TPU v5", 459e12, 95 * GIB, 2.765e12, 600e9),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * GIB, 1.64e12, 400e9),
    "tpu7x": Chip("TPU7x", 2307e12 / 2, 96 * GIB, 7.38e12 / 2, 600e9 / 2),
    "h100": Chip("NVIDIA H100 80GB HBM3", 989e12, 84942979072, 3.35e12, 450e9, 50e9, 132, 52428800, 1.98, 9),
    "h200": Chip("NVIDIA H200", 989e12, 151397597184, 4.8e12, 450e9, 50e9, 132, 52428800, 1.98, 9),
    "b200": Chip("NVIDIA B200", 2250e12, 191514411008, 8.0e12, 900e9, 50e9, 148, 132644864, 1.965, 10),
}

# What XLA has to know of a GPU to compile for it: a stream_executor.GpuTargetConfigProto.
TARGET = """gpu_device_info {{
  runtime_version: "12.8.0"  # of CUDA: XLA knows no float8 of an unknown one
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {chip.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {chip.cache}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {chip.memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {chip.capability} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.kind}"
"""

# Without these, libtpu asks the cloud what machine it is on, takes a lock, and writes logs by the gigabyte.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls so; None if it is not known here."""
    return next((chip for chip in CHIPS.values() if device_kind.startswith(chip.kind)), None)


def fleet(text: str) -> tuple[Chip, list[Any]]:
    """The chip of a topology, and its devices, which nobody has to hold: programs can be compiled for them.

    `text` is a TPU's name and the shape of the slice in chips, as "v6e:4x4", or a GPU's and how many there are.

    Raises:
        ValueError: if there is no such chip, or it does not come in that shape.
        ImportError: if the compiler for it is not installed.
    """
    name, _, shape = text.partition(":")
    chip = CHIPS.get(name)
    if chip is None or not re.fullmatch(r"\d+" if chip.cores else r"\d+(x\d+)+", shape):
        raise ValueError(
            f"There is no topology {text!r}: write a TPU and the shape of its slice, or a GPU and a number, such as "
            "v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x2, h100:8, h200:16 or b200:64."
        )
    package = "jax_cuda13_plugin" if chip.cores else "libtpu"
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"To compile for {text}, install {package}: pip install -e '.[compile]'.")
    if chip.cores:
        count = int(shape)
        if count > NODE and count % NODE:
            raise ValueError(f"The topology {text!r} is no whole number of nodes of {NODE} GPUs.")
        nodes = f"1x{max(1, count // NODE)}x{min(count, NODE)}"
        found = topologies.get_topology_desc(platform="cuda", target_config=TARGET.format(chip=chip), topology=nodes)
        return chip, list(found.devices)
    os.environ.update(QUIET)
    # Both cores of a v4 are one device where it is used, but not by default here.
    options = {"chip_config_name": "megacore"} if name == "v4" else {}
    try:
        found = topologies.get_topology_desc(text, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu knows no slice {text!r}: {str(error).splitlines()[0]}") from error
    return chip, list(found.devices)


def slowest_link(chip: Chip, group: Iterable[Any]) -> float:
    """Bytes a second that each of a group of devices can send to the others."""
    hosts = {device.process_index for device in group}
    return chip.network if chip.network and len(hosts) > 1 else chip.link
