"""--remat by policies and by names: what a layer keeps for the backward pass, and that gradients stay as they are."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, noise
from train.planning import fit
from train.state.remat import NAMES, REMAT, remat_of
from zoo.config import read
from zoo.registry import FAMILIES


SEQ = 192  # more than the kernels of short rows take


def model_of(family, name):
    config = read(FAMILIES[family], tiny.CONFIGS[name])
    return noise(lambda: FAMILIES[family].Model(config, key=jax.random.key(0)), 0.05)


@pytest.fixture(scope="module")
def hybrid():
    return model_of("qwen3_next", "qwen3_next")


def kept(model, n, text, capsys):
    """Returns what layer n keeps beside its input and weights, as JAX describes it."""
    layer, x = model.layers[n], jnp.ones((1, SEQ, model.config.hidden_size))
    capsys.readouterr()
    print_saved_residuals(remat_of(text)(lambda x: layer(x, None, Tokens())[0].sum()), x)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "from the argument" not in line and "from a constant" not in line]


@pytest.mark.parametrize("text", ["attention_qkv=keep", "router=keep,experts=keep"])
def test_a_layer_keeps_what_is_named(hybrid, capsys, text):
    """The last layer of the hybrid has attention and experts."""
    found = {name for line in kept(hybrid, -1, text, capsys) for name in re.findall(r"named '(\w+)'", line)}
    assert found == set(re.findall(r"(\w+)=keep", text))


@pytest.mark.parametrize(
    ("n", "text", "arrays"),
    [
        (-1, "full", 0),
        (-1, "attention_out=keep", 2),  # and the log-sum-exp
        (-1, "mlp_up=keep", 2),  # of the experts, and of the shared one
        (-1, "mlp_gate=keep,mlp_up=keep", 4),
        (0, "delta_out=keep", 1),
        (0, "delta_out=keep,delta_states=keep", 2),
    ],
)
def test_a_layer_keeps_no_more(hybrid, capsys, n, text, arrays):
    """JAX describes an array that is kept for a function within the layer by that function, not by the array's name."""
    assert len(kept(hybrid, n, text, capsys)) == arrays


@pytest.mark.thorough
def test_recurrences_run_once_if_their_results_are_kept(hybrid):
    """With dots, or with both names, the forward scan over chunks runs once; otherwise again in the backward pass."""
    layer, x = hybrid.layers[0], jnp.ones((1, SEQ, hybrid.config.hidden_size))

    def scans(text):
        gradient = jax.grad(remat_of(text)(lambda x: layer(x, None, Tokens())[0].sum()))
        return str(jax.make_jaxpr(gradient)(x)).count(" scan[")

    often = scans("full")
    assert scans("dots") == scans("delta_out=keep,delta_states=keep") == often - 1 and scans("delta_out=keep") == often


@pytest.mark.thorough
def test_gradients_do_not_depend_on_what_is_kept(hybrid):
    layer, x = hybrid.layers[-1], jnp.sin(jnp.arange(SEQ * 32.0)).reshape(1, SEQ, 32)

    def gradient(text):
        run = lambda layer, x: layer(x, None, Tokens())[0]
        wrapped = remat_of(text)(run) if remat_of(text) else run
        return jax.jit(jax.grad(lambda layer, x: jnp.mean(wrapped(layer, x) ** 2), (0, 1)))(layer, x)

    named = gradient("attention_out=keep,experts=keep,mlp_gate=keep,mlp_up=offload")
    close(gradient("none"), named, terms=2 * MODEL)


def test_what_is_no_policy_and_no_name():
    assert all(remat_of(name) is REMAT[name] for name in REMAT)
    for text in ("some", "mlp=keep", "mlp_up", "mlp_up=drop", "auto"):
        with pytest.raises(ValueError, match=f"--remat {text}: write none, dots, .* or keep or offload for each name"):
            remat_of(text)


@pytest.mark.thorough
def test_bytes_by_name():
    """Qwen3-8B has 12,288 numbers of either half of an MLP in each of 36 layers; a mixture has those of experts."""
    found = fit.bytes_by_name(zoo.config("qwen3-8b"))
    heads, layers = 128 * (32 + 2 * 8), 36
    assert found["mlp_gate"] == found["mlp_up"] == 2 * layers * 12288 and found["attention_qkv"] == 2 * layers * heads
    assert found["attention_out"] == layers * 32 * (2 * 128 * 2 + 4)  # in two numbers of bfloat16, and a float32
    assert set(found) <= set(NAMES) and "experts" not in found
    mixture = fit.bytes_by_name(zoo.config("qwen3-30b-a3b"))
    assert "attention_qkv" in fit.bytes_by_name(read(FAMILIES["gpt2"], tiny.CONFIGS["gpt3"]))  # of 40 positions
    assert mixture["experts"] == 2 * 48 * 8 * (2 * 768 + 2048) and mixture["router"] == 2 * 48 * 128
