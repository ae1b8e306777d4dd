"""Adapters change nothing at first, nor does merging. Files are PEFT's: PEFT reads ours, and we read PEFT's, if it is
installed.
"""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, error, forward, same, thorough
from zoo import lora
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.registry import family_of
from zoo.surgery import modules, shardings
from zoo.weights import peft


NAMES = ["qwen3", "gpt3", "llama4", "mixtral", "deepseek3", "qwen3_next", "granite4", "nemotron_h", "kimi_linear"]
NAMES += ["lfm2_moe", "lfm3", "laguna"]
CASES = pytest.mark.parametrize("name", NAMES)
# Each of these stores its matrices in its own way, or has names of its own.


def trained(model, *, where=lora.LAYERS, rank=3, alpha=5.0):
    """Adds adapters with values as after training. The numbers come from numpy, so that nothing compiles."""
    add = lambda model: lora.add(model, rank=rank, alpha=alpha, where=where, key=jax.random.key(0))
    random, kept = np.random.RandomState(1), iter(jax.tree.leaves(lora.bare(model)))
    new = lambda x, scale: jnp.asarray((scale * random.standard_normal(x.shape)).astype(x.dtype))
    scales = {"a": 0.2, "b": 0.1}
    fill = lambda path, x: new(x, scales[path[-1].name]) if path[-1].name in scales else next(kept)
    return jax.tree_util.tree_map_with_path(fill, eqx.filter_eval_shape(add, model))


@eqx.filter_jit
def gradients(model, tokens=TOKENS):
    """Returns the gradients of a model's adapters, of a function of its logits."""
    adapters, frozen = lora.split(model)
    return jax.grad(lambda adapters: jnp.sum(jnp.sin(lora.combine(adapters, frozen)(tokens))))(adapters)


def assert_like_floats(kept, floats):
    """Adapters over weights as stored have the gradients that they have over the floats these stand for."""
    for one, other in zip(*(jax.tree.leaves(gradients(trained(model))) for model in (kept, floats)), strict=True):
        assert np.abs(other).max() > 0
        close(one, other, terms=2 * MODEL)


def test_added_split_and_merged(load):
    model = load("mixtral")
    fresh = eqx.filter_jit(lambda model: lora.add(model, rank=3, alpha=5.0, key=jax.random.key(0)))(model)
    plain, logits = np.asarray(forward(model, TOKENS)), np.asarray(forward(fresh, TOKENS))
    close(logits, plain, terms=MODEL)  # b is zero
    assert same(lora.bare(fresh), model)
    starts = [np.asarray(m.a) * m.a.shape[-1] ** 0.5 for _, m in modules(fresh, lora.ADAPTERS)]
    starts = np.concatenate([np.ravel(a) for a in starts])
    assert np.abs(starts).max() <= 1 and abs(starts.std() - 3**-0.5) < 0.01, "as PEFT's: evenly up to 1 / sqrt(in)"
    adapted = trained(model)
    adapters, frozen = lora.split(adapted)
    assert {a.shape[-2] for p, a in jax.tree_util.tree_leaves_with_path(adapters) if p[-1].name == "a"} == {3}
    assert len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(model))
    assert same(lora.combine(adapters, frozen), adapted)
    logits, merged = forward(adapted, TOKENS), eqx.filter_jit(lora.merge)(adapted)
    assert error(logits, plain) > 0.05
    close(forward(merged, TOKENS), logits, terms=MODEL)
    assert jax.tree.structure(merged) == jax.tree.structure(model)


def test_gradients_transpose_nothing_wide():
    """Gradients equal JAX's. No array as wide as the outputs or the inputs is transposed, or is the left side of a
    product that sums over tokens.
    """
    shapes = ((2, 8, 24), (3, 24), (40, 3), (2, 8, 40))
    x, a, b, g = (np.random.RandomState(n).standard_normal(shape).astype(np.float32) for n, shape in enumerate(shapes))
    loss = lambda x, a, b: jnp.sum(lora.low_rank(x, a, b, 0.5) * g)
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(x, a, b)
    low, d_low = 0.5 * x @ a.T, 0.5 * g @ b
    for ours, exact in zip(
        gradients, (d_low @ a, np.einsum("xyr,xyi->ri", d_low, x), np.einsum("xyo,xyr->or", g, low)), strict=True
    ):
        close(ours, exact, terms=100)
    equations = jax.make_jaxpr(jax.grad(loss, (1, 2)))(x, a, b).jaxpr.eqns
    sums = [e for e in equations if e.params.get("dimension_numbers", [[()]])[0][0] == (0, 1)]
    transposed = [e for e in equations if e.primitive.name == "transpose"]
    assert len(sums) == 2 and all(3 in e.invars[0].aval.shape for e in (*sums, *transposed))


@pytest.mark.parametrize(
    "name", ["gpt3", "mixtral", *map(thorough, ("llama4", "qwen3_next", "granite4", "nemotron_h"))]
)
def test_files(load, name, tmp_path):
    """Saved adapters, also those of experts, are loaded bit by bit."""
    adapted = trained(load(name))
    peft.save(adapted, tmp_path)
    assert same(peft.load(load(name), tmp_path), adapted)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek3", "mixtral"])
def test_files_per_expert(load, name, tmp_path):
    """Each expert's maps have two tensors of their own, and are loaded bit by bit."""
    adapted = trained(load(name))
    peft.save(adapted, tmp_path, per_expert=True)
    assert same(peft.load(load(name), tmp_path), adapted)
    tensors = safetensors.numpy.load_file(tmp_path / peft.WEIGHTS)
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert not any("experts.lora" in tensor or "base_layer" in tensor for tensor in tensors)
    assert not config["target_parameters"] and not config["rank_pattern"]
    if name == "qwen3_moe":
        assert {"q_proj", "gate_proj", "up_proj", "down_proj"} < set(config["target_modules"])
        up = adapted.layers.period[0].mlp.experts.up_proj
        for letter, array in (("A", up.a), ("B", up.b)):
            stored = tensors[f"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_{letter}.weight"]
            np.testing.assert_array_equal(stored, np.asarray(array)[0, 1])


def test_no_names_per_expert(load, tmp_path):
    with pytest.raises(ValueError, match=r"experts.* is one tensor for all experts in checkpoints of gpt_oss, so"):
        peft.save(trained(load("gpt_oss")), tmp_path, per_expert=True)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # warnings of PEFT and transformers
@CASES
def test_ours_in_peft(folders, load, name, tmp_path):
    """PEFT, around transformers' model, computes the same logits from the same files."""
    module = pytest.importorskip("peft")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    # PEFT refuses adapters of out_proj in Nemotron-H, so "*t_proj" has none.
    adapted = trained(load(name), where="layers.*[!t]_proj" if name == "nemotron_h" else lora.LAYERS)
    peft.save(adapted, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    theirs = module.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(np.asarray(TOKENS)).long()).logits.numpy()
    assert error(forward(adapted, TOKENS), logits) < 1e-4


SEEING = {  # some modules of transformers' models, by our checkpoint
    "gemma3-pattern": ["model.language_model.layers.0.self_attn.q_proj", "model.vision_tower.encoder.layers.0.mlp.fc1"],
    "llama4": [
        "language_model.model.layers.0.self_attn.q_proj", "vision_model.model.layers.0.self_attn.q_proj",
        "vision_model.vision_adapter.mlp.fc1", "multi_modal_projector.linear_1",
    ],
    "mistral": [
        "model.language_model.layers.0.self_attn.q_proj", "model.multi_modal_projector.linear_1",
        "model.vision_tower.transformer.layers.0.attention.q_proj",
    ],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", SEEING)
def test_files_of_models_that_see(load_vision, name, tmp_path):
    """Adapters of the tower and of the text model are named like transformers' modules, unlike the Hub's tensors."""
    model = load_vision(name)
    adapted = trained(model, where="*[1j]")  # fc1, linear_1, q_proj, ...
    peft.save(adapted, tmp_path)
    assert same(peft.load(model, tmp_path), adapted)
    names = safetensors.numpy.load_file(tmp_path / peft.WEIGHTS).keys()
    assert {f"base_model.model.{module}.lora_A.weight" for module in SEEING[name]} <= names
    homeless = trained(model, where="vision.projector.*")
    if name == "gemma3-pattern":
        with pytest.raises(ValueError, match="mm_input_projection has an adapter, but transformers has no such module"):
            peft.save(homeless, tmp_path)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # warnings of PEFT and transformers
@pytest.mark.parametrize("name", SEEING)
def test_ours_of_models_that_see_in_peft(load_vision, vision_folders, name, tmp_path):
    """PEFT merges our adapters into transformers' model with the same weights as our merge."""
    module = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    case, folder = tiny.SEEING[name], vision_folders[name]
    adapted = trained(load_vision(name), where="*[1j]")
    peft.save(adapted, tmp_path)
    zoo.save(lora.merge(adapted), tmp_path / "merged")
    expected = case.computed(case.theirs(tmp_path / "merged"))
    theirs = case.computed(module.PeftModel.from_pretrained(case.theirs(folder), tmp_path).merge_and_unload())
    plain = case.computed(case.theirs(folder))
    for key, values in theirs.items():
        assert error(values, expected[key]) < 1e-4 and error(values, plain[key]) > 0.05, key


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # warnings of PEFT and transformers
@CASES
def test_theirs_here(folders, load, name, tmp_path):
    """An adapter that PEFT made and saved is loaded, with two ranks, or scaled by the root of the rank."""
    module = pytest.importorskip("peft")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    model = load(name)
    experts = any(modules(model, AbstractExpertLinear))
    into = "up_proj" if name == "nemotron_h" else "gate_up_proj"
    first = {"gpt3": "c_attn", "deepseek3": "kv_b_proj", "qwen3_next": "in_proj_qkvz"}.get(name, "q_proj")
    config = module.LoraConfig(
        r=4, lora_alpha=6, init_lora_weights=False, target_modules=[first, "c_proj" if name == "gpt3" else "o_proj"],
        target_parameters=[f"experts.{into}", "experts.down_proj"] if experts else None,
        use_rslora=not experts, rank_pattern={} if not experts else {first: 2},
    )  # fmt: skip
    theirs = module.get_peft_model(base, config).eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(np.asarray(TOKENS)).long()).logits.numpy()
    theirs.save_pretrained(tmp_path)
    assert error(forward(peft.load(model, tmp_path), TOKENS), logits) < 1e-4


@pytest.mark.parametrize("where", ["*.[qv]_proj", "*.experts.*", "*.up_proj", "layers.period.0.self_attn.*"])
def test_some_of_them(load, where, tmp_path):
    model = load("qwen3_moe")
    adapted = trained(model, where=where)
    kinds = (AbstractLinear, AbstractExpertLinear)
    for (_, before), (_, after) in zip(modules(model, kinds), modules(adapted, kinds), strict=True):
        assert isinstance(after, lora.ADAPTERS) == (type(after) is not type(before))
    peft.save(adapted, tmp_path)
    assert same(peft.load(model, tmp_path), adapted)


def test_over_rounded_weights(load, tmp_path):
    """Files of QLoRA adapters are the usual ones, and only merging is refused. For gradients see test_surgery.py and
    test_hybrids.py.
    """
    model = load("mixtral", quantize="nf4")
    adapted = trained(model)
    peft.save(adapted, tmp_path)
    assert same(peft.load(model, tmp_path), adapted)
    with pytest.raises(ValueError, match=r"layers\.period.* is a Quantized\w*Linear, whose weights are quantised"):
        lora.merge(adapted)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mixtral"])
def test_on_a_mesh(load, name, tmp_path):
    """Adapters are split like the weights below them, compute the same, and are loaded as they were saved."""
    model = trained(load(name))
    want = forward(model, TOKENS)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        there = jax.device_put(model, shardings(model, family_of(model).partition_rules, mesh))
        close(forward(there, TOKENS), want, terms=MODEL)
        peft.save(there, tmp_path)
        again = peft.load(lora.bare(there), tmp_path)
    assert any(not a.sharding.is_fully_replicated for a in jax.tree.leaves(lora.split(there)[0]))
    assert same(again, there)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, again, there))


def test_merging_rounds_once(folders):
    model = zoo.load(folders["qwen3"], dtype="bfloat16")
    adapted = trained(model, where="*.q_proj")
    (path, m), *_ = modules(adapted, lora.LoRALinear)
    weight, a, b = (np.asarray(x, np.float64) for x in (m.base.weight, m.a, m.b))
    want = (weight + m.scale * b @ a).astype(np.float32).astype(jnp.bfloat16)
    got = dict(modules(lora.merge(adapted), AbstractLinear))[path].weight
    assert got.dtype == jnp.bfloat16 and np.mean(np.asarray(got) != want) < 1e-3  # float32 sums halfway between two


def test_refusals(load, tmp_path):
    model = load("qwen3")
    with pytest.raises(ValueError, match=r"No linear map matches 'layers\.\*\.w1'"):
        lora.add(model, rank=2, alpha=2.0, where="layers.*.w1", key=jax.random.key(0))
    with pytest.raises(ValueError, match="rank of at least 1, not 0"):
        lora.add(model, rank=0, alpha=2.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="adapters of 0 kinds"):
        peft.save(model, tmp_path)
    adapted = trained(model)
    with pytest.raises(ValueError, match="has adapters already"):
        peft.load(adapted, tmp_path)
    with pytest.raises(ValueError, match="adapters of 2 kinds"):
        one = trained(model, where="*.q_proj")
        peft.save(trained(one, where="*.v_proj", rank=2), tmp_path)
    peft.save(adapted, tmp_path)
    file = tmp_path / peft.CONFIG
    good = json.loads(file.read_text())
    for bad in ({"use_dora": True}, {"bias": "all"}, {"peft_type": "LOHA"}, {"init_lora_weights": "pissa"}):
        file.write_text(json.dumps(good | bad))
        with pytest.raises(ValueError, match=f"says {next(iter(bad))}=.*which is not implemented"):
            peft.load(model, tmp_path)
    file.write_text(json.dumps(good))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors has .* tensors that the model has no place for"):
        peft.load(load("gpt3"), tmp_path)
    weights = tmp_path / peft.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not what was written with .*\.manifest\.json"):
        peft.load(model, tmp_path)
    with pytest.raises(ValueError, match=r"lora_.* in .*adapter_model\.safetensors holds NaN or infinities"):
        peft.load(model, tmp_path, verify=False)
    peft.load(model, tmp_path, verify=False, check_values=False)
    weights.unlink()
    with pytest.raises(OSError, match="adapter_model"):
        peft.load(model, tmp_path)
