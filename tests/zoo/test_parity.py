"""Every family equals transformers, on tiny checkpoints that exercise each feature, through the real loader.

The golden logits are transformers' own (make_golden.py), so the table runs without torch; where transformers is
installed the live comparison runs too.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert.tensors
import zoo
from tests.zoo import make_golden, tiny


GOLDEN = tiny.golden()
TOKENS = jnp.asarray(tiny.TOKENS)
CASES = pytest.mark.parametrize("name", tiny.CONFIGS)

forward = eqx.filter_jit(lambda model, tokens: model(tokens))
hidden = eqx.filter_jit(lambda model, tokens, **kwargs: model.unembed(model.hidden(tokens, **kwargs)[0]))
decode = eqx.filter_jit(lambda model, tokens, cache, positions: model.decode(tokens, cache, positions=positions))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny.write(root / name, name) for name in tiny.CONFIGS}


def error(ours, theirs) -> float:
    """The largest difference, as a fraction of the largest logit."""
    return float(np.abs(np.asarray(ours, np.float32) - theirs).max() / np.abs(theirs).max())


@CASES
def test_logits(folders, name):
    assert error(forward(zoo.load(folders[name]), TOKENS), GOLDEN[name]) < 1e-4


@pytest.mark.live
@CASES
def test_live(folders, name):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    live = make_golden.logits(folders[name])
    assert error(GOLDEN[name], live) < 1e-5, "the committed golden logits are not transformers' any more"
    theirs = make_golden.logits(folders[name], "bfloat16")
    ours = forward(zoo.load(folders[name], dtype="bfloat16"), TOKENS)
    assert ours.dtype == jnp.bfloat16
    mean = lambda x: np.abs(np.asarray(x, np.float32) - live).mean()
    assert mean(ours) < 1.2 * mean(theirs)


@CASES
def test_decode_equals_forward(folders, name):
    """Right-padded prompts of different lengths, prefilled at once, then decoded token by token."""
    model = zoo.load(folders[name])
    lengths, cache = jnp.array([5, 23]), model.init_cache(2, 40, jnp.float32)
    indices = jnp.broadcast_to(jnp.arange(23), (2, 23))
    positions = jnp.where(indices < lengths[:, None], indices, -1)
    prompt = jnp.where(positions < 0, 0, TOKENS[:, :23])
    logits, cache = decode(model, prompt, cache, positions)
    assert error(logits[0, :5], GOLDEN[name][0, :5]) < 1e-4
    assert error(logits[1], GOLDEN[name][1, :23]) < 1e-4
    for step in range(17):
        at = (lengths + step)[:, None]
        logits, cache = decode(model, jnp.take_along_axis(TOKENS, at, 1), cache, at)
        assert error(logits[:, 0], np.take_along_axis(GOLDEN[name], np.asarray(at)[..., None], 1)[:, 0]) < 1e-4


@CASES
def test_packed_documents_equal_separate_ones(folders, name):
    model, cut = zoo.load(folders[name]), 17
    row = jnp.concatenate([TOKENS[:1, :cut], TOKENS[1:, : 40 - cut]], axis=1)
    positions = jnp.concatenate([jnp.arange(cut), jnp.arange(40 - cut)])[None]
    segments = jnp.where(jnp.arange(40) < cut, 1, 2)[None]
    packed = hidden(model, row, positions=positions, segments=segments)
    assert error(packed[0, :cut], GOLDEN[name][0, :cut]) < 1e-4
    assert error(packed[0, cut:], GOLDEN[name][1, : 40 - cut]) < 1e-4


@CASES
def test_export_is_bit_equal(folders, name, tmp_path):
    zoo.save(zoo.load(folders[name]), tmp_path)
    before, after = convert.tensors.open_tensors(folders[name]), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        assert before[tensor].view().tobytes() == after[tensor].view().tobytes()
    assert zoo.config(tmp_path) == zoo.config(folders[name])


@pytest.mark.live
@CASES
def test_transformers_loads_the_export(folders, name, tmp_path):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    zoo.save(zoo.load(folders[name]), tmp_path)
    assert error(make_golden.logits(tmp_path), GOLDEN[name]) < 1e-5


def test_remat_changes_nothing(folders):
    model = zoo.load(folders["qwen3-window-tail"])
    value = lambda model, remat: jnp.mean(jnp.square(model.unembed(model.hidden(TOKENS, remat=remat)[0])))
    plain = eqx.filter_jit(eqx.filter_grad(value))(model, None)
    remat = eqx.filter_jit(eqx.filter_grad(value))(model, jax.checkpoint)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_depth_is_free():
    """A deeper model traces to a program of the same size."""

    def equations(layers):
        config = zoo.qwen3.Config(64, 32, 48, layers, 4, 2, 16, 64, layers)
        model = eqx.filter_eval_shape(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)))
        jaxpr = eqx.filter_make_jaxpr(lambda m, t: m(t))(model, jax.ShapeDtypeStruct((2, 8), jnp.int32))[0]
        return len(str(jaxpr).splitlines())

    assert equations(2) == equations(64)
