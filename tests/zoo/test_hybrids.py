"""Hybrids of recurrent layers and attention, where they differ from other families: packed documents, reused rows of an
engine, tokens that are rolled back, and storage in 8 bits.
"""

import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import convert.tensors
import zoo
from kernels import Tokens
from kernels.coded import NF4
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, STACKS, TOKENS, decode, error, forward, init_cache, same
from tests.zoo.test_engine import PROMPTS, log_softmax, logits_after
from tests.zoo.test_lora import trained
from tests.zoo.test_speculative import SHAPE, assert_greedy, noisy, per_call
from zoo import lora, registry, surgery
from zoo.config import read
from zoo.models import qwen3_next
from zoo.nn.cache import Int8Vectors
from zoo.nn.recurrent import RecurrentCache
from zoo.quantized import STORED
from zoo.surgery import path_name
from zoo.weights.checkpoint import skeleton


def is_hybrid(name):
    hub = tiny.CONFIGS[name]
    family = registry.FAMILIES[hub["model_type"]]
    model = eqx.filter_eval_shape(lambda: family.Model(read(family, hub), key=jax.random.key(0)))
    return any(block.ordered for _, block in model.layers.blocks())


HYBRIDS = [name for name in STACKS if is_hybrid(name)]
LENGTHS = 11, 1, 9, 3  # lengths of documents in a row, of which two are no longer than a convolution


# Mamba 2, the delta rule, the same with a decay for each channel, and convolutions alone, in models of few layers.
RECURRENCES = ["granite4-mamba", "qwen3_next", "kimi_linear-groups-new", "lfm2-new"]
THOROUGH = {name: pytest.mark.thorough for name in RECURRENCES[1:]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=THOROUGH.get(name, ())) for name in RECURRENCES])
def test_packed_documents_do_not_leak(load, name):
    """Logits, and gradients of all parameters, equal those of each document alone.

    So neither the states nor the convolutions see a token of another document, or the row's padding. Logits of all
    checkpoints' packed documents are in test_parity.py.
    """
    model, total, ends = load(name), sum(LENGTHS), np.cumsum(LENGTHS)
    packed = np.concatenate([np.full(length, n + 1) for n, length in enumerate(LENGTHS)] + [np.zeros(2, int)])
    documents = np.split(tiny.TOKENS[0, :total], ends[:-1])
    alone = np.zeros((len(LENGTHS), total + 2), int)
    for row, document in zip(alone, documents, strict=True):
        row[: len(document)] = document
    segments = (np.arange(total + 2) < np.array(LENGTHS)[:, None]).astype(int)
    weights = np.random.RandomState(0).standard_normal((total, model.config.vocab_size)).astype(np.float32)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def weighed(model, tokens, segments, weights):
        logits = model.unembed(model.hidden(tokens, segments=segments)[0])
        return jnp.sum(logits * weights), logits

    row = np.zeros_like(alone)
    row[0] = np.append(tiny.TOKENS[0, :total], [5, 6])
    in_a_row = lambda x: np.concatenate([x, np.zeros((2, *x.shape[1:]), x.dtype)])[None]
    rest = len(LENGTHS) - 1
    by_row = np.concatenate([in_a_row(weights), np.zeros((rest, total + 2, weights.shape[1]), np.float32)])
    by_document = np.zeros_like(by_row)
    for n, (start, length) in enumerate(zip(ends - LENGTHS, LENGTHS, strict=True)):
        by_document[n, :length] = weights[start : start + length]
    in_row = np.concatenate([packed[None], np.zeros((rest, total + 2), int)])
    (_, ours), gradients = weighed(model, *map(jnp.asarray, (row, in_row, by_row)))
    (_, theirs), expected = weighed(model, *map(jnp.asarray, (alone, segments, by_document)))
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    for n, (start, length) in enumerate(zip(ends - LENGTHS, LENGTHS, strict=True)):
        close(ours[0, start : start + length], theirs[n, :length], terms=MODEL)
    close(gradients, expected, terms=4 * MODEL)  # a leak of one token changes the logits above by 1


def test_a_prompt_of_several_chunks(load):
    """A prefill, right-padded to a length that the recurrence's chunks do not divide, and a decode step after it are
    right.
    """
    model, lengths, seq = load("qwen3_next"), np.array([67, 90]), 92
    tokens = np.random.RandomState(3).randint(0, 64, (2, seq))
    whole, index = np.asarray(forward(model, jnp.asarray(tokens))), np.arange(seq - 1)[None]
    positions = jnp.asarray(np.where(index < lengths[:, None], index, -1))
    logits, cache = decode(model, jnp.asarray(tokens[:, :-1]), init_cache(model, 2, seq), positions)
    following = np.where(index == 0, tokens[np.arange(2), lengths][:, None], 0)  # one token alone, by the same program
    positions = jnp.asarray(np.where(index == 0, lengths[:, None], -1))
    one, _ = decode(model, jnp.asarray(following), cache, positions)
    logits, one = np.asarray(logits), np.asarray(one)
    for row, length in enumerate(lengths):
        close(logits[row, :length], whole[row, :length], terms=MODEL)
        close(one[row, 0], whole[row, length], terms=MODEL)


@pytest.mark.thorough
def test_rows_of_an_engine(load):
    """Rows end at different times, and others take them; the samples of a prompt start with copies of one state."""
    model, stops = load("qwen3_next"), range(0, 64, 8)
    groups = zoo.complete(model, PROMPTS, samples=3, max_new_tokens=12, stops=stops, batch=2)
    for prompt, (completion, *others) in zip(PROMPTS, groups, strict=True):
        logits = logits_after(model, prompt, completion)
        assert completion.tokens == np.argmax(logits, axis=-1).tolist()
        logs = np.take_along_axis(log_softmax(logits), np.array(completion.tokens)[:, None], 1)[:, 0]
        close(completion.logprobs, logs, terms=MODEL, size=np.abs(logits).max())
        assert all(other.tokens == completion.tokens for other in others)
        assert completion.ended or len(completion.tokens) == 12
    assert len({len(completion.tokens) for completion, *_ in groups}) > 2


@pytest.fixture(scope="module")
def with_further(tmp_path_factory):
    """Returns the folder of Qwen3-Next's checkpoint with the MTP module, and its tensors."""
    family, tensors, random = tiny.MODULES["qwen3_next"], tiny.tensors("qwen3_next"), np.random.RandomState(2)
    shapes = sorted(family.further_shapes(tiny.CONFIGS["qwen3_next"]).items())
    tensors |= {n: family.values(n, random.standard_normal(shape)).astype(np.float32) for n, shape in shapes}
    folder = tiny.write(tmp_path_factory.mktemp("further"), "qwen3_next")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, tensors


def test_further_token_round_trip(folders, load, with_further, tmp_path):
    """The MTP module is skipped, or loaded, given rules, and exported bit by bit."""
    folder, tensors = with_further
    model = zoo.load(folder, parts=("mtp",))
    without = load("qwen3_next")
    assert same(zoo.load(folder), without) and same(eqx.tree_at(lambda m: m.mtp, model, None), without)
    specs = surgery.partition_specs(model, registry.family_of(model).partition_rules).mtp
    assert specs.block.mlp.experts.up_proj.weight == jax.P("expert", "tensor", "fsdp")
    zoo.save(model, tmp_path)
    after = convert.tensors.open_tensors(tmp_path)
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name].view(), tensors[name]) for name in after)
    with pytest.raises(ValueError, match=r"lacks \d+ tensors .*mtp\."):
        zoo.load(folders["qwen3_next"], parts=("mtp",))
    config = zoo.config("qwen3-next-80b-a3b")
    size = lambda *parts: sum(x.size for x in jax.tree.leaves(skeleton(qwen3_next.FAMILY, config, parts)))
    assert size("mtp") - size() == 1_650_471_424, "the tensors that the Hub shows beyond the model's"


def test_fp8_as_qwen3_next_has_it(with_further, tmp_path):
    """The 8-bit matrices are the same as in Qwen3-Next-80B-A3B-Instruct-FP8, and read back up to rounding."""
    model = zoo.load(with_further[0], parts=("mtp",))
    zoo.save(model, tmp_path, fp8=True)
    stored = convert.tensors.open_tensors(tmp_path)
    kept = "lm_head|embed_tokens|norm|A_log|dt_bias|conv1d|in_proj_ba|mlp[.]gate[.]|shared_expert_gate|mtp[.]fc"
    assert {name for name in stored if name + "_scale_inv" in stored} == {
        name for name in with_further[1] if not re.search(kept, name)
    }
    back = zoo.load(tmp_path, dtype="float32", parts=("mtp",))
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(back), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (np.abs(a - b) <= np.abs(a) / 16 + 1e-5 * np.abs(a).max()).all()


@pytest.mark.live
def test_further_token_is_a_layer_of_transformers(with_further, theirs):
    """transformers drops the module, but its own layers, combined as in vLLM and SGLang, give the same."""
    torch = pytest.importorskip("torch", reason="live parity needs transformers and torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as layers

    folder, tensors = with_further
    main, config = theirs("qwen3_next"), theirs("qwen3_next").config
    under = lambda start: ((name.removeprefix(start), x) for name, x in tensors.items() if name.startswith(start))
    of = lambda name: {key: torch.tensor(value) for key, value in under(f"mtp.{name}.")}
    block = layers.Qwen3NextDecoderLayer(config, config.layer_types.index("full_attention"))
    each = lambda kind: torch.stack([of(f"layers.0.mlp.experts.{n}")[f"{kind}_proj.weight"] for n in range(8)])
    weights = {key: value for key, value in of("layers.0").items() if ".experts." not in key}
    weights["mlp.experts.gate_up_proj"] = torch.cat([each("gate"), each("up")], dim=1)
    block.load_state_dict(weights | {"mlp.experts.down_proj": each("down")})
    names = "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
    norms = {name: layers.Qwen3NextRMSNorm(32, config.rms_norm_eps) for name in names}
    for name, norm in norms.items():
        norm.load_state_dict(of(name))
    tokens = torch.tensor(tiny.TOKENS)
    with torch.no_grad():
        x = main.model(tokens[:, :-1]).last_hidden_state
        following = main.model.embed_tokens(tokens[:, 1:])
        y = torch.cat([norms["pre_fc_norm_embedding"](following), norms["pre_fc_norm_hidden"](x)], dim=-1)
        y = y @ of("fc")["weight"].T
        mask = torch.full((39, 39), -torch.inf).triu(1)[None, None]
        where = main.model.rotary_emb(y, torch.arange(39)[None])
        expected = main.lm_head(norms["norm"](block(y, position_embeddings=where, attention_mask=mask)))
    model = zoo.load(folder, parts=("mtp",))
    x, _, _ = model.hidden(TOKENS[:, :-1])
    y, _, _ = model.mtp(x, model.embed_tokens(TOKENS[:, 1:]), None, Tokens())
    assert error(model.unembed(y), expected.numpy()) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name, draft", [("qwen3_next", "model"), ("qwen3_next", "mtp"), ("lfm2-new", "model")])
def test_speculation(load, with_further, name, draft):
    """Greedy text is the model's own, though states are rolled back: the model's, and a hybrid draft's."""
    if draft == "mtp":
        model = zoo.load(with_further[0], parts=("mtp",))
        proposes = zoo.MTPDraft(model, 2)
    else:
        model = load(name)
        proposes = zoo.ModelDraft(noisy(model, 0.05), 3)
    got = zoo.complete(model, PROMPTS[:3], draft=proposes, **SHAPE)
    assert_greedy(model, got)
    assert per_call(got) < 1 + proposes.num_draft_tokens, "nothing was rejected"
    assert draft == "mtp" or per_call(got) > 1.1


def test_states_are_kept_in_float32(load):
    """States are in float32 whatever the cache's dtype; 8 bits are for keys and values."""
    for dtype in ("bfloat16", "int8"):
        make = lambda model, dtype=dtype: zoo.nn.cache.init_cache(model, 2, 64, dtype)
        _, (recurrent, attention), _ = eqx.filter_eval_shape(make, load("qwen3_next"))
        assert isinstance(recurrent, RecurrentCache) and recurrent.state.dtype == jnp.float32
        assert isinstance(attention.k, Int8Vectors) == (dtype == "int8")


HALF = {"nf4": 0.152, "int8": 0.5 / 127, "fp8": 16 / 448}  # half of the widest gap between neighbours


@pytest.mark.thorough
@pytest.mark.parametrize("name, format", list(zip(HYBRIDS, itertools.cycle(HALF))))
def test_what_is_stored_in_fewer_bits(load, name, format):
    """Projections are within the format's bound. Convolutions, decays, norms, routers, one-row gates are unchanged."""
    flat = lambda tree: {path_name(path): array for path, array in jax.tree_util.tree_leaves_with_path(tree)}
    plain, stored = flat(load(name).layers), flat(load(name, quantize=format).layers)
    unchanged = re.compile("conv(1d)?[.]weight|norm|A_log|dt_bias|[.]D$|bias|gate[.]weight|router")
    kept = {path for path in plain if unchanged.search(path)}
    assert {path for path, array in stored.items() if array.dtype == STORED[format]} == plain.keys() - kept
    assert all(np.array_equal(stored[path], plain[path]) for path in kept)
    for path in plain.keys() - kept:
        codes, scale = (np.asarray(stored[path.removesuffix("weight") + end]) for end in ("weight", "scale"))
        codes = NF4[np.stack([codes >> 4, codes & 15], axis=-1)] if format == "nf4" else codes
        blocks = lambda x, scale=scale: np.asarray(x, np.float32).reshape(*scale.shape, -1)
        weight, got = blocks(plain[path]), blocks(codes) * scale[..., None]
        largest = np.abs(weight).max(axis=-1, keepdims=True)
        assert (np.abs(got - weight) <= (HALF[format] + 1e-6) * largest).all(), path


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECURRENCES[:2])
def test_adapters_over_four_bits(load, name):
    """With QLoRA, every adapter has a gradient, and steps against it lower the loss."""
    adapters, frozen = lora.split(trained(load(name, quantize="nf4")))
    tokens = TOKENS[:, :12]

    @jax.jit
    @jax.value_and_grad
    def loss(adapters, frozen):
        logits = lora.combine(adapters, frozen)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    before, gradients = loss(adapters, frozen)
    assert all(np.any(g) for g in jax.tree.leaves(gradients))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
    stepped = jax.tree.map(lambda a, g: jnp.asarray(np.asarray(a) - 0.005 / norm * np.asarray(g)), adapters, gradients)
    after, _ = loss(stepped, frozen)
    assert after < before - 0.003 * norm
