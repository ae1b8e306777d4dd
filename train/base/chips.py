"""Published figures of the chips that models train on, and topologies by name, such as "v5p:4x4x4" or "h200:16"."""

import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Chip(NamedTuple):
    """The figures of one device as JAX counts them: a chip, or half of a TPU7x."""

    kind: str  # its `device_kind`; for a TPU, the beginning of it
    flops: float  # dense bfloat16 operations a second; a multiplication and an addition are two
    memory: float  # bytes of HBM
    bandwidth: float  # bytes a second from and to HBM
    link: float  # bytes a second that the device can send to its neighbours: all ICI links of a TPU, NVLink, or PCIe
    network: float = 0.0  # bytes a second that the device can send out of its node of `NODE` GPUs; 0: not published
    cores: int = 0  # a GPU's multiprocessors
    cache: int = 0  # bytes of a GPU's L2 cache
    clock: float = 0.0  # a GPU's, in GHz
    capability: str = ""  # a GPU's CUDA compute capability
    products: float = 0.75  # share of `flops` that large matrix products reach
    streaming: float = 0.85  # share of `bandwidth` that kernels reach if they only read and write


GIB = 2**30
NODE = 8  # largest number of GPUs of a board or a host
# Sources. TPUs: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x, which give the sum of all links, mostly in both
# directions; `link` is one direction. GPUs: the data sheets of A100 SXM (NVLink 600 GB/s in both directions), H100 SXM,
# H200 SXM, HGX B200, L4 (PCIe 4, 64 GB/s in both directions; half of its bfloat16 figure, which is sparse) and T4 (PCIe
# 3, 32 GB/s); for the RTX 4090 the white paper on the Ada architecture (bfloat16 summed in float32). A T4 has no
# bfloat16: XLA computes in float32, whose peak is given. Networks: ConnectX-6 and ConnectX-7; a DGX A100 has a port of
# 200 Gbit/s for each GPU, later ones of 400. The rest is from XLA's xla/backends/gpu/target_config/specs; L4, T4 and
# RTX 4090 are not there, and their memory is what CUDA's deviceQuery prints.
# `products` and `streaming`: for H100 and H200 others have measured some 700 TFLOP/s in large products by cuBLAS, and
# 3.0 and 4.2 TB/s in copies. Nothing was measured here: the shares of the A100, and the defaults of `Chip` for all
# other chips, are assumed.
# A TPU is the first entry whose kind matches, so "TPU v5 lite" comes before "TPU v5".
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 32 * GIB, 1.2e12, 300e9),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * GIB, 0.819e12, 200e9),
    "v5p": Chip("TPU v5", 459e12, 95 * GIB, 2.765e12, 600e9),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * GIB, 1.64e12, 400e9),
    "tpu7x": Chip("TPU7x", 2307e12 / 2, 96 * GIB, 7.38e12 / 2, 600e9 / 2),
    "t4": Chip("Tesla T4", 8.1e12, 15835660288, 0.32e12, 16e9, 0.0, 40, 4194304, 1.59, "7.5"),
    "l4": Chip("NVIDIA L4", 121e12, 23583784960, 0.3e12, 32e9, 0.0, 58, 50331648, 2.04, "8.9"),
    "4090": Chip("NVIDIA GeForce RTX 4090", 165.2e12, 25393692672, 1.008e12, 32e9, 0.0, 128, 75497472, 2.52, "8.9"),
    "a100-40gb": Chip(
        "NVIDIA A100-SXM4-40GB", 312e12, 42331013120, 1.555e12, 300e9, 25e9, 108, 41943040, 1.41, "8.0", 0.83, 0.86
    ),
    "a100": Chip(
        "NVIDIA A100-SXM4-80GB", 312e12, 85100068864, 2.039e12, 300e9, 25e9, 108, 41943040, 1.41, "8.0", 0.83, 0.86
    ),
    "h100": Chip(
        "NVIDIA H100 80GB HBM3", 989e12, 84942979072, 3.35e12, 450e9, 50e9, 132, 52428800, 1.98, "9.0", 0.71, 0.90
    ),
    "h200": Chip("NVIDIA H200", 989e12, 151397597184, 4.8e12, 450e9, 50e9, 132, 52428800, 1.98, "9.0", 0.71, 0.875),
    "b200": Chip("NVIDIA B200", 2250e12, 191514411008, 8.0e12, 900e9, 50e9, 148, 132644864, 1.965, "10.0"),
}
# Google Cloud's name for slices of a TPU -> our name, the cores that Google counts for each chip, and a slice's axes.
CLOUD = {
    "v4": ("v4", 2, 3),
    "v5p": ("v5p", 2, 3),
    "v5litepod": ("v5e", 1, 2),
    "v5e": ("v5e", 1, 2),
    "v6e": ("v6e", 1, 2),
}

# By compute capability, a multiprocessor's bytes of shared memory, threads, and float32 units (CUDA C++ Programming
# Guide, technical specifications). A block can have all of the shared memory but 1 kB (for 7.5 all of it).
LIMITS = {
    "7.5": (65536, 1024, 64),
    "8.0": (167936, 2048, 64),
    "8.9": (102400, 1536, 128),
    "9.0": (233472, 2048, 128),
    "10.0": (233472, 2048, 128),
}

# A stream_executor.GpuTargetConfigProto: the description of a GPU that XLA needs to compile for it.
TARGET = """gpu_device_info {{
  runtime_version: "12.8.0"  # of CUDA: XLA knows no float8 of an unknown one
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {chip.cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {chip.cache}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {chip.memory}
  shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ {version} feature_extension: {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.kind}"
"""

# Without these, libtpu queries the cloud for the machine's type, takes a lock, and writes logs by the gigabyte.
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
    """Returns the chip of a `device_kind`; None if it is not in `CHIPS`."""
    same = lambda chip: device_kind == chip.kind if chip.cores else device_kind.startswith(chip.kind)
    return next((chip for chip in CHIPS.values() if same(chip)), None)


def size_of(text: str) -> tuple[Chip, int]:
    """Returns the chip of a topology, and its number of devices. Needs no compiler.

    `text` is a TPU's name and the shape of the slice in chips, such as "v6e:4x4"; Google Cloud's name of a slice, such
    as "v5litepod-16"; or a GPU's name and the number of GPUs.

    Raises:
        ValueError: there is no such chip, or the chip does not come in that number.
    """
    name, _, shape = slice_of(text).partition(":")
    chip = CHIPS.get(name)
    gpus = ", ".join(f"{name}:8" for name, chip in CHIPS.items() if chip.cores)
    if chip is None or not re.fullmatch(r"\d+" if chip.cores else r"\d+(x\d+)+", shape):
        raise ValueError(
            f"There is no topology {text!r}: write a TPU and the shape of its slice, or a GPU and a number, such as "
            f"v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x2, {gpus}; or a TPU as Google Cloud names it, such "
            "as v6e-8, v5litepod-16 or v5p-128."
        )
    count = math.prod(map(int, shape.split("x"))) * (2 if name == "tpu7x" else 1)
    if chip.cores and count > NODE and count % NODE:
        raise ValueError(f"The topology {text!r} is no whole number of nodes of {NODE} GPUs.")
    if chip.cores and count > NODE and not chip.network:
        raise ValueError(f"No network between hosts is published for {name}: {text!r} can have {NODE} at most.")
    return chip, count


def fleet(text: str) -> tuple[Chip, list[Any]]:
    """Returns the chip of a topology, and devices to compile for, which need not be attached to this machine.

    Raises:
        ValueError: as in `size_of`; or the chip does not come in that shape.
        ImportError: the compiler for the chip is not installed.
    """
    (chip, count), (name, _, shape) = size_of(text), slice_of(text).partition(":")
    package, extra = ("jax_cuda13_plugin", "compile") if chip.cores else ("libtpu", "tpu")
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"To compile for {text}, install {package}: pip install -e '.[{extra}]'.")
    if chip.cores:
        nodes = f"1x{max(1, count // NODE)}x{min(count, NODE)}"
        found = topologies.get_topology_desc(platform="cuda", target_config=target(chip), topology=nodes)
        return chip, list(found.devices)
    os.environ.update(QUIET)
    # Real v4 chips have both cores in one device; a topology needs this option for it.
    options = {"chip_config_name": "megacore"} if name == "v4" else {}
    try:
        found = topologies.get_topology_desc(f"{name}:{shape}", platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu knows no slice {text!r}: {str(error).splitlines()[0]}") from error
    return chip, list(found.devices)


def slice_of(text: str) -> str:
    """Translates Google Cloud's name of a slice, "v5litepod-16", to "v5e:4x4", and returns any other text as it is.

    Slices are as near to squares or cubes as powers of two allow. Sizes that are no power of two, such as v5p-1536,
    come in several shapes, and are returned as they are.
    """
    name, _, count = text.partition("-")
    if name not in CLOUD or not count.isdecimal():
        return text
    ours, counted, axes = CLOUD[name]
    chips = int(count) // counted
    if chips * counted != int(count) or chips.bit_count() != 1:
        return text
    sizes = [2 ** ((chips.bit_length() - 1 + i) // axes) for i in range(axes)]
    return f"{ours}:{'x'.join(map(str, sizes if sizes[0] > 1 else reversed(sizes)))}"


def target(chip: Chip) -> str:
    """Returns the description of a GPU for XLA."""
    shared, threads, units = LIMITS[chip.capability]
    major, minor = chip.capability.split(".")
    version = f"major: {major}" + (f" minor: {minor}" if minor != "0" else "")
    features = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
    block = shared if chip.capability == "7.5" else shared - 1024
    return TARGET.format(
        chip=chip, version=version, features=features, shared=shared, block=block, threads=threads, units=units
    )


def slowest_link(chip: Chip, group: Iterable[Any]) -> float:
    """Returns the bytes a second that each device of a group can send to the others."""
    hosts = {device.process_index for device in group}
    return chip.network if chip.network and len(hosts) > 1 else chip.link


def ring_rate(chip: Chip, group: Iterable[Any]) -> float:
    """Returns the bytes a second that each device of a group can send around rings, as gathers and reductions do.

    A ring goes through all devices of a node before it leaves it. NCCL lays as many rings side by side as a node has
    network ports (graph/search.cc and graph/connect.cc there), so that each leaves the node by another one, and
    devices of a node share the ports of all of them.
    """
    group = list(group)
    devices_of_a_node = min(Counter(device.process_index for device in group).values())
    return min(chip.link, slowest_link(chip, group) * devices_of_a_node)
