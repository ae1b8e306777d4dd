"""Every family equals transformers, on tiny checkpoints that exercise each feature, through the real loader.

The golden logits are transformers' own (make_golden.py), so the table runs without torch; where transformers is
installed the live comparison runs too.
"""

import inspect
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert.tensors
import zoo
from tests.close import close
from tests.zoo import make_golden, tiny
from tests.zoo.programs import (
    MECHANISMS,
    MODEL,
    STACKS,
    TOKENS,
    by_mechanism,
    decode,
    error,
    forward,
    init_cache,
    on_host,
    packed,
    thorough,
)
from train.state.mesh import reads_in_order
from zoo import surgery


GOLDEN = tiny.golden()
CASES = pytest.mark.parametrize("name", tiny.CONFIGS)


@pytest.mark.parametrize("name", by_mechanism(tiny.CONFIGS, ("qwen3-window-head", "deepseek3", "lfm2-new")))
def test_logits(load, name):
    """Logits of two rows are right; and, by the same program, those of two packed documents beside a row with padding.

    In the default tier few run here; each family's STACK is in the next test, or with a cache in test_cache.py.
    """
    golden, model, cut = GOLDEN[name], load(name), 17
    assert error(packed(model)[0], golden) < 1e-4
    row, index = np.concatenate([tiny.TOKENS[0, :cut], tiny.TOKENS[1, : 40 - cut]]), np.arange(40)
    segments = np.stack([np.where(index < cut, 1, 2), np.where(index < 30, 1, 0)])
    logits = packed(model, *jax.device_put((np.stack([row, tiny.TOKENS[1]]), segments)))[0]
    logits = np.asarray(logits)
    if name != "llama-dynamic":  # its frequencies are those of 40 tokens in the golden logits, and of 23 and 30 here
        assert error(logits[0, :cut], golden[0, :cut]) < 1e-4
        assert error(logits[0, cut:], golden[1, : 40 - cut]) < 1e-4
        assert error(logits[1, :30], golden[1, :30]) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name", STACKS)
def test_branches(load, name):
    """Branches that share their beginning have the logits of the whole texts; families with recurrences refuse them."""
    golden, model = GOLDEN[name], load(name)
    rows = [[0, 20, 10, 10], [1, 10, 15, 12]]  # which golden row, and the lengths of its trunk and of two branches
    tokens, segments, branches, positions = np.zeros((4, 2, 40), np.int32)
    for n, (row, *lengths) in enumerate(rows):
        ids = np.concatenate([np.arange(lengths[0]), *(lengths[0] + np.arange(length) for length in lengths[1:])])
        tokens[n, : len(ids)], positions[n, : len(ids)], segments[n, : len(ids)] = tiny.TOKENS[row, ids], ids, 1
        branches[n, : len(ids)] = np.repeat(np.arange(3), lengths)

    @jax.jit
    def logits(*arrays):
        at = dict(zip(("positions", "segments", "branches"), arrays[1:], strict=True))
        return model.unembed(model.hidden(arrays[0], **at)[0])

    if reads_in_order(model):
        with pytest.raises(ValueError, match="in one line: give every branch its trunk"):
            logits(tokens, positions, segments, branches)
        return
    ours = np.asarray(logits(tokens, positions, segments, branches))
    for n, (row, *_) in enumerate(rows):
        real = segments[n] > 0
        assert error(ours[n, real], golden[row, positions[n, real]]) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name", STACKS)
def test_swapped_weights_are_seen(load, name):
    """Ten swaps of weights of one shape, and transpositions of square ones, change the logits."""
    model = load(name)
    leaves, structure = jax.tree.flatten(model)
    places = [n for n, leaf in enumerate(leaves) if leaf.ndim > 1 and leaf.dtype.kind == "f"]
    like = lambda a, b: leaves[a].shape == leaves[b].shape and leaves[a].dtype == leaves[b].dtype
    pairs = [(a, b) for a in places for b in places if a < b and like(a, b)]
    changes = [{a: leaves[b], b: leaves[a]} for a, b in random.Random(0).sample(pairs, min(len(pairs), 10))]
    square = [n for n in places if leaves[n].shape[-1] == leaves[n].shape[-2] > 1]
    changes += [{n: jnp.swapaxes(leaves[n], -1, -2)} for n in square]
    assert len(changes) > 1
    for changed in changes:
        other = jax.tree.unflatten(structure, [changed.get(n, leaf) for n, leaf in enumerate(leaves)])
        paths = [jax.tree_util.tree_leaves_with_path(model)[n][0] for n in changed]
        assert error(packed(other)[0], GOLDEN[name]) > 1e-4, list(map(surgery.path_name, paths))


# Checkpoints of which each layer is another one compile for long; the same families have some with fewer kinds.
LONG = "laguna-elements", "mimo_v2_flash-new", "qwen3_moe-dense-new"
SHORT = "qwen3", "laguna", "mimo_v2_flash", "qwen3_moe"


@pytest.mark.parametrize(
    "name", [*SHORT, *(thorough(name) if name in (*MECHANISMS, *LONG) else name for name in STACKS)]
)
def test_logits_of_tokens_alone(load, name):
    """Calls without positions and segments are right.

    In the default tier these are the families that do not represent a mechanism: test_cache.py has the others'.
    `test_live` tests these calls for every checkpoint.
    """
    assert error(forward(load(name), TOKENS), GOLDEN[name]) < 1e-4


@pytest.mark.live
@CASES
def test_live(folders, theirs, name):
    live = make_golden.logits(theirs(name))
    close(GOLDEN[name], live, terms=MODEL)  # or the golden logits are not transformers' any more
    rounded = make_golden.logits(make_golden.with_rounded_routers(make_golden.load(folders[name], "bfloat16")))
    ours = forward(zoo.load(folders[name], dtype="bfloat16"), TOKENS)
    assert ours.dtype == jnp.bfloat16
    mean = lambda x: np.abs(np.asarray(x, np.float32) - live).mean()
    assert mean(ours) < 1.2 * mean(rounded)


@pytest.mark.parametrize("name", [name if name in STACKS else thorough(name) for name in tiny.CONFIGS])
def test_export_is_bit_equal(folders, load, name, tmp_path):
    zoo.save(on_host(load(name)), tmp_path)
    before, after = convert.tensors.open_tensors(folders[name]), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        assert before[tensor].view().tobytes() == after[tensor].view().tobytes()
    assert zoo.config(tmp_path) == zoo.config(folders[name])


@pytest.mark.live
@CASES
def test_transformers_loads_the_export(load, name, tmp_path):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    zoo.save(load(name), tmp_path)
    close(make_golden.logits(tmp_path), GOLDEN[name], terms=MODEL)


@pytest.mark.thorough
def test_remat_changes_nothing(load):
    model = load("qwen3")
    value = lambda model, remat: jnp.mean(jnp.square(model.unembed(surgery.with_remat(model, remat).hidden(TOKENS)[0])))
    plain = eqx.filter_jit(eqx.filter_grad(value))(model, None)
    remat = eqx.filter_jit(eqx.filter_grad(value))(model, jax.checkpoint)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        close(a, b, terms=2 * MODEL)


def test_depth_is_free():
    """A deeper model is traced to a program of the same size."""

    def equations(layers):
        config = zoo.qwen3.Config(64, 32, 48, layers, 4, 2, 16, 64, layers)
        model = eqx.filter_eval_shape(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)))
        jaxpr = eqx.filter_make_jaxpr(lambda m, t: m(t))(model, jax.ShapeDtypeStruct((2, 8), jnp.int32))[0]
        return len(str(jaxpr).splitlines())

    assert equations(2) == equations(64)


@pytest.mark.live
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_decoding_with_ropes_of_the_sequences_length(load, theirs, name):
    """Decoding token by token across the original context agrees: cached keys keep their angles in both."""
    torch = pytest.importorskip("torch", reason="live parity needs transformers and torch")
    model, reference = load(name), theirs(name)
    cache, past = init_cache(model, 1, 24), None
    # Since 5.24 transformers calls it `cache`.
    named = "cache" if "cache" in inspect.signature(reference.forward).parameters else "past_key_values"
    for start, stop in [(0, 12), *((n, n + 1) for n in range(12, 24))]:
        tokens = tiny.TOKENS[:1, start:stop]
        ours, cache = decode(model, jnp.asarray(tokens), cache, jnp.arange(start, stop)[None])
        with torch.no_grad():
            answer = reference(torch.tensor(tokens), use_cache=True, **{named: past})
        past = getattr(answer, named)
        assert error(ours, answer.logits) < 1e-4
