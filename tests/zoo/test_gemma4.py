"""Gemma 4 beyond parity and the contract of test_vision.py: what its layers share, its ropes, and files that are
refused or hold more than the text model.
"""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kernels
import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import make_golden, tiny
from tests.zoo.programs import MODEL, same
from zoo.models import gemma4
from zoo.nn.cache import KV, NoCache, WindowKV
from zoo.weights.checkpoint import skeleton


E2B, LARGE = gemma4.GEMMA4_E2B, gemma4.GEMMA4_31B
# config.json's keys beside the text model's, and tensors that it does not need.
SOUND = dict(audio_config={"model_type": "gemma4_audio"}, audio_token_id=60, boa_token_id=59, eoa_token_index=58)
STRAY = ("model.audio_tower.output_proj.weight", "model.embed_vision.embedding_projection.weight")


def test_shared_keys_are_kept_once():
    """E2B's last 20 layers keep nothing: its cache is that of 12 local layers and 3 global ones."""
    model = skeleton(gemma4.FAMILY, E2B)
    assert model.layers.runs == ((5, 2), (5, 1), (5, 4))
    caches = eqx.filter_eval_shape(lambda m: m.init_cache(1, 4096, jnp.bfloat16), model)
    kinds = [(layers, cache) for (layers, _), cache in zip(model.layers.blocks(), sum(caches, ()), strict=True)]
    assert all(isinstance(cache, NoCache) == (min(layers) >= 15) for layers, cache in kinds)
    count = lambda kind: sum(cache.k.shape[0] for _, cache in kinds if isinstance(cache, kind))
    assert (count(WindowKV), count(KV)) == (12, 3)
    assert sum(a.size for a in jax.tree.leaves(caches) if a.ndim == 5) == 2 * (12 * 512 * 256 + 3 * 4096 * 512)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_decoding_copies_no_cache(dtype):
    """A step's temporary memory is far below one layer's keys, also where later layers read them."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=2, head_dim=32, global_head_dim=64)
    sizes |= dict(hidden_size_per_layer_input=8, vocab_size=64, vocab_size_per_layer_input=64)
    model = skeleton(gemma4.FAMILY, dataclasses.replace(E2B, **sizes))
    cache = eqx.filter_eval_shape(lambda m: zoo.nn.cache.init_cache(m, 4, 16384, dtype), model)
    step = jax.jit(lambda m, t, cache, at: m.decode(t, cache, positions=at), donate_argnums=2)
    ids = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    memory = step.lower(model, ids, cache, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < (3 << 20) < 4 * 16384 * 64  # bytes of one layer's keys in 8 bits


def test_the_ropes():
    """A quarter of a global head turns, by the first frequencies of a whole head's; numbers are transformers'."""
    attention = skeleton(gemma4.FAMILY, LARGE).layers.period[5].self_attn
    frequencies, _ = attention.rotary.frequencies()
    assert len(frequencies) == 256 and attention.rotary.turning == 64
    close({i: frequencies[i] for i in (1, 63)}, {1: 0.947463512, 63: 0.0333762467}, terms=32)
    x = jnp.ones((1, 2, 1, 512))
    turned = attention.rotary(x, Tokens(positions=jnp.array([[0, 3]])))[0, :, 0] != x[0, :, 0]
    assert not turned[0].any() and np.flatnonzero(turned[1]).tolist() == [*range(64), *range(256, 320)]


@pytest.mark.parametrize("config", [E2B, gemma4.GEMMA4_12B, gemma4.GEMMA4_26B_A4B, LARGE])
def test_global_heads_of_512(config):
    """XLA serves them in training and prefill on GPUs, whose kernels say why they do not; a TPU's kernel takes them."""
    heads, shared = config.num_attention_heads, config.kv_heads(gemma4.FULL)
    q, k = (jax.ShapeDtypeStruct((1, 256, n, 512), jnp.bfloat16) for n in (heads, shared))
    (choice,) = kernels.explain(lambda q, k: kernels.attention(q, k, k, scale=1.0), q, k)
    assert choice.implementation == "xla" and choice.others["tpu"] is None
    assert "at most 256 features, and these 512" in choice.others["triton"]
    assert "256 at most, and these 512" in choice.others["mosaic"]
    step = jax.ShapeDtypeStruct((1, 1, heads, 512), jnp.bfloat16)
    over_cache = lambda q, k: kernels.attention(q, *[kernels.Stacked.of(k)] * 2, scale=1.0)
    (choice,) = kernels.explain(over_cache, step, k)
    assert choice.operation == "decode_attention" and choice.others["triton"] is None


def wrap(folder, name, **outer):
    """Writes the text checkpoint `name` as a part of one that sees and hears."""
    tensors = {key.replace("model.", "model.language_model.", 1): x for key, x in tiny.tensors(name).items()}
    tensors |= {key: np.ones(8, np.float16) for key in STRAY}
    text = {k: v for k, v in tiny.CONFIGS[name].items() if k not in ("architectures", "tie_word_embeddings")}
    names = dict(model_type="gemma4", architectures=["Gemma4ForConditionalGeneration"], vision_config=None)
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(names | SOUND | dict(text_config=text) | outer))
    return folder


def test_the_text_model_is_read(load, tmp_path):
    """The tensors of towers are left out, and so are the keys and values of layers that read another one's."""
    folder = wrap(tmp_path / "model", "gemma4-shared")
    assert same(zoo.load(folder), load("gemma4-shared"))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.3.self_attn"
    spare = {f"{layer}.{name}.weight": np.ones((8, 32), np.float32) for name in ("k_proj", "v_proj", "k_norm")}
    safetensors.numpy.save_file(tensors | spare, folder / "model.safetensors")
    assert same(zoo.load(folder), load("gemma4-shared"))
    with pytest.raises(ValueError, match=r"gemma4 has no part 'audio': parts=\('vision',\) adds its vision tower"):
        zoo.load(folder, parts=("audio",))


def test_values_beside_keys_that_are_values_are_refused(tmp_path):
    folder = tiny.write(tmp_path / "model", "gemma4")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    value = {"model.layers.1.self_attn.v_proj.weight": np.ones((16, 32), np.float32)}
    safetensors.numpy.save_file(tensors | value, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.1\.self_attn\.v_proj\.weight"):
        zoo.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_types=["full_attention"] * 3 + ["sliding_attention"]), "ends with sliding_attention"),
        (dict(layer_types=["full_attention"]), "layer_types has 1 entries, but num_hidden_layers is 4"),
        (dict(num_kv_shared_layers=3), "num_kv_shared_layers=3 leaves no layer with keys and values of each kind"),
        (dict(num_global_key_value_heads=3), "is no multiple of num_global_key_value_heads=3"),
        (dict(top_k_experts=None), "enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size"),
        (dict(top_k_experts=5), "num_experts_per_tok=5, which is more than num_experts=4"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all'"),
        (dict(rope_parameters={"full_attention": {"rope_type": "proportional", "factor": 2.0}}), "has no factor there"),
        (dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "'yarn'"),
        (dict(per_layer_config={"1": {"head_dim": 16}, "3": {"head_dim": 8}}), "the same of all, and of no others"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        zoo.config(tiny.write(tmp_path / "model", "gemma4", **changes))


@pytest.mark.live
@pytest.mark.parametrize("name", tiny.MODULES["gemma4"].CONFIGS)
def test_gradients_are_transformers(load, theirs, name):
    """Also those of what several layers read; torch computes none of embeddings of the id of padding."""
    torch = pytest.importorskip("torch", reason="live parity needs transformers and torch")
    from zoo.weights.checkpoint import export

    reference, model = theirs(name), load(name)
    reference.zero_grad()
    reference(torch.tensor(tiny.TOKENS)).logits.square().sum().backward()
    found = {key: value.grad.numpy() for key, value in reference.named_parameters()}
    loss = lambda model: jnp.sum(jnp.square(model(jnp.asarray(tiny.TOKENS))))
    gradients = eqx.filter_jit(eqx.filter_grad(loss))(model)
    ours = {key: get() for key, (_, _, get) in export(gradients, gemma4.FAMILY).items()}
    for key, gradient in ours.items():
        if key.endswith("layer_scalar"):
            assert not gradient.any()
            continue
        rows = slice(1 if "embed_tokens" in key else 0, None)
        close({key: gradient[rows]}, {key: found[key][rows]}, terms=2 * MODEL)


@pytest.mark.live
def test_what_transformers_saves(folders, load, tmp_path):
    """transformers 5 writes the sizes of global heads under another key."""
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    make_golden.load(folders["gemma4"]).save_pretrained(tmp_path)
    assert "per_layer_config" in json.loads((tmp_path / "config.json").read_text())
    assert same(zoo.load(tmp_path), load("gemma4")) and zoo.config(tmp_path) == load("gemma4").config
