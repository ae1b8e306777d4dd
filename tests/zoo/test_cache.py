"""Caches against a plain dictionary of what was written, and the memory that local layers take, by shape."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import tiny
from zoo import registry
from zoo.cache import KV, LatentKV, WindowKV
from zoo.config import read


SLOTS, WINDOW = 16, 4
CACHES = {  # each with the window of its layers
    "KV": (KV.empty(2, 2, SLOTS, 1, 1, jnp.float32), SLOTS),
    "WindowKV": (WindowKV.empty(2, 2, WINDOW, 1, 1, jnp.float32), WINDOW),
    "LatentKV": (LatentKV.empty(2, 2, SLOTS, 1, 1, jnp.float32), SLOTS),
}
# Positions of two rows, call by call.
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
    "to the last slot": [[[*range(12)], [*range(12)]], [[12, 13, 14, 15, -1], [12, 13, -1, -1, -1]]],
    "no positions, then decode": [None, [[3], [3]], [[4], [4]]],
}

write = eqx.filter_jit(lambda cache, k, v, positions: cache.update(k, v, positions))


def update(cache, tokens, positions):
    """The new cache, and what the cache shows of the tokens' numbers: keys, values (their negatives), positions."""
    vectors = tokens[..., None] if isinstance(cache, LatentKV) else tokens[..., None, None]
    cache, k, v, *at = write(cache, vectors, -vectors, positions)
    k, v = (np.asarray(x).reshape(len(tokens), -1) for x in (k, v))
    index = np.broadcast_to(np.arange(k.shape[1]), k.shape)
    return cache, k, v, index if not at or at[0] is None else np.asarray(at[0])


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("kind", CACHES)
def test_every_query_finds_what_it_may_see(kind, calls):
    """In the second of two layers; and the first stays empty."""
    empty, window = CACHES[kind]
    cache = eqx.tree_at(lambda c: c.layer, empty, jnp.array(1))
    written, count = ({}, {}), 0
    for positions in CALLS[calls]:
        now = np.array([[0, 1, 2]] * 2 if positions is None else positions)
        tokens = 1.0 + count + np.arange(now.size, dtype=np.float32).reshape(now.shape)
        count += now.size
        cache, k, v, at = update(cache, jnp.asarray(tokens), None if positions is None else jnp.asarray(now))
        for row in (0, 1):
            written[row].update({int(p): t for p, t in zip(now[row], tokens[row], strict=True) if p >= 0})
            for query in now[row][now[row] >= 0]:
                sees = (at[row] <= query) & (at[row] > query - window)
                expected = {p: t for p, t in written[row].items() if query - window < p <= query}
                assert np.sum(sees) == len(expected)
                assert dict(zip(at[row][sees].tolist(), k[row][sees], strict=True)) == expected
                assert np.array_equal(v[row][sees], -k[row][sees])
    for before, after in zip(jax.tree.leaves(empty), jax.tree.leaves(cache), strict=True):
        assert before.ndim == 0 or np.array_equal(before[0], after[0])


@pytest.mark.parametrize(
    "name", [n for n, hub in tiny.CONFIGS.items() if hub.get("sliding_window") or hub.get("attention_chunk_size")]
)
def test_local_layers_keep_their_window_alone(name):
    hub = tiny.CONFIGS[name]
    family = registry.FAMILIES[hub["model_type"]]
    config = read(family, hub)
    windows = [config.window(n) for n in range(config.num_hidden_layers)]
    model = eqx.filter_eval_shape(lambda: family.Model(config, key=jax.random.key(0)))
    caches = eqx.filter_eval_shape(lambda model: model.init_cache(1, 64, jnp.bfloat16), model)
    slots = {
        n: jax.tree.leaves(cache)[0].shape[2]
        for part, entries in zip(("head", "period", "tail"), caches, strict=True)
        for j, cache in enumerate(entries)
        for n in model.layers.layer_numbers(part, j)
    }
    assert [slots[n] for n in range(len(windows))] == [window or 64 for window in windows]
