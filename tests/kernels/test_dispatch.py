"""The implementation that serves a call: chosen by rank, preferred, or named; and the report of `explain`."""

import functools
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import AbstractDevice, AbstractMesh

import kernels
from kernels import Tokens, dispatch
from kernels.attention import cudnn
from kernels.backends import blocks
from kernels.backends.device import Device, elsewhere
from tests.kernels.oracle import SCALE


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


QKV = [shape(2, 300, 4, 16), shape(2, 300, 2, 16), shape(2, 300, 2, 16)]


# By operation: the implementations tried on a CPU, on a GPU and on a TPU, in order, and those that serve only by name.
ASKED = {
    "attention": ("xla reference", "cudnn triton xla reference", "tpu xla reference", "mosaic"),
    "cache_write": ("reference", "triton reference", "tpu reference", ""),
    "coded_matmul": ("reference", "triton reference", "tpu reference", ""),
    "cross_entropy": ("xla reference", "xla reference", "xla reference", ""),
    "decode_attention": ("xla reference", "triton xla reference", "tpu_heads tpu xla reference", ""),
    "delta_rule": (
        "xla reference",
        "triton_channels triton_fused triton xla reference",
        "tpu xla reference",
        "",
    ),
    "delta_step": ("reference", "triton reference", "tpu reference", ""),
    "gated_products": ("reference", "triton reference", "reference", ""),
    "head_products": ("reference", "triton reference", "reference", ""),
    "products": ("reference", "triton reference", "reference", ""),
    "quantized_matmul": ("xla reference", "triton xla reference", "tpu xla reference", ""),
    "ragged_dot": ("xla reference", "triton xla reference", "tpu xla reference", "mosaic"),
    "rms_norms": ("reference", "triton reference", "reference", ""),
    "sort_rows": ("reference", "triton reference", "reference", ""),
    "top_k": ("reference", "triton reference", "reference", ""),
}


def test_what_the_files_say_of_platforms_and_ranks():
    assert dispatch.operations() == tuple(ASKED)
    for operation, (*by_platform, by_name) in ASKED.items():
        asked = [names.split() for names in by_platform]
        assert [dispatch.preference(operation, platform) for platform in ("cpu", "gpu", "tpu")] == asked
        known = dispatch.implementations(operation)
        assert set(known) == set(sum(asked, by_name.split()))
        plain = {"reference", "xla"} & set(known)
        assert {name for name, said in known.items() if said.on_meshes and not said.splits_itself} == plain
        for platform in ("cpu", "gpu", "tpu"):
            ranks = [said.rank for said in known.values() if platform in said.platforms]
            assert len(ranks) == len(set(ranks)), "which of two is asked first must not depend on their names"


def test_every_implementation_has_its_function_and_its_refusal():
    for operation in dispatch.operations():
        for name, said in dispatch.implementations(operation).items():
            module = dispatch.first(operation, (name,))
            assert callable(getattr(module, operation)) and (name == "reference" or callable(module.refusal))
            mesh = (operation, name) == ("quantized_matmul", "triton") and module.MESH
            imported = (module.PLATFORMS, module.RANK, mesh)
            assert said == imported, "what is read from the file is what it says when imported"


def test_implementations_are_not_imported_before_they_are_asked():
    code = "import sys, kernels; kernels.prefer('xla'); print(*[name for name in sys.modules if 'pallas' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_explain_names_the_choice_and_why_not_the_others():
    (choice,) = kernels.explain(kernels.attention, *QKV, scale=SCALE)
    assert choice[:2] == ("attention", "xla")
    assert choice.others["reference"] is None
    assert choice.others["cudnn"] == "it is for NVIDIA GPUs, and this is a cpu"
    assert str(choice).startswith("attention is served by xla; ") and "; tpu: could, on a TPU; " in str(choice)
    (choice,) = kernels.explain(kernels.attention, *QKV, scale=SCALE, implementation="reference")
    assert choice.implementation == "reference"


def test_explain_sees_every_call_even_of_what_is_compiled_already():
    @jax.jit
    def layers(q, k, v):
        x = kernels.attention(q, k, v, scale=SCALE)
        of_cache = lambda x: kernels.Stacked(x[None], jnp.array(0))
        return kernels.attention(x[:, :1], of_cache(k), of_cache(v), scale=SCALE)

    layers.lower(*QKV)
    for _ in range(2):
        choices = kernels.explain(layers, *QKV)
        assert [choice.operation for choice in choices] == ["attention", "decode_attention"]
    # Without a cache, a single query is not a decode step: it has derivatives by every implementation.
    (alone,) = kernels.explain(kernels.attention, shape(2, 1, 4, 16), *QKV[1:], scale=SCALE)
    assert alone.operation == "attention"


def test_prefer_reaches_what_is_compiled_already_and_ends():
    @jax.jit
    def loss(q, k, v):
        return kernels.attention(q, k, v, scale=SCALE).sum()

    who = lambda: kernels.explain(loss, *QKV)[0].implementation
    assert who() == "xla"
    with kernels.prefer("reference"):
        assert who() == "reference"
    with kernels.prefer("cudnn", "reference"):
        assert who() == "reference", "cuDNN cannot serve on a CPU"
    assert who() == "xla"
    with pytest.raises(ValueError, match="No operation has an implementation 'cuda'; there are cudnn, "):
        kernels.prefer("cuda")


def test_what_cannot_serve_says_why_and_who_can():
    q, k, v = (jnp.zeros(x.shape) for x in QKV)
    with pytest.raises(
        ValueError, match=r"'cudnn'\): it is for NVIDIA GPUs, and this is a cpu.*reference: can; xla: can"
    ):
        kernels.attention(q, k, v, scale=SCALE, implementation="cudnn")


def test_under_a_mesh_of_several_devices():
    """Our code splits attention, so any implementation serves. Other operations go to XLA, which splits them."""
    x, w, sizes = jnp.zeros((128, 64)), jnp.zeros((2, 64, 64)), jnp.array([64, 64])
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), kernels.prefer("triton"):
        (attention,) = kernels.explain(kernels.attention, *QKV, scale=SCALE)
        (ragged_dot,) = kernels.explain(kernels.ragged_dot, x, w, sizes)
    assert attention.implementation == "triton" and ragged_dot.implementation == "xla"
    assert "split over a mesh of {'fsdp': 8}" in ragged_dot.others["triton"]


def on(kind):
    """Makes programs compile as for a GPU of this kind."""
    device = AbstractDevice(kind, None, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))


@pytest.mark.parametrize(
    "kind, capability, shared",
    [
        *((f"NVIDIA {name}", (9, 0), 227) for name in ("H200", "H100 80GB HBM3", "H100 PCIe", "H20-3e", "GH200 480GB")),
        ("NVIDIA H800", (9, 0), 227),
        ("NVIDIA GB200", (10, 0), 227),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 163),
        ("NVIDIA A800-SXM4-80GB", (8, 0), 163),
        ("NVIDIA A10G", (8, 6), 99),
        ("NVIDIA RTX A6000", (8, 6), 99),
        ("NVIDIA L40S", (8, 9), 99),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 99),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 99),
        ("NVIDIA GeForce RTX 5090", (12, 0), 99),
        ("Tesla T4", (7, 5), 99),
        ("NVIDIA Z9000", (8, 6), 99),  # an unknown name
    ],
)
def test_gpus_that_are_not_at_hand_are_known_by_name(kind, capability, shared):
    assert Device("gpu", kind).capability == capability and Device("gpu", kind).shared == shared


def test_gpus_at_hand_say_what_they_can(monkeypatch):
    here = [types.SimpleNamespace(device_kind="NVIDIA Z9000", compute_capability="10.3")]
    monkeypatch.setattr(jax, "devices", lambda: here)
    assert blocks.chips(Device("gpu", "NVIDIA Z9000")) == ["NVIDIA Z9000", "sm_103", "227 KB", "gpu"]
    here[0] = types.SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942")
    assert blocks.chips(Device("gpu", "AMD Instinct MI300X")) == ["AMD Instinct MI300X", "gpu"]


def test_sizes_are_found_by_card_by_capability_and_by_shared_memory(monkeypatch):
    row = lambda n: {"2 bytes": {"d64": {"q": n}}}
    rows = {"gpu": {"*": {"*": {"q": 16}}}, "227 KB": row(1), "sm_90": row(2), "NVIDIA H20": row(3), "TPU v5": row(4)}
    monkeypatch.setattr(blocks, "table", lambda _: {"forward": rows})

    def found(kind, dtype=jnp.bfloat16):
        with on(kind):
            return blocks.sizes("kernels.module", "forward", dtype, "d64")["q"]

    assert [found(f"NVIDIA {kind}") for kind in ("A100-SXM4-80GB", "B200", "H100 NVL", "H20")] == [16, 1, 2, 3]
    assert found("NVIDIA H100 NVL", jnp.float16) == 2 and found("NVIDIA H100 NVL", jnp.float32) == 16


# One card for each column of the table in docs/kernels.md.
CARDS = {
    "H100, H200, H800, H20": "NVIDIA H100 80GB HBM3",
    "B200": "NVIDIA B200",
    "A100, A800, A30": "NVIDIA A100-SXM4-40GB",
    "RTX 4090, L4, L40S": "NVIDIA L4",
    "RTX 3090, A10, A6000": "NVIDIA A10",
    "T4": "Tesla T4",
    "AMD": "AMD Instinct MI300X",
}


@pytest.fixture
def untraced(monkeypatch):
    """Replaces Pallas kernels by zeros: only the choice of implementation matters, and tracing them takes long."""
    zeros = lambda shapes: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    monkeypatch.setattr(pallas, "pallas_call", lambda *_, out_shape, **__: lambda *_: zeros(out_shape))


def bf16(*dims):
    return shape(*dims, dtype=jnp.bfloat16)


def attend(q, k, v, positions):
    return kernels.attention(q, k, v, Tokens(positions, positions), scale=SCALE, softcap=50.0)


def decode(q, k, v):
    return kernels.decode_attention(q, k, v, scale=SCALE)


BY_BLOCKS = shape(2, 2)  # the scale of an already quantised matrix
CALLS = {
    "`attention`": (attend, [bf16(2, 300, 4, 256), *[bf16(2, 300, 2, 256)] * 2, shape(2, 300, dtype=jnp.int32)]),
    "`decode_attention`": (decode, [bf16(2, 1, 4, 128), *[bf16(2, 300, 2, 128)] * 2]),
    "`ragged_dot`": (kernels.ragged_dot, [bf16(256, 64), bf16(4, 128, 64), shape(4, dtype=jnp.int32)]),
    "`delta_rule`": (
        functools.partial(kernels.delta_rule, scale=1.0),
        [*[bf16(1, 64, 2, 128)] * 2, bf16(1, 64, 4, 128), *[bf16(1, 64, 4)] * 2],
    ),
    "`delta_rule`, a decay for each channel": (
        functools.partial(kernels.delta_rule, scale=1.0),
        [*[bf16(1, 64, 4, 128)] * 3, shape(1, 64, 4, 128), bf16(1, 64, 4)],
    ),
    "`int8_matmul`, weights only or by blocks": (
        kernels.int8_matmul,
        [bf16(16, 256), shape(256, 256, dtype=jnp.int8), BY_BLOCKS],
    ),
    "`int8_matmul`, both sides by channel": (
        functools.partial(kernels.int8_matmul, activations=True),
        [bf16(16, 256), bf16(256, 256)],
    ),
    "`fp8_matmul`, weights only or by blocks": (
        kernels.fp8_matmul,
        [bf16(16, 256), shape(256, 256, dtype=jnp.float8_e4m3fn), BY_BLOCKS],
    ),
    "`fp8_matmul`, both sides by channel": (
        functools.partial(kernels.fp8_matmul, activations=True, gradients="quantized"),
        [bf16(16, 256), bf16(256, 256)],
    ),
}


@pytest.mark.thorough
def test_the_table_of_cards_in_the_docs(monkeypatch, untraced):
    monkeypatch.setattr(cudnn, "refusal", lambda *_, **__: "left out: it depends on what is installed")
    lines = [f"| | {' | '.join(CARDS)} |", "|---" * (len(CARDS) + 1) + "|"]
    for name, (call, arguments) in CALLS.items():
        served = []
        for kind in CARDS.values():
            with on(kind):
                served.append(kernels.explain(call, *arguments)[0].implementation)
        lines.append(f"| {name} | {' | '.join(served)} |")
    page = pathlib.Path(__file__).parents[2].joinpath("docs/kernels.md").read_text()
    assert "\n".join(lines) in page


def test_why_a_card_is_refused():
    with on("Tesla T4"):
        assert elsewhere("gpu") == "it needs a GPU of compute capability 8.0 or newer, and this Tesla T4 has 7.5"
    call, arguments = CALLS["`fp8_matmul`, weights only or by blocks"]
    with on("NVIDIA A10"):
        (choice,) = kernels.explain(call, *arguments)
    assert choice.others["triton"] == "it needs a GPU of compute capability 8.9 or newer, and this NVIDIA A10 has 8.6"
    with on("NVIDIA GeForce RTX 5090"):
        (choice,) = kernels.explain(CALLS["`delta_rule`"][0], *CALLS["`delta_rule`"][1])
    assert choice.others["triton_fused"] == "it needs 227 KB of shared memory, and this NVIDIA GeForce RTX 5090 has 99"
    with on("AMD Instinct MI300X"):
        assert elsewhere("gpu") == "it is for NVIDIA GPUs, and this is a AMD Instinct MI300X"
        assert elsewhere("tpu") == "it is for a TPU, and this is a AMD Instinct MI300X"


def test_arrays_that_triton_would_address_by_too_few_bits():
    scales = lambda w: shape(*(-(-n // 128) for n in w.shape))
    int8 = lambda *dims: shape(*dims, dtype=jnp.int8)
    few, many, wide, long = bf16(16, 4096), bf16(600_000, 4096), int8(600_000, 4096), int8(4096, 4096)
    for x, w, activations, name in [(few, wide, False, "w"), (many, long, True, "x"), (many, long, False, None)]:
        multiply = lambda *given, activations=activations: kernels.int8_matmul(*given, activations=activations)
        (choice,) = kernels.explain(multiply, x, w, scales(w))
        assert choice.others["triton"] == (
            name and f"Pallas-Triton would address {name}, of 2 to 4 GB in 8 bits, by too few bits"
        )


@pytest.mark.thorough
def test_without_pallas_triton(monkeypatch):
    """Without JAX's deprecated Pallas Triton, its calls are served by others, and `explain` gives the reason."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr(pallas, "triton", raising=False)
    for folder in ("backends", *dispatch.operations()):
        for name in ("triton", "triton_fused", "triton_channels"):
            monkeypatch.delitem(sys.modules, f"kernels.{folder}.{name}", raising=False)
            monkeypatch.delattr(sys.modules.get(f"kernels.{folder}"), name, raising=False)
    monkeypatch.setattr(cudnn, "refusal", lambda *_, **__: "left out")
    with on("NVIDIA H200"):
        for call, arguments in CALLS.values():
            (choice,) = kernels.explain(call, *arguments)
            assert choice.implementation in ("xla", "reference")
            assert choice.others["triton"].startswith(
                f"jax {jax.__version__} does not have what it is written in (import"
            )
