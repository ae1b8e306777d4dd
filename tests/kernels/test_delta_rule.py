"""The gated delta rule and the short convolution, against float64: packed, padded, continued, split over a mesh."""

import functools
import itertools
import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kernels
from kernels import Slots, Tokens
from kernels.delta_rule import shared, triton, xla
from kernels.delta_rule import tpu as delta_rule_tpu
from kernels.delta_step import tpu as delta_step_tpu
from tests.close import close
from tests.kernels.oracle import QUICK, thorough


BATCH, SEQ, HEADS, DIM, V_HEADS, V_DIM = 2, 152, 2, 8, 4, 6  # SEQ: divisible by four devices, not by chunks of 64
SCALE = 0.3
# Options of `arrays`, and options of the operation.
KINDS = {
    "a head's decay": ({}, {}),
    "a channel's decay": (dict(channels=True), {}),
    "strong decays": (dict(channels=True, strength=40.0), {}),
    "no erasing": ({}, dict(erase=False)),
}
DEFAULT = ("a channel's decay", "no erasing")  # kinds of the default tier
EACH, EACH_BUT_STRONG = (
    pytest.mark.parametrize("kind", [kind if kind in DEFAULT else thorough(kind) for kind in kinds])
    for kinds in (KINDS, [kind for kind in KINDS if kind != "strong decays"])
)


def oracle(q, k, v, decay, beta, segments=None, state=None, *, erase=True):
    """Computes the rule in float64, token by token; segments of 0 are padding."""
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, decay, beta))
    q, k = (np.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    decay = np.broadcast_to(decay if decay.ndim == 4 else decay[..., None], k.shape)
    states = np.zeros((len(v), v.shape[2], k.shape[3], v.shape[3])) if state is None else np.array(state, np.float64)
    out = np.zeros(v.shape)
    for b, h in np.ndindex(*states.shape[:2]):
        s, document = states[b, h], None
        for t in range(v.shape[1]):
            if segments is not None and segments[b, t] == 0:
                continue
            if segments is not None and document not in (None, segments[b, t]):
                s = np.zeros_like(s)
            document = None if segments is None else segments[b, t]
            s = np.exp(decay[b, t, h])[:, None] * s
            new = v[b, t, h] - (s.T @ k[b, t, h] if erase else 0)
            s = s + beta[b, t, h] * np.outer(k[b, t, h], new)
            out[b, t, h] = SCALE * s.T @ q[b, t, h]
        states[b, h] = s
    return out, states


def arrays(seed=0, *, channels=False, strength=1.0, seq=SEQ, dtype=np.float32):
    """Returns q, k, v, decay and beta, in numpy."""
    random = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(random.normal(size=(BATCH, seq, HEADS, DIM))) for _ in range(2))
    v = random.normal(size=(BATCH, seq, V_HEADS, V_DIM))
    decay = -strength * random.random((BATCH, seq, V_HEADS, *((DIM,) if channels else ()))) ** 4
    beta = random.random((BATCH, seq, V_HEADS))
    return tuple(x.astype(dtype) for x in (q, k, v, decay, beta))


# Documents that begin within a chunk, at its edge, and after one token, and padding. Over four devices of 38 tokens one
# begins with the second device and has one token; the next continues through the third; one begins within the second.
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [38, 1, 100, 13]), np.repeat([5, 4], [64, 88])])
START = np.random.default_rng(1).normal(size=(BATCH, V_HEADS, DIM, V_DIM)).astype(np.float32)
D_OUT = np.random.default_rng(2).normal(size=(BATCH, SEQ, V_HEADS, V_DIM)).astype(np.float32), START[::-1]
NAMES = "out", "last", "q", "k", "v", "decay", "beta", "state"


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def run(implementation, options, given):
    """Returns the results named in `NAMES`, and all gradients. Kinds of the same shapes share a program."""
    at = Tokens(segments=jnp.asarray(SEGMENTS))
    more = dict(scale=SCALE, implementation=implementation, **dict(options))
    out, pull = jax.vjp(lambda *x: kernels.delta_rule(*x[:-1], at, state=x[-1], **more), *given, jnp.asarray(START))
    return *out, *pull(jax.tree.map(jnp.asarray, D_OUT))


def of_kind(kind):
    """Returns the arrays of a kind, with NaN in the padding, and its options."""
    of_arrays, options = KINDS[kind]
    given = arrays(**of_arrays)
    for x in given:
        x[0, -13:] = np.nan
    return given, tuple(options.items())


@functools.cache
def found(implementation, kind):
    given, options = of_kind(kind)
    return jax.device_get(run(implementation, options, given))


@EACH
def test_packed_documents_and_padding(kind):
    """Outputs and the last state equal the oracle's, and gradients by chunks equal those by single tokens."""
    of_arrays, options = KINDS[kind]
    true, state = oracle(*arrays(**of_arrays), SEGMENTS, START, **options)
    for implementation in ("reference", "xla"):
        out, last, *_ = found(implementation, kind)
        close({implementation: out[0, :-13]}, {implementation: true[0, :-13]}, terms=400)
        close({implementation: out[1]}, {implementation: true[1]}, terms=400)
        close({implementation: last}, {implementation: state}, terms=400)
    for name, ours, theirs in list(zip(NAMES, found("xla", kind), found("reference", kind), strict=True))[2:]:
        assert np.all(np.isfinite(ours)) and (name == "state" or not np.any(ours[0, -13:])), name
        close({name: ours}, {name: theirs.astype(np.float64)}, terms=800)


@EACH_BUT_STRONG
def test_strong_decays_cost_no_digits(kind):
    """Results stay exact although half of the decays are 20 on average, in whose sums weak decays lose all digits."""
    of_arrays, options = KINDS[kind]
    given, random = [*arrays(**of_arrays)], np.random.default_rng(3)
    strong = -40 * random.random(given[3].shape)
    given[3] = np.where(random.random(strong.shape) < 0.5, strong, strong / 1000).astype(np.float32)
    true, state = oracle(*given, SEGMENTS, START, **options)
    ours = jax.device_get(run("xla", tuple(options.items()), given))
    theirs = jax.device_get(run("reference", tuple(options.items()), given))
    # The chain is as long as for weak decays. A sum of 64 strong ones is about 640, and its rounding would cost more.
    close((ours[0][0, :-13], ours[1]), (true[0, :-13], state), terms=400)
    for name, one, other in zip(NAMES, ours, theirs, strict=True):
        close({name: one}, {name: other.astype(np.float64)}, terms=400)


def test_a_policy_saves_what_the_backward_pass_needs_of_the_forward_one():
    """With the policy there are one forward and one backward scan; without the names, the forward scan runs again."""

    def scans(policy):
        layer = jax.checkpoint(
            lambda *x: jnp.sin(kernels.delta_rule(*x, scale=SCALE, implementation="xla")[0]), policy=policy
        )
        return str(jax.make_jaxpr(jax.grad(lambda *x: layer(*x).sum()))(*arrays())).count(" scan[")

    assert scans(jax.checkpoint_policies.nothing_saveable) == 3
    assert scans(jax.checkpoint_policies.save_only_these_names(shared.OUT, shared.STATES)) == 2


@functools.partial(jax.jit, compiler_options=QUICK)
def in_parts(part, positions, state):
    return kernels.delta_rule(*part, Tokens(positions), scale=SCALE, state=state)


def test_a_sequence_in_parts_is_the_whole():
    """Prefill of right-padded rows, and then single tokens, equal the whole; a row that has ended is padding."""
    cuts, state, outs = [0, 70, 71, 72, 142], np.zeros_like(START), []
    given = [x[:, : cuts[-1]] for x in arrays()]
    whole, _ = oracle(*given)
    for start, end in itertools.pairwise(cuts):
        padded = lambda x: np.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2), constant_values=9)
        positions = np.append(np.arange(start, end), -1).astype(np.int32)
        part = [padded(x[:, start:end]) for x in given]
        out, state = in_parts(part, np.tile(positions, (BATCH, 1)), state)
        outs.append(out[:, :-1])
    close(np.concatenate(outs, axis=1), whole, terms=400)


def step(options, token, at, state):
    return kernels.delta_rule(*token, at, state=state, scale=SCALE, **dict(options))


compiled_step = jax.jit(step, static_argnums=0, compiler_options=QUICK)


@pytest.mark.parametrize("implementation", ["reference", "triton", "tpu"])
@EACH
def test_a_step_changes_its_slots_alone(kind, implementation, monkeypatch):
    """One row reads a slot and writes another, one starts afresh whatever its slot holds, one stays unchanged."""
    of_arrays, options = KINDS[kind]
    if "channels" in of_arrays:  # the layout for values that fill a TPU's registers
        monkeypatch.setattr(delta_step_tpu, "LANES", V_DIM)
    token = tuple(np.concatenate([x, np.full_like(x[:1], np.nan)]) for x in arrays(**of_arrays, seq=1))
    random = np.random.default_rng(2)
    stack = random.normal(size=(2, BATCH + 1, 3, V_HEADS, DIM, V_DIM)).astype(np.float32)
    stack[1, 1] = np.nan
    state = Slots(stack, *map(np.int32, (1, [2, -1, 0], [0, 1, 0])))
    at = Tokens(np.int32([[5], [0], [-1]]))
    with kernels.prefer(implementation):
        given = tuple(options.items()), token, at, state
        assert kernels.explain(step, *given)[0][:2] == ("delta_step", implementation)
        out, after = jax.device_get(compiled_step(*given))
    start = np.stack([stack[1, 0, 2], np.zeros_like(stack[1, 0, 0])])
    true, last = oracle(*(x[:BATCH] for x in token), state=start, **options)
    close(out[:BATCH], true, terms=100)
    found = np.array(after.stack)
    close(found[1, 0, 0], last[0], terms=100)
    close(found[1, 1, 1], last[1], terms=100)
    found[1, 0, 0], found[1, 1, 1] = stack[1, 0, 0], stack[1, 1, 1]
    np.testing.assert_array_equal(found, stack)


def compiled(run):
    return jax.jit(lambda *x: run(*x), compiler_options=QUICK)


def on_a_mesh(run, *arguments, **axes):
    """Returns the results on a mesh with these axes."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    with jax.set_mesh(Mesh(devices, tuple(axes))):
        return jax.device_get(jax.tree.leaves(compiled(run)(*arguments)))


def test_split_over_a_mesh():
    """A sequence, and a decode step, have the same results when rows and heads are split."""
    given, at = arrays(channels=True), Tokens(segments=jnp.asarray(SEGMENTS))
    rule = lambda *x: kernels.delta_rule(*x, at, scale=SCALE, state=jnp.asarray(START))
    out, last = on_a_mesh(rule, *given, fsdp=2, tensor=2)
    of_one = found("xla", "a channel's decay")
    close(out[:, :-13], of_one[0][:, :-13].astype(np.float64), terms=400)
    close(last, of_one[1].astype(np.float64), terms=400)
    stack = jnp.asarray(np.random.default_rng(1).normal(size=(2, BATCH, 2, V_HEADS, DIM, V_DIM)), jnp.float32)
    state = Slots(stack, jnp.array(1), jnp.array([0, -1]), jnp.array([1, 0]))
    token = tuple(x[:, :1] for x in given)
    with kernels.prefer("triton"):
        step = lambda *x: kernels.delta_rule(*x, scale=SCALE, state=state)
        alone = jax.tree.leaves(compiled(step)(*token))
        split = on_a_mesh(step, *token, fsdp=2, tensor=2)
    for ours, one in zip(split, alone, strict=True):
        close(ours, np.asarray(one, np.float64), terms=400)


@pytest.mark.parametrize("kind", [kind if kind == "a channel's decay" else thorough(kind) for kind in KINDS])
def test_tokens_split_over_the_context(kind):
    """The outputs, the last state, and all gradients equal one device's."""
    given, options = of_kind(kind)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:4]), ("context",))):
        split = jax.device_get(run(None, options, given))
    for name, ours, one in zip(NAMES, split, found("xla", kind), strict=True):
        padding = name == "out"
        ours, one = (x[:, :-13] if padding else x for x in (ours, one))
        close({name: ours}, {name: one.astype(np.float64)}, terms=400)


@pytest.mark.thorough
def test_half_precision_is_rounded_once():
    """Interpreted kernels multiply in TF32 or in half precision, like a GPU or a TPU, which adds little error."""
    given = arrays(dtype=jnp.bfloat16)
    out, last = oracle(*given)
    for implementation in ("xla", "triton", "tpu"):
        rule = functools.partial(kernels.delta_rule, scale=SCALE, implementation=implementation)
        ours, state = compiled(rule)(*given)
        assert ours.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        close({implementation: ours}, {implementation: out}, terms=4, dtype=jnp.bfloat16)
        close({implementation: state}, {implementation: last}, terms=4, dtype=jnp.bfloat16)


# Two chunks, the second not full, in which documents begin and padding ends the first row.
HALF_SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [38, 1, 48, 13]), np.repeat([5, 4], [64, 36])])


def in_half(segments, heads, v_heads, dim, v_dim, *, strength, channels=False):
    """Returns q, k and v in bfloat16, decay, beta and the first state, then the gradients of the two results. Half of
    the decays, of heads or of channels, have this strength at most, and the others are weak.
    """
    random, (batch, seq) = np.random.default_rng(7), segments.shape
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    normal = lambda *shape: random.normal(size=shape)
    q, k = (unit(normal(batch, seq, heads, dim)) for _ in range(2))
    v, d_out = (normal(batch, seq, v_heads, v_dim) for _ in range(2))
    state, d_last = (normal(batch, v_heads, dim, v_dim).astype(np.float32) for _ in range(2))
    decay = -0.1 * random.random((batch, seq, v_heads, *((dim,) if channels else ())))
    beta = 2 * random.random((batch, seq, v_heads))
    decay = np.where(random.random(decay.shape) < 0.5, strength, 1) * decay
    q, k, v, d_out = (x.astype(jnp.bfloat16) for x in (q, k, v, d_out))
    return (q, k, v, decay.astype(np.float32), beta.astype(np.float32), state), (d_out, d_last)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def run_half(implementation, erase, given, gradients, segments):
    def rule(*x):
        out, last = kernels.delta_rule(
            *x[:-1],
            Tokens(segments=segments),
            state=x[-1],
            scale=SCALE,
            erase=erase,
            implementation=implementation,
        )
        return out.astype(jnp.bfloat16), last

    out, pull = jax.vjp(rule, *given)
    return *out, *pull(gradients)


def hold_half(implementation, segments, *sizes, strength, erase=True):
    """Compares fused kernels' results and gradients with those of single tokens in float32."""
    given, gradients = in_half(segments, *sizes, strength=strength, channels=implementation == "triton_channels")
    for x in given[:-1]:
        x[segments == 0] = np.nan
    exact = (*(x.astype(np.float32) for x in given[:3]), *given[3:])
    ours = jax.device_get(run_half(implementation, erase, given, gradients, segments))
    theirs = jax.device_get(run_half("reference", erase, exact, gradients, segments))
    for name, one, other in zip(NAMES, ours, theirs, strict=True):
        if name == "out":
            one, other = (np.where((segments == 0)[..., None, None], 0, x) for x in (one, other))
        close({name: one}, {name: np.asarray(other, np.float64)}, terms=4, dtype=jnp.bfloat16)


HEADS_OF = {"triton_fused": (1, 2), "triton_channels": (2, 2)}  # of keys and of values; those with channels share none


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", HEADS_OF)
@pytest.mark.parametrize("strength", [1.0, 1e6])
def test_fused_kernels(implementation, strength):
    """Outputs, states and gradients are right with packed documents, padding, groups of heads, states, widths that are
    no powers of two, and decays of any size.
    """
    hold_half(implementation, HALF_SEGMENTS, *HEADS_OF[implementation], 24, 20, strength=strength)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("implementation", "sizes", "erase"),
    [
        ("triton_fused", (1, 2, 128, 128), True),
        ("triton_fused", (2, 2, 64, 256), True),
        ("triton_fused", (1, 3, 128, 64), False),
        ("triton_fused", (1, 1, 16, 16), False),
        ("triton_channels", (1, 1, 128, 128), True),
    ],
)
def test_fused_kernels_of_models_sizes(implementation, sizes, erase):
    hold_half(implementation, np.repeat([[1, 2]], [100, 284], axis=1), *sizes, strength=100.0, erase=erase)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="leaves it to XLA to remove a kernel that nobody reads")
@pytest.mark.parametrize("implementation", HEADS_OF)
def test_fused_kernels_run_once_where_a_policy_saves_their_results(implementation):
    """Without the names the forward loop runs a second time, in the backward pass."""
    heads, channels = HEADS_OF[implementation], implementation == "triton_channels"
    given, _ = in_half(HALF_SEGMENTS, *heads, 32, 32, strength=1.0, channels=channels)

    def loops(policy):
        rule = lambda *x: kernels.delta_rule(*x[:-1], state=x[-1], scale=SCALE, implementation=implementation)[0]
        layer = jax.checkpoint(lambda *x: jnp.sin(rule(*x)), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(lambda *x: layer(*x).astype(jnp.float32).sum()))(*given))
        name = implementation.replace("triton", "name=delta_rule")
        return [text.count(f"{name}_{kernel}") for kernel in ("forward", "backward")]

    assert loops(jax.checkpoint_policies.nothing_saveable) == [2, 1]
    assert loops(jax.checkpoint_policies.save_only_these_names(shared.OUT, shared.STATES)) == [1, 1]


@pytest.mark.parametrize(
    ("implementation", "erase", "counted"),
    [
        thorough("triton_fused", True, functools.partial(shared.fused_products, erase=True)),
        thorough("triton_fused", False, functools.partial(shared.fused_products, erase=False)),
        ("triton_channels", True, shared.channel_products),
    ],
)
def test_operations_of_the_fused_kernels_are_those_that_are_counted(implementation, erase, counted):
    heads, channels = HEADS_OF[implementation], implementation == "triton_channels"
    given, _ = in_half(HALF_SEGMENTS, *heads, 32, 32, strength=1.0, channels=channels)
    options = dict(scale=SCALE, erase=erase, implementation=implementation)
    rule = lambda *x: kernels.delta_rule(*x[:-1], state=x[-1], **options)[0]
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: rule(*x).astype(jnp.float32).sum(), argnums=(0, 5)))(*given).jaxpr

    def products(jaxpr):
        """Counts multiplications, but not those of blocks of the inverse."""
        total = 0
        for eqn in jaxpr.eqns:
            turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += turns * sum(products(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
            if eqn.primitive.name == "dot_general":
                ((axis,), _), _ = eqn.params["dimension_numbers"]
                sides = *eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape[axis]
                total += math.prod(sides) if sides != (shared.BLOCK,) * 3 else 0
        return total

    found = {}

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                (name,) = {*re.findall(r"delta_rule_(?:fused|channels)_(?:additive_)?(\w+)", str(eqn.params))}
                found[name] = math.prod(eqn.params["grid_mapping"].grid) * products(eqn.params["jaxpr"])
            else:
                for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                    visit(inner)

    visit(jaxpr)
    tokens = BATCH * 2 * 2 * shared.CHUNK  # of two heads, in two chunks
    assert found == {name: tokens * counted(name, 32, 32) for name in found} and len(found) == 5


@pytest.mark.parametrize(
    ("implementation", "of_arrays", "sizes", "reason"),
    [
        ("fused", {}, (192, 64), "its keys have at most 128 features and its values 256, and these have 192 and 64"),
        ("fused", dict(channels=True), (32, 32), "it has one decay for a head, and here each channel has its own"),
        ("fused", dict(dtype=np.float32), (32, 32), "it is for bfloat16, and q, k and v are float32"),
        ("channels", {}, (32, 32), "it has a decay for each channel, and here a head has one"),
        ("channels", dict(channels=True, erase=False), (32, 32), "it erases, and here nothing is erased"),
        ("channels", dict(channels=True, heads=1), (32, 32), "its value heads share no keys, and here 2 share 1"),
        ("channels", dict(channels=True, dtype=np.float32), (32, 32), "it is for bfloat16, and q, k and v are float32"),
    ],
)  # fmt: skip
def test_fused_kernels_refuse(implementation, of_arrays, sizes, reason):
    channels, erase = of_arrays.get("channels", False), of_arrays.get("erase", True)
    heads = of_arrays.get("heads", 2)
    (q, k, v, decay, beta, _), _ = in_half(HALF_SEGMENTS, heads, 2, *sizes, strength=1.0, channels=channels)
    if "dtype" in of_arrays:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
    rule = functools.partial(kernels.delta_rule, scale=SCALE, erase=erase)
    (choice,) = kernels.explain(rule, q, k, v, decay, beta)
    assert choice.implementation == "xla" and choice.others[f"triton_{implementation}"] == reason


@pytest.mark.thorough
@pytest.mark.parametrize("of", [triton, delta_rule_tpu])
def test_kernels_scan_as_plain_jax_does(of):
    """The kernels' scans equal plain JAX's by chunks, for features that fill no block, with erasing and without. All
    implementations share the rest.
    """
    random = np.random.default_rng(6)
    array = lambda *shape: (random.normal(size=shape) / 8).astype(np.float32)
    of_chunks = lambda *shape: array(3, 2, 3, 64, *shape)
    parts = shared.Parts(
        query=of_chunks(DIM), pairs=of_chunks(64), alone=of_chunks(20), less=of_chunks(DIM), key=of_chunks(DIM),
        fade=np.abs(array(3, 2, 3, DIM, 1)),
    )  # fmt: skip
    state, d_state, d_out = map(jnp.asarray, (array(2, 3, DIM, 20), array(2, 3, DIM, 20), of_chunks(20)))
    formula = shared.Formula(1.0, True, jax.lax.Precision.HIGHEST)
    plain = parts._replace(less=None, fade=parts.fade[..., :1, :])

    @compiled
    def found(parts, plain):
        def both(of):
            yield of.forward(formula, parts, state, keep=True)
            yield of.backward(formula, parts, d_out, d_state)
            yield of.forward(formula, plain, state, keep=False)
            yield of.backward(formula, plain, d_out, d_state)

        return list(both(of)), list(both(xla))

    ours, theirs = found(parts, plain)
    for each, one in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        close(each, np.asarray(one, np.float64), terms=400)


def additions(jaxpr):
    """Counts the additions in a jaxpr, of products, sums and whole states; in a loop, once for each iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        ins, out = [getattr(v.aval, "shape", ()) for v in eqn.invars], eqn.outvars[0].aval.shape
        if eqn.primitive.name == "dot_general":
            total += math.prod(out) * math.prod(ins[0][axis] for axis in eqn.params["dimension_numbers"][0][0])
        elif eqn.primitive.name == "reduce_sum":
            total += math.prod(ins[0])
        elif eqn.primitive.name == "add" and out[-2:] == (DIM, V_DIM):
            total += math.prod(out)
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += turns * sum(additions(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
    return total


@pytest.mark.parametrize("erase", [True, False])
def test_operations_are_those_that_are_counted(erase):
    """The counted operations are the reference's, those that chunks add, and a scan's, by its four matrices."""
    seq, tokens = 2 * shared.CHUNK, BATCH * V_HEADS * 2 * shared.CHUNK
    given, of = arrays(seq=seq), dict(scale=SCALE, erase=erase)
    count = lambda name: additions(
        jax.make_jaxpr(lambda *x: kernels.delta_rule(*x, implementation=name, **of))(*given).jaxpr
    )
    once = tokens * shared.state_products(DIM, V_DIM, erase=erase)
    assert count("reference") == once
    within = shared.CHUNK * (DIM + V_DIM) + erase * (shared.CHUNK * (2 * DIM + V_DIM) + (shared.CHUNK**2 - 1) // 3)
    to_states = 2 * BATCH * V_HEADS * DIM * V_DIM  # each of two chunks adds to the fading state
    assert count("xla") == once + tokens * within + to_states
    matrices = [(tokens, DIM)] * (2 + erase) + [(tokens, shared.CHUNK)]  # query, key, less; pairs
    assert shared.scan_flops(matrices, V_DIM) == 2 * (once + tokens * shared.CHUNK * V_DIM)


def test_inverse():
    """The inverse is as exact as float32 allows, also for equal keys, where powers of the matrix reach 1e17."""
    random = np.random.default_rng(5)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    keys = unit(random.normal(size=(64, 16)))
    alike = unit(keys[:1] + 0.01 * keys)
    weak, strong = (np.cumsum(-strength * random.random(64)) for strength in (1e-3, 5.0))
    cases = [
        (keys, weak),
        (np.tile(keys[:1], (64, 1)), 0 * weak),
        (alike, weak),
        (unit(keys[:, :2]), weak),
        (keys, strong),
    ]
    decayed = lambda k, total: k @ k.T * np.exp(np.minimum(total[:, None] - total, 0))
    lower = np.stack([np.tril(decayed(*case), -1) for case in cases]).astype(np.float32)
    true = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    close(list(compiled(shared.inverse)(lower)), list(true), terms=64)  # each by its own size


def test_bad_arguments():
    q, k, v, decay, beta = map(jnp.asarray, arrays(seq=4))
    with pytest.raises(ValueError, match=r"value heads \(3\) must be a multiple of the query/key heads \(2\)"):
        kernels.delta_rule(q, k, v[:, :, :3], decay[:, :, :3], beta[:, :, :3], scale=1.0)


def convolved(x, weight, segments=None, tail=None):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out, width = np.zeros(x.shape), weight.shape[1]
    for b, t in np.ndindex(*x.shape[:2]):
        for back in range(width):
            if t - back < 0:
                seen = 0 if tail is None else tail[b, width - 1 + t - back]
            else:
                seen = x[b, t - back] * (segments is None or segments[b, t - back] == segments[b, t])
            out[b, t] += weight[:, width - 1 - back] * seen
    return out


def test_convolution_of_packed_documents():
    random = np.random.default_rng(2)
    x, weight = random.normal(size=(BATCH, SEQ, 5)).astype(np.float32), random.normal(size=(5, 4)).astype(np.float32)
    ours, tail = compiled(kernels.causal_conv)(x, weight, Tokens(segments=SEGMENTS))
    true = convolved(x, weight, SEGMENTS)
    close(ours[0, :-13], true[0, :-13], terms=20)
    close(ours[1], true[1], terms=20)
    np.testing.assert_array_equal(tail, [x[0, -16:-13], x[1, -3:]])


def test_convolution_split_over_the_context():
    """Results and gradients equal one device's. Padding begins on any device; the tail then lies on one device or on
    two, or is mostly the given one.
    """
    random = np.random.default_rng(5)
    x, weight, before = (random.normal(size=n).astype(np.float32) for n in ((3, 16, 6), (6, 4), (3, 3, 6)))
    segments = np.repeat([[1, 2, 3, 0]], [4, 5, 4, 3], axis=1), np.repeat([[1, 2]], [6, 10], axis=1), np.ones((1, 16))
    segments = jnp.asarray(np.concatenate(segments), jnp.int32)
    positions = jnp.where(jnp.arange(16)[None] < jnp.array([[1], [9], [16]]), jnp.arange(16)[None], -1)

    def both(x, weight, before):
        run = lambda x, weight, before: (
            kernels.causal_conv(x, weight, Tokens(segments=segments)),
            kernels.causal_conv(x, weight, Tokens(positions), tail=before),
        )
        out, pull = jax.vjp(run, x, weight, before)
        return out, pull(jax.tree.map(jnp.cos, out))

    split, alone = on_a_mesh(both, x, weight, before, context=4), jax.tree.leaves(compiled(both)(x, weight, before))
    close(alone[0][0, :13], convolved(x, weight, np.asarray(segments))[0, :13], terms=20)
    for ours, one in zip(split, alone, strict=True):
        close(ours, np.asarray(one, np.float64), terms=40)


def test_convolution_in_parts_is_the_whole():
    random = np.random.default_rng(3)
    x, weight = (random.normal(size=shape).astype(np.float32) for shape in ((BATCH, 9, 5), (5, 4)))
    whole, conv = convolved(x, weight), compiled(lambda x, at, tail: kernels.causal_conv(x, weight, at, tail=tail))
    begun = x[:, :6].copy()
    begun[1, 2:] = 7.0
    out, tail = conv(begun, Tokens(np.int32([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]])), None)
    np.testing.assert_array_equal(tail[1], [np.zeros(5), x[1, 0], x[1, 1]])
    first, tail = conv(np.stack([x[0, 6], x[1, 2]])[:, None], Tokens(), tail)
    close(out[0], whole[0, :6], terms=20)
    close(first[:, 0], np.stack([whole[0, 6], whole[1, 2]]), terms=20)
    same, kept = conv(first, Tokens(np.full((BATCH, 1), -1, np.int32)), tail)
    np.testing.assert_array_equal(kept, tail)
    with pytest.raises(ValueError, match="leave segments out"):
        conv(same, Tokens(segments=np.ones((BATCH, 1), np.int32)), tail)


@pytest.mark.live
@pytest.mark.parametrize("channels", [False, True])
def test_transformers_computes_the_same(channels):
    torch = pytest.importorskip("torch")
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given = tuple(map(jnp.asarray, arrays(channels=channels)))
    given = tuple(jnp.repeat(x, V_HEADS // HEADS, axis=2) for x in given[:2]) + given[2:]  # as many q and k heads as v
    start = np.random.default_rng(4).normal(size=(BATCH, V_HEADS, DIM, V_DIM)).astype(np.float32)
    ours, last = kernels.delta_rule(*given, scale=DIM**-0.5, state=jnp.asarray(start))
    theirs = recurrent_kimi_delta_attention if channels else torch_chunk_gated_delta_rule
    out, state = theirs(
        *(torch.from_numpy(np.array(x)) for x in given),
        initial_state=torch.from_numpy(start.copy()),
        output_final_state=True,
    )
    close(ours, out.numpy(), terms=400)
    close(last, state.numpy(), terms=400)
