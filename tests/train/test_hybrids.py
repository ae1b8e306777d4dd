"""Hybrids in preference optimisation, distillation and training in eight bits. GRPO: tests/zoo/test_hybrids.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.train.test_distill import batch, logits  # noqa: F401 (a fixture)
from tests.train.test_dpo import pairs, rows_of  # noqa: F401 (a fixture)
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train import distill, dpo
from zoo.quantized import quantize_training


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder / "model", "nemotron_h-mlp-new", eos_token_id=63)
    tiny.write_tokenizer(folder / "model")
    return folder


@pytest.fixture(scope="module")
def model(base):
    return zoo.load(base / "model", dtype="float32")


@pytest.fixture(scope="module")
def other(model):
    """Returns the reference of preferences, which is also the teacher."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a) * np.float32(0.97)), model)


@pytest.mark.thorough
def test_preferences_packed_or_not(base, pairs, model, other):  # noqa: F811
    """A pair's log-probabilities do not depend on the text before it in its row, for the model and the reference."""
    objective = jax.jit(functools.partial(dpo.objective, options=dpo.DPOOptions.of()))
    packed, spread = (rows_of(base, pairs, 4, "dpo", seq_len=seq_len) for seq_len in (64, 20))
    assert packed["segments"].max() > 4 > spread["segments"].max()
    _, counts, sums, _ = zip(*(objective(model, rows, other) for rows in (packed, spread)), strict=True)
    assert counts[0] == counts[1] == 4 and abs(sums[0]["margin"]) > 1e-3
    for name, value in sums[0].items():
        close({name: value}, {name: sums[1][name]}, terms=MODEL, size=6)  # a tenth of sums of log-probabilities


@pytest.mark.thorough
def test_a_hybrid_teaches_a_hybrid(model, other, batch):  # noqa: F811
    """The objective on packed rows equals the formula."""
    o = distill.DistillOptions.of(model="", teacher=("",), data=("unused",), beta=0.0, temperature=2.0, weight=1.0)

    @jax.jit
    def both(student, teacher, batch):
        log_q, log_p = (jax.nn.log_softmax(logits(m, batch) / 2.0) for m in (student, teacher))
        each = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        expected = 4.0 * jnp.sum(each * batch["loss_mask"].astype(jnp.float32))
        return distill.objective(student, batch, teacher, options=o)[0], expected

    got, expected = both(model, other, batch)
    assert expected > 1e-2
    close(got, expected, terms=MODEL)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_training_in_eight_bits(model, batch, dtype):  # noqa: F811
    """Log-probabilities and loss are nearly those of floats. So are int8's gradients, and every parameter has one.

    With fp8, gradients are rounded, too, and in this random model their direction changes much: their cosine to floats'
    is 0.18.
    """

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(model):
        log_p = jax.nn.log_softmax(logits(model, batch))
        return -jnp.take_along_axis(log_p, batch["targets"][..., None], -1).mean(), log_p

    (want, exact), slopes = loss(model)
    (got, rounded), rounded_slopes = loss(quantize_training(model, dtype))
    assert 0 < np.abs(rounded - exact).mean() < (0.1 if dtype == "int8" else 0.3) * np.abs(exact).mean()
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    a, b = flat(slopes), flat(rounded_slopes)
    assert abs(got - want) < 0.05 * want
    assert a @ b > (0.85 if dtype == "int8" else 0.1) * np.linalg.norm(a) * np.linalg.norm(b)
    assert all(np.any(g) for g in jax.tree.leaves(rounded_slopes))
