"""kernels.decode_attention: every implementation against a formula in float64 numpy, on caches of ragged length."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import kernels
from kernels import Causal, Chunk, Stacked, Tokens, sliding
from tests.close import close
from tests.kernels.oracle import QUICK, SCALE, TERMS, arrays, oracle, thorough


SINKS = np.array([1.0, -2.0, 5.0, -np.inf], np.float32)
DECODES = {
    "causal": (dict(seq=1, kv_seq=150, kv_heads=1), {}),
    "all, of a few queries": (dict(seq=3, kv_seq=200, v_dim=32), dict(mask=sliding(50), softcap=4.0, sinks=SINKS)),
    "chunks, of which one is empty yet": (dict(seq=1, kv_seq=90, kv_heads=4, dim=256), dict(mask=Causal() & Chunk(64))),
    "latents, wider than a register": (dict(seq=2, kv_seq=96, kv_heads=1, dim=160, size=1), dict(v_dim=144)),
    "more queries than one part has": (dict(seq=16, kv_seq=150, heads=10, kv_heads=2), {}),
}
DEFAULT = ("all, of a few queries", "latents, wider than a register")  # cases of the default tier


@pytest.mark.parametrize(
    "case, implementation",
    [
        ("all, of a few queries", "reference"),
        # test_attention_triton.py has more cases for Triton.
        *(
            (case, name) if case in DEFAULT[name.startswith("tpu") :] else thorough(case, name)
            for name in ("xla", "triton", "tpu", "tpu_heads")
            for case in DECODES
            if case != "causal" or name == "tpu"
        ),
    ],
)
def test_decode_of_a_ragged_cache(case, implementation):
    """One row is at its first position, after padding, and another in the middle. Garbage in later slots and in all
    other layers reaches no output.
    """
    shapes, options = DECODES[case]
    options: dict[str, Any] = {n: jnp.asarray(x) if n == "sinks" else x for n, x in options.items()}
    q, k, v, d_out = arrays(**shapes)
    if width := options.pop("v_dim", None):
        v, d_out = k[..., :width], d_out[..., :width]
    last = np.arange(1 - shapes["seq"], 1)
    positions = np.stack([np.where(last < 0, -1, last), 67 + last])
    later = np.arange(shapes["kv_seq"])[None] > positions[:, -1:]
    expected, _ = oracle(q, k, v, d_out, q_positions=positions, **options)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(q, k, v, positions):
        of_three = lambda x: Stacked(jnp.stack([jnp.full_like(x, jnp.nan), x, jnp.full_like(x, jnp.inf)]), jnp.array(1))
        values = width or of_three(v)
        at = Tokens(positions)
        return kernels.decode_attention(
            q, of_three(k), values, at, scale=SCALE, implementation=implementation, **options
        )

    k[later] = np.nan
    v[later] = np.inf
    out = np.asarray(decode(q, k, v, positions))
    close(out, expected, terms=TERMS)
    assert not out[0, :-1][positions[0, :-1] < 0].any()
    (k if width else v)[1, 67] = np.nan  # only the last query sees this slot
    spoilt = np.asarray(decode(q, k, v, positions))
    assert np.isnan(spoilt[1, -1]).all()
    np.testing.assert_array_equal(spoilt[0], out[0])
    np.testing.assert_array_equal(spoilt[1, :-1], out[1, :-1])


@pytest.mark.thorough
@pytest.mark.parametrize("kv_seq", [64, 65])
def test_a_cpu_takes_some_rows_at_a_time(kv_seq):
    """On both sides of a block's 64 slots, and of the rows that a core's cache holds: four of eight here, two of two.

    A logit sums 64 products of size 3, in any order, which the softmax turns into a relative error of each weight.
    """
    q, k, v, _ = arrays(batch=8, seq=1, kv_seq=kv_seq, heads=8, kv_heads=8, dim=64)

    def decode(implementation, rows):
        of = lambda x: Stacked(jnp.asarray(x[:rows])[None], jnp.array(0))
        at = Tokens(jnp.full((rows, 1), kv_seq - 1))
        of_rows = jnp.asarray(q[:rows]), of(k), of(v), at
        return np.asarray(kernels.decode_attention(*of_rows, scale=SCALE, implementation=implementation))

    eight, two = decode("xla", 8), decode("xla", 2)
    bound = 2 * (64 + kv_seq) * np.finfo(np.float32).eps * np.abs(v).max()
    np.testing.assert_allclose(eight, decode("reference", 8), rtol=0, atol=bound)
    np.testing.assert_allclose(eight[:2], two, rtol=0, atol=bound)


@pytest.mark.thorough
def test_few_and_many_queries_over_a_cache():
    """16 queries are decoded, and 17 are attended to as in a prefill. Both give what each query gets alone."""
    q, k, v, _ = arrays(seq=17, kv_seq=40)
    of = lambda x: Stacked(jnp.asarray(x)[None], jnp.array(0))
    positions, slots = (jnp.tile(jnp.arange(*ends), (2, 1)) for ends in ((20, 37), (0, 40)))

    def attend(first, **options):
        given = jnp.asarray(q[:, first:]), of(k), of(v), Tokens(positions[:, first:]), Tokens(slots)
        return np.asarray(kernels.attention(*given, scale=SCALE, **options))

    expected = attend(0, implementation="reference")
    bound = 2 * (q.shape[3] + 40) * np.finfo(np.float32).eps * np.abs(v).max()
    np.testing.assert_allclose(attend(0), expected, rtol=0, atol=bound)
    np.testing.assert_allclose(attend(1), expected[:, 1:], rtol=0, atol=bound)


def in_pages(x, slots, table):
    """Returns arrays [layers, batch, kv_seq, ...] in pages, with garbage in those that no row has."""
    layers, batch, length = x.shape[:3]
    padded = np.pad(x, [(0, 0), (0, 0), (0, -length % slots)] + [(0, 0)] * (x.ndim - 3))
    pages = np.full((layers, table.max() + 2, slots, *x.shape[3:]), 7 if x.dtype == np.int8 else np.nan, x.dtype)
    pages[:, table] = padded.reshape(layers, batch, -1, slots, *x.shape[3:])
    return pages


@pytest.mark.thorough
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("case", ["causal", "all, of a few queries", "latents, wider than a register"])
@pytest.mark.parametrize("implementation", ["reference", "xla", "triton", "tpu", "tpu_heads"])
def test_decode_of_pages(case, implementation, eight_bits):
    """Pages in any order give what a cache without pages gives. Where a row needs no page its table has any number."""
    shapes, options = DECODES[case]
    options: dict[str, Any] = {n: jnp.asarray(x) if n == "sinks" else x for n, x in options.items()}
    q, k, v, _ = arrays(**shapes)
    width, slots, last = options.pop("v_dim", None), 16, np.arange(1 - shapes["seq"], 1)
    positions = np.stack([np.where(last < 0, -1, last), 67 + last])
    table = np.random.RandomState(0).permutation(2 * -(-k.shape[1] // slots)).reshape(2, -1).astype(np.int32)
    parts = (width, k.shape[3] - width) if width else k.shape[3:]

    def layer(x, parts, table=None):
        stack, scale, rest = np.stack([np.zeros_like(x), x]), None, ()
        if eight_bits:
            values, scale = _quantized(x, parts)
            stack, scale = np.stack([values, values]), np.stack([scale, scale]).reshape(2, *scale.shape[:2], -1)
            rest = (tuple(parts), np.dtype(q.dtype))
        if table is not None:
            stack, scale = (None if a is None else in_pages(a, slots, table) for a in (stack, scale))
            table = np.where(np.arange(table.shape[1]) * slots > positions[:, -1:], 1000, table)
        return Stacked(stack, np.int32(1), scale, *(rest or ((), None)), table)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(q, k, v, positions):
        v = width or v
        return kernels.decode_attention(
            q, k, v, Tokens(positions), scale=SCALE, implementation=implementation, **options
        )

    expected, got = (
        np.asarray(decode(q, layer(k, parts, t), None if width else layer(v, v.shape[3:], t), positions))
        for t in (None, table)
    )
    close(got, expected, terms=TERMS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case, implementation",
    [
        *itertools.product(
            ("all, of a few queries", "latents, wider than a register"), ("xla", "triton", "tpu", "tpu_heads")
        ),
        ("chunks, of which one is empty yet", "tpu_heads"),  # whose vectors are rows
    ],
)
def test_decode_of_a_cache_in_8_bits(case, implementation):
    """The result equals float64 attention over the integers times their scales. Later slots and other layers have NaN
    scales, and so has, in the end, a slot that only the last query sees.
    """
    shapes, options = DECODES[case]
    options: dict[str, Any] = {n: jnp.asarray(x) if n == "sinks" else x for n, x in options.items()}
    q, k, v, d_out = arrays(**shapes)
    width = options.pop("v_dim", None)
    parts = {"k": (width, k.shape[3] - width) if width else k.shape[3:], "v": v.shape[3:]}
    stores = {name: _quantized(x, parts[name]) for name, x in (("k", k), ("v", v))}
    k, v = (values * np.repeat(scale, parts[name], axis=-1) for name, (values, scale) in stores.items())
    v, d_out = (k[..., :width], d_out[..., :width]) if width else (v, d_out)
    last = np.arange(1 - shapes["seq"], 1)
    positions = np.stack([np.where(last < 0, -1, last), 67 + last])
    expected, _ = oracle(q, k, v, d_out, q_positions=positions, **options)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(q, stores, positions):
        def layer(name):
            values, scale = stores[name]
            scale = scale.reshape(*scale.shape[:2], -1)
            stack = jnp.stack([-values, values]), jnp.stack([scale * jnp.nan, scale])
            return Stacked(stack[0], jnp.array(1), stack[1], parts[name], np.dtype(q.dtype))

        at, v = Tokens(positions), width or layer("v")
        return kernels.decode_attention(q, layer("k"), v, at, scale=SCALE, implementation=implementation, **options)

    for _, scale in stores.values():
        scale[np.arange(shapes["kv_seq"])[None] > positions[:, -1:]] = np.nan
    out = np.asarray(decode(q, stores, positions))
    close(out, expected, terms=TERMS)
    for name in ("k",) if width else ("k", "v"):
        _, scale = stores[name]
        kept, scale[1, 67, 0, -1] = scale[1, 67, 0, -1], np.nan
        spoilt, group = np.array(decode(q, stores, positions)), q.shape[2] // k.shape[2]
        assert np.isnan(spoilt[1, -1, :group]).all()
        spoilt[1, -1, :group] = out[1, -1, :group]
        np.testing.assert_array_equal(spoilt, out)
        scale[1, 67, 0, -1] = kept


def _quantized(x, parts):
    """Rounds vectors to int8 with a scale for each of their parts, as a cache does."""
    pieces = np.split(x, np.cumsum(parts)[:-1], axis=-1)
    scale = np.stack([np.abs(piece).max(axis=-1) / 127 for piece in pieces], axis=-1)
    return np.round(x / np.repeat(scale, parts, axis=-1)).astype(np.int8), scale


def test_gradients_are_the_references():
    """Gradients of queries, of the cache layer that is read, and of sinks equal the reference's."""
    q, k, v, d_out = arrays(batch=1, seq=1, kv_seq=150)

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def gradients(implementation, *given):
        def loss(q, k, v, sinks):
            k, v = (Stacked(x, jnp.array(1)) for x in (k, v))
            at = Tokens(jnp.array([[120]]))
            out = kernels.decode_attention(q, k, v, at, scale=SCALE, sinks=sinks, implementation=implementation)
            return jnp.sum(out * d_out)

        return jax.grad(loss, range(4))(*given)

    given = q, *(np.stack([x, x, x]) for x in (k, v)), SINKS
    expected = jax.device_get(gradients("reference", *given))
    assert expected[1][1, :, :121].all() and not expected[1][[0, 2]].any() and expected[3][:3].all()
    for implementation in ("xla", "triton", "tpu", "tpu_heads"):
        for actual, of_reference in zip(gradients(implementation, *given), expected, strict=True):
            close(actual, of_reference, terms=TERMS)


def on_a_tpu(name, kv_heads, dim, v_dim, dtype, slots=128):
    """Returns why an implementation would not decode over this cache. Latents are a `v_dim` other than `dim`."""
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    parts = (v_dim, dim - v_dim) if v_dim < dim else (dim,)
    of_scales = (shape(3, 1, slots, kv_heads * len(parts), dtype=jnp.float32), parts, np.dtype(jnp.bfloat16))
    cache = Stacked(
        shape(3, 1, slots, kv_heads, dim, dtype=dtype), shape(dtype=jnp.int32), *of_scales[: 3 * (dtype == jnp.int8)]
    )
    device = AbstractDevice("TPU v6 lite", None, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        decode = functools.partial(kernels.decode_attention, scale=SCALE, implementation="xla")
        (choice,) = kernels.explain(decode, shape(1, 1, kv_heads, dim), cache, v_dim if v_dim < dim else cache)
    return choice.others[name]


@pytest.mark.thorough
def test_a_cache_that_a_tpu_would_copy_is_refused():
    """Refused caches would be copied, by the compiler's report: all of it in temporary memory, in place of 200 kB."""
    wide, narrow = jnp.bfloat16, jnp.int8
    flat = [(8, 128, 128, wide), (4, 128, 128, narrow), (16, 256, 256, wide), (1, 576, 512, wide), (4, 256, 256, wide)]
    for each in [*flat, (2, 256, 256, wide), (4, 256, 256, narrow), (8, 256, 256, narrow)]:
        assert on_a_tpu("tpu", *each) is None
    reason = "XLA would copy a cache of {} heads with {} and {} features to flatten it"
    for copied in [(8, 64, 64, wide), (12, 128, 128, wide), (2, 128, 128, narrow)]:
        assert on_a_tpu("tpu", *copied) == reason.format(*copied)
    assert on_a_tpu("tpu", 1, 576, 512, narrow) == reason.format(1, 576, 576)
    columns = [(8, 64, 64, wide), (8, 64, 64, narrow), (1, 576, 512, wide), (1, 576, 512, narrow), (3, 80, 80, wide)]
    for each in [*columns, (10, 128, 128, wide), (2, 128, 128, narrow), (1, 256, 256, narrow)]:
        assert on_a_tpu("tpu_heads", *each) is None
    reason = "a TPU does not store {} slots of {} heads with {} features by head"
    assert on_a_tpu("tpu_heads", 8, 64, 64, wide, slots=64) == reason.format(64, 8, 64)
    assert on_a_tpu("tpu_heads", 8, 128, 128, wide) == reason.format(128, 8, 128)
    assert on_a_tpu("tpu_heads", 3, 80, 80, narrow) == reason.format(128, 3, 80)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_tokens_are_written_by_head(dtype):
    """Tokens are written as columns and as rows as by the scatter: neighbouring ones, a block's first and last one, and
    tokens that have no place.
    """
    random = np.random.RandomState(0)
    numbers = lambda *shape: jnp.asarray(random.randint(-99, 99, shape), dtype)
    stores = numbers(2, 3, 256, 2, 32), numbers(2, 3, 256, 5), numbers(2, 3, 256, 3, 128)
    new = numbers(3, 4, 2, 32), numbers(3, 4, 5), numbers(3, 4, 3, 128)
    row, slot = jnp.array([[2], [9], [0]]), jnp.array([[126, 127, 128, 129], [0, 1, 2, 3], [255, 256, 300, 0]])
    given = stores, new, jnp.array(1), row, slot
    written, expected = (
        jax.jit(functools.partial(kernels.cache_write, implementation=name), compiler_options=QUICK)(*given)
        for name in ("tpu", "reference")
    )
    for ours, theirs, before in zip(written, expected, stores, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert (np.asarray(ours) != np.asarray(before)).any(axis=tuple(range(3, ours.ndim))).sum() == 6


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_tokens_are_written_into_a_cache(implementation):
    """All arrays get their vectors, rounded, and nothing else changes. Rows and slots that do not exist are dropped."""
    random = np.random.RandomState(0)
    stores = tuple(jnp.asarray(random.randn(2, 3, 5, 2, dim), jnp.bfloat16) for dim in (6, 700))
    new = tuple(random.randn(4, 2, 2, dim).astype(np.float32) for dim in (6, 700))
    row, slot = np.array([[2], [0], [3], [1]], np.int32), np.array([[1, 4], [5, 0], [1, 2], [3, 2]], np.int32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(stores, new, layer, row, slot):
        write = lambda stores, new: kernels.cache_write(stores, new, layer, row, slot, implementation=implementation)
        written, gradients = jax.vjp(write, stores, new)
        return written, gradients(jax.tree.map(jnp.ones_like, written))

    written, (d_stores, d_new) = both(stores, new, jnp.int32(1), row, slot)
    expected = [np.array(store) for store in stores]
    dropped = np.zeros((4, 2), bool)
    for n, (r, i) in enumerate(zip(np.repeat(row, 2), slot.reshape(-1), strict=True)):
        dropped.reshape(-1)[n] = r == 3 or i == 5
        for array, x in zip(expected, new, strict=True):
            if not dropped.reshape(-1)[n]:
                array[1, r, i] = x.reshape(8, 2, -1)[n].astype(array.dtype)
    for got, want, d_store, d in zip(written, expected, d_stores, d_new, strict=True):
        np.testing.assert_array_equal(got, want)
        assert d_store[0].all() and d_store[1].any(axis=(2, 3)).sum() == 15 - 5
        np.testing.assert_array_equal(d.any(axis=(2, 3)), ~dropped)


@pytest.mark.parametrize("kv_heads", [thorough(1), 2, thorough(8)])
def test_over_a_mesh(kv_heads):
    """A layer's cache heads are split like the queries', and repeated if too few. A single head stays whole."""
    q, k, v, _ = map(jnp.asarray, arrays(batch=2, seq=3, heads=8, kv_seq=200, kv_heads=kv_heads))
    at = Tokens(jnp.array([[10, 11, 12], [197, 198, 199]], jnp.int32))
    layer = jnp.array(1)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def decode(q, k, v):
        of_two = lambda x: Stacked(jnp.stack([-x, x]), layer)
        values = 8 if kv_heads == 1 else of_two(v)
        return kernels.attention(q, of_two(k), values, at, Tokens(), scale=SCALE)

    expected = np.asarray(decode(q, k, v))
    with jax.set_mesh(jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        close(decode(q, k, v), expected, terms=TERMS)
