"""Caches against a plain dictionary, decoding families against transformers, and local layers' memory by shape."""

from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels import Tokens
from kernels.backends.device import Device
from kernels.stacked import read
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MECHANISMS, MODEL, STACKS, by_mechanism, decode, error, init_cache, thorough
from zoo import registry
from zoo.config import read as read_config
from zoo.mesh import make_mesh
from zoo.nn import rows, scan
from zoo.nn.cache import KV, LatentKV, WindowKV


GOLDEN = tiny.golden()
LENGTH, WINDOW = 16, 4
SLOTS = 3  # of a page
TABLE = np.random.RandomState(0).permutation(13)[:12].reshape(2, 6).astype(np.int32)  # the pages of two rows


def paged(cache):
    """Returns the cache with its vectors in 13 pages, of which each row has half, in any order."""
    cache = cache.paged(lambda window: 13, SLOTS, LENGTH)
    return rows.with_tables(cache, [TABLE])


CACHES = {  # each with the window of its layers
    "KV": (KV.init(2, 2, LENGTH, 1, 1, jnp.float32), LENGTH),
    "WindowKV": (WindowKV.init(2, 2, WINDOW, 1, 1, jnp.float32), WINDOW),
    "WindowKV, wider": (WindowKV.init(2, 2, WINDOW, 1, 1, jnp.float32).widened(2), WINDOW),
    "LatentKV": (LatentKV.init(2, 2, LENGTH, 1, 1, jnp.float32), LENGTH),
}
ON_TPU = mock.patch.object(zoo.nn.cache, "device", lambda: Device("tpu", "TPU v6 lite"))
with ON_TPU:  # of 128 slots
    CACHES["WindowKV, on a TPU"] = WindowKV.init(2, 2, WINDOW, 1, 1, jnp.float32), WINDOW
CACHES |= {f"{name}, paged": (paged(cache), window) for name, (cache, window) in CACHES.items()}
# Positions of two rows, for each call.
CALLS = {
    "token by token": [[[n], [n]] for n in range(10)],
    "right-padded prefill, then decode": [
        [[0, 1, 2, 3, 4, 5, 6], [0, 1, -1, -1, -1, -1, -1]],
        *([[7 + n], [2 + n]] for n in range(6)),
    ],
    "prefill in chunks": [
        [[0, 1, 2], [0, 1, 2]],
        [[3, 4, 5, 6, 7, 8, 9], [3, 4, -1, -1, -1, -1, -1]],
        [[10, 11], [-1, -1]],
        *([[12 + n], [5 + n]] for n in range(4)),
    ],
    "left-padded prefill": [[[0, 1, 2, 3, 4, 5], [-1, -1, -1, 0, 1, 2]], [[6, 7], [3, 4]], [[8], [5]]],
    "a row that has ended": [[[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], [[5], [-1]], [[6], [-1]], [[7], [5]]],
    "the last token again": [[[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]], [[4], [2]], [[4, 5, 6], [2, 3, 4]], [[6], [4]]],
    "chunks from an earlier token on": [[[0, 1, 2], [0, 1, 2]], [[1, 2, 3], [0, 1, 2]], [[2, 3, 4, 5], [2, 3, 4, 5]]],
    "tokens in any order": [[[5, 2, 0, 3, 4, 1], [1, 0, -1, 2, -1, -1]], [[7, 6], [4, 3]], [[8], [5]]],
    "to the last index": [[[*range(12)], [*range(12)]], [[12, 13, 14, 15, -1], [12, 13, -1, -1, -1]]],
    "no positions, then decode": [None, [[3], [3]], [[4], [4]]],
}

WIDTHS = (1, 3, 7, 12)  # calls are padded to these, so that few programs compile; windows are 4


@eqx.filter_jit
def write(cache, k, v, positions):
    """Returns the new cache, its layer's keys and values, and their positions. A latent's value is its rotary key."""
    if isinstance(cache, LatentKV):
        cache, latents, at = cache.update(jnp.concatenate([k, v], axis=-1), Tokens(positions))
        return cache, *jnp.split(read(latents), 2, axis=-1), at
    cache, k, v, at = cache.update(k, v, Tokens(positions))
    return cache, read(k), read(v), at


def update(cache, tokens, positions):
    """Returns the new cache, and its view of the tokens' numbers: keys, values (their negatives), positions."""
    if positions is not None:
        more = next(width for width in WIDTHS if width >= positions.shape[1]) - positions.shape[1]
        tokens = np.pad(tokens, ((0, 0), (0, more)))
        positions = jax.device_put(np.pad(positions, ((0, 0), (0, more)), constant_values=-1))
    vectors = tokens[..., None] if isinstance(cache, LatentKV) else tokens[..., None, None]
    cache, k, v, at = write(cache, *jax.device_put((vectors, -vectors)), positions)
    k, v = (np.asarray(x).reshape(len(tokens), -1) for x in (k, v))
    index = np.broadcast_to(np.arange(k.shape[1]), k.shape)
    return cache, k, v, index if at.positions is None else np.asarray(at.positions)


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("kind", CACHES)
def test_every_query_finds_what_it_may_see(kind, calls):
    """Queries find them in the second of two layers, and the first layer stays empty."""
    empty, window = CACHES[kind]
    cache = eqx.tree_at(lambda c: c.layer, empty, jnp.array(1))
    written, count = ({}, {}), 0
    for positions in CALLS[calls]:
        now = np.array([[0, 1, 2]] * 2 if positions is None else positions)
        tokens = 1.0 + count + np.arange(now.size, dtype=np.float32).reshape(now.shape)
        count += now.size
        cache, k, v, at = update(cache, tokens, None if positions is None else now)
        for row in (0, 1):
            written[row].update({int(p): t for p, t in zip(now[row], tokens[row], strict=True) if p >= 0})
            for query in now[row][now[row] >= 0]:
                sees = (at[row] <= query) & (at[row] > query - window)
                expected = {p: t for p, t in written[row].items() if query - window < p <= query}
                assert np.sum(sees) == len(expected)
                assert dict(zip(at[row][sees].tolist(), k[row][sees], strict=True)) == expected
                assert np.array_equal(v[row][sees], -k[row][sees])
    for before, after in zip(jax.tree.leaves(empty), jax.tree.leaves(cache), strict=True):
        assert before.ndim == 0 or np.array_equal(np.asarray(before)[0], np.asarray(after)[0])


WIDTH = 8  # tokens of a decode call, wider than most windows
# The number of new tokens of two rows in each call; the rest of a call is padding.
COMING = [(8, 5), (8, 0), (1, 8), (7, 1), (1, 1), (0, 8), (8, 8), (7, 8), (0, 1)]
# Checkpoints with the caches of their family's STACK, but other positions in its formulas, or fewer kinds of layers.
OTHERS = [
    "gemma3", "gemma4-untied", "granite4", "granite4-mamba", "kimi_linear-groups-new", "llama-rope3",
    "llama4-alternating", "ministral3", "mixtral-window-new", "nemotron_h-groups", "qwen3-window-tail", "qwen3-yarn",
    "qwen3_5-moe", "smollm3-lists-new",
]  # fmt: skip


def decoded(model, cache, tokens, coming):
    """Returns logits of all tokens, in calls of `WIDTH`; `coming` has each row's number of new tokens by call."""
    index, done, out = np.arange(WIDTH), np.zeros(len(tokens), int), [[] for _ in tokens]
    for new in coming:
        new = np.array(new)
        positions = np.where(index < new[:, None], done[:, None] + index, -1)
        now = np.where(positions < 0, 0, np.take_along_axis(tokens, positions.clip(0), axis=1))
        logits, cache = decode(model, jax.device_put(now), cache, jax.device_put(positions))
        for row, count in enumerate(new):
            out[row].append(np.asarray(logits)[row, :count])
        done += new
    return np.stack([np.concatenate(row) for row in out]), cache


# Each mechanism of `programs` has its own kind of cache or positions; Gemma 4's last layers read those of others.
@pytest.mark.parametrize("name", by_mechanism([*STACKS, *OTHERS], (*MECHANISMS, "gemma4-shared")))
def test_decode_equals_forward(load, name):
    """Rows have their own lengths, right-padded, in calls with a prompt's part, a single token, or nothing.

    Other features of a checkpoint show in its logits (test_parity.py). Keys of llama-dynamic and llama-longrope keep
    the angles of the length at which they were cached. So these two decode differently, as in transformers.
    """
    logits, _ = decoded(load(name), init_cache(load(name), 2, 40), tiny.TOKENS, COMING)
    assert error(logits, GOLDEN[name]) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deepseek2", "granite4-dense-new", "kimi_linear", "llama4-lists-new", "qwen3_5"])
def test_token_by_token(load, name):
    """After a right-padded prefill, calls of one token are right, which some layers compute in a special way.

    An engine decodes like this in test_engine.py and test_hybrids.py, and every family in test_generate.py (live).
    """
    model = load(name)
    lengths, cache = np.array([5, 23]), init_cache(model, 2, 40)
    indices = np.broadcast_to(np.arange(23), (2, 23))
    positions = np.where(indices < lengths[:, None], indices, -1)
    prompt = np.where(positions < 0, 0, tiny.TOKENS[:, :23])
    logits, cache = decode(model, jnp.asarray(prompt), cache, jnp.asarray(positions))
    assert error(np.asarray(logits)[0, :5], GOLDEN[name][0, :5]) < 1e-4
    assert error(np.asarray(logits)[1], GOLDEN[name][1, :23]) < 1e-4
    for step in range(17):
        at = (lengths + step)[:, None]
        now = jnp.asarray(np.take_along_axis(tiny.TOKENS, at, 1))
        logits, cache = decode(model, now, cache, jnp.asarray(at))
        assert error(np.asarray(logits)[:, 0], np.take_along_axis(GOLDEN[name], at[..., None], 1)[:, 0]) < 1e-4


@pytest.mark.parametrize(
    "name", [n for n, hub in tiny.CONFIGS.items() if hub.get("sliding_window") or hub.get("attention_chunk_size")]
)
def test_local_layers_keep_their_window_alone(name):
    hub = tiny.CONFIGS[name]
    family = registry.FAMILIES[hub["model_type"]]
    config = read_config(family, hub)
    windows = [config.window(n) for n in range(config.num_hidden_layers)]
    model = eqx.filter_eval_shape(lambda: family.Model(config, key=jax.random.key(0)))
    caches = eqx.filter_eval_shape(lambda model: model.init_cache(1, 64, jnp.bfloat16), model)
    by_layer = {
        n: cache
        for part, entries in zip(("head", "period", "tail"), caches, strict=True)
        for j, cache in enumerate(entries)
        for n in model.layers.layer_numbers(part, j)
    }
    keys = {n: cache.k.shape[2] for n, cache in by_layer.items() if isinstance(cache, KV | WindowKV)}
    assert keys == {n: windows[n] or 64 for n in keys}
    shared = hub.get("num_kv_shared_layers", 0)  # the last layers, which keep nothing
    kinds = getattr(config, "layer_types", ()) or [None] * len(windows)
    assert sorted(keys) == [n for n in range(len(windows) - shared) if kinds[n] != "conv"]


@pytest.mark.parametrize(
    "name",
    [
        thorough("qwen3-window-head"),  # keys and values, in windows too
        "deepseek3",  # latents
        thorough("mimo_v2_flash"),  # values narrower than keys
    ],
)
def test_int8_is_close_and_small(load, name):
    """The root mean square of the logits' change, in prefill and decode, is at most 2.2% of the logits. That is for
    latents, where routers' choices change, too.
    """
    model = load(name)
    caches = eqx.filter_jit(lambda model: [zoo.nn.cache.init_cache(model, 2, 40, kind) for kind in ("int8", None)])
    empty, exact = caches(model)
    b, int8 = decoded(model, empty, tiny.TOKENS[:, :24], [(8, 8), (8, 8), *[(1, 1)] * 8])
    a, size = GOLDEN[name][:, :24], lambda cache: sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert 1e-4 < np.linalg.norm(a - b) / np.linalg.norm(a) < 0.03
    assert size(int8) < size(exact) / 3


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_of_another_dtype(kind):
    """The cache rounds to its dtype, and returns the rounded values in the tokens' dtype."""
    narrow = lambda x: x.astype(jnp.bfloat16) if x.ndim > 3 else x
    cache, tokens = jax.tree.map(narrow, CACHES[kind][0]), np.float32([[0.1], [1.7]])
    cache, k, v, at = update(cache, tokens, np.array([[1], [2]]))
    assert k.dtype == v.dtype == np.float32
    rounded = np.asarray(jnp.asarray(tokens).astype(jnp.bfloat16).astype(jnp.float32))
    for row, position in enumerate((1, 2)):
        assert k[row][at[row] == position] == rounded[row] == -v[row][at[row] == position]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", jnp.float32])
def test_dtypes_of_caches(dtype, monkeypatch):
    """A CPU holds 16 bits in float32."""
    init = lambda model: zoo.nn.cache.init_cache(model, 1, 8, dtype)
    config = zoo.config("qwen3-0.6b")
    model = eqx.filter_eval_shape(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)))
    kept = lambda: [x.dtype for x in jax.tree.leaves(eqx.filter_eval_shape(init, model)) if x.ndim]
    assert kept() == [jnp.float32] * 2
    monkeypatch.setattr(zoo.nn.cache, "device", lambda: Device("gpu", "NVIDIA H200"))
    assert kept() == [jnp.dtype(dtype)] * 2
    for wrong in ("int4", "bf16", jnp.int32):
        with pytest.raises(ValueError, match=r"cache_dtype=.* is neither int8 nor a floating-point dtype such as bfl"):
            zoo.nn.cache.init_cache(model, 1, 8, wrong)


def test_int8_of_a_real_head(monkeypatch):
    """128 bfloat16 features, as in real models, take 132 bytes of int8 with one scale, instead of 256."""
    monkeypatch.setattr(zoo.nn.cache, "device", lambda: Device("gpu", "NVIDIA H200"))
    config = zoo.config("qwen3-0.6b")
    model = eqx.filter_eval_shape(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)))
    size = lambda dtype: sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(eqx.filter_eval_shape(lambda m: zoo.nn.cache.init_cache(m, 4, 1024, dtype), model))
    )
    assert round(size("int8") / size("bfloat16"), 3) == round(132 / 256, 3)


def test_wider_windows():
    """On TPUs their slots, and those of all positions, are a multiple of 128."""
    model = eqx.filter_eval_shape(lambda: zoo.gemma3.Model(zoo.config("gemma3-270m"), key=jax.random.key(0)))
    init = lambda: eqx.filter_eval_shape(lambda m: zoo.nn.cache.init_cache(m, 1, 2000, widen=5), model)
    slots = lambda: {(c.k.shape[2], c.spare if isinstance(c, WindowKV) else None) for block in init() for c in block}
    assert slots() == {(512 + 5, 5), (2000, None)}
    with ON_TPU:
        assert slots() == {(640, 128), (2048, None)}


@pytest.mark.thorough
def test_a_gpus_step_has_no_loop_over_layers(load, monkeypatch):
    """It gives the same logits and caches. A mesh keeps the loop where its devices gather weights in each layer."""
    model, tokens = load("gemma3"), tiny.TOKENS[:, :3]

    def lowered():
        positions = jnp.tile(jnp.arange(3), (2, 1))
        step = lambda tokens: model.decode(tokens, model.init_cache(2, 16, jnp.float32), positions=positions)
        return jax.jit(step).lower(tokens)

    def in_a_loop(mesh):
        with jax.set_mesh(make_mesh(mesh, jax.devices()[:2])):
            return "while" in lowered().as_text()

    expected = lowered()
    monkeypatch.setattr(scan, "device", lambda: Device("gpu", "NVIDIA H200"))
    got = lowered()
    assert "while" in expected.as_text() and "while" not in got.as_text()
    found = {axis: in_a_loop(f"{axis}=2") for axis in ("fsdp", "context", "tensor", "replica")}
    assert found == {"fsdp": True, "context": True, "tensor": False, "replica": False}
    got, expected = (each.compile()(tokens) for each in (got, expected))
    close(got, expected, terms=MODEL)
