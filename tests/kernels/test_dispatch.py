"""Who serves a call: chosen by the tables, preferred, asked for; and what `explain` says of it."""

import jax
import jax.numpy as jnp
import pytest

import kernels
from kernels import dispatch
from tests.kernels.oracle import SCALE


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


QKV = [shape(2, 300, 4, 16), shape(2, 300, 2, 16), shape(2, 300, 2, 16)]


def test_every_implementation_has_its_function_and_its_refusal():
    for operation, modules in dispatch.MODULES.items():
        assert set(dispatch.PREFERENCES[operation]) == {"cpu", "gpu", "tpu"}
        for preference in dispatch.PREFERENCES[operation].values():
            assert preference[-1] == "reference" and set(preference) <= set(modules)
        for name in modules:
            module = dispatch._module(operation, name)
            assert callable(getattr(module, operation)) and (name == "reference" or callable(module.refusal))


def test_explain_names_the_choice_and_why_not_the_others():
    (choice,) = kernels.explain(kernels.attention, *QKV, scale=SCALE)
    assert choice[:2] == ("attention", "xla")
    assert choice.others["reference"] is None
    assert choice.others["cudnn"] == "it is for NVIDIA GPUs, and this is a cpu"
    (choice,) = kernels.explain(kernels.attention, *QKV, scale=SCALE, implementation="reference")
    assert choice.implementation == "reference"


def test_explain_sees_every_call_even_of_what_is_compiled_already():
    @jax.jit
    def layers(q, k, v):
        x = kernels.attention(q, k, v, scale=SCALE)
        return kernels.attention(x[:, :1], k, v, scale=SCALE)

    layers.lower(*QKV)
    for _ in range(2):
        choices = kernels.explain(layers, *QKV)
        assert [choice.operation for choice in choices] == ["attention", "decode_attention"]


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
    """Attention is split here, and so any implementation serves. What is not goes to XLA, which splits it itself."""
    x, w, sizes = jnp.zeros((128, 64)), jnp.zeros((2, 64, 64)), jnp.array([64, 64])
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), kernels.prefer("triton"):
        (attention,) = kernels.explain(kernels.attention, *QKV, scale=SCALE)
        (ragged_dot,) = kernels.explain(kernels.ragged_dot, x, w, sizes)
    assert attention.implementation == "triton" and ragged_dot.implementation == "xla"
    assert "split over a mesh of {'fsdp': 8}" in ragged_dot.others["triton"]
