"""Qwen3.5 and Qwen3.6: the forms of their files, values that stay in float32, and the MTP module.

transformers has no such module for them, so it is compared with a float64 oracle that computes the same as vLLM and
SGLang.
"""

import json
import math
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import kernels
import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, on_host, same
from tests.zoo.test_speculative import PROMPTS, SHAPE, assert_greedy
from train.step.language import cross_entropy
from zoo import surgery
from zoo.models import qwen3_5
from zoo.weights.checkpoint import skeleton


FAMILY, NAME = tiny.MODULES["qwen3_5"], "qwen3_5-moe"
CONFIG = tiny.CONFIGS[NAME]
FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"


@pytest.fixture(scope="module")
def tensors():
    """Returns the tensors of the mixture, including those of the MTP module."""
    random, out = np.random.RandomState(2), tiny.tensors(NAME)
    for name, shape in sorted(FAMILY.further_shapes(CONFIG).items()):
        out[name] = FAMILY.values(name, random.standard_normal(shape)).astype(np.float32)
    return out


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    folder = tiny.write(tmp_path_factory.mktemp("further"), NAME)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, parts=("mtp",))


# Files.


def hub(folder, name, tensors, **outer):
    """Writes a checkpoint in the Hub's form, in which the text model is a part of a vision model."""
    beside = ("architectures", "tie_word_embeddings")
    text = {key: value for key, value in tiny.CONFIGS[name].items() if key not in beside}
    whole = dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type=text["model_type"].removesuffix("_text"),
        text_config=text, image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63,
        vision_config=dict(depth=1, out_hidden_size=outer.get("text_config", text)["hidden_size"]),
        tie_word_embeddings=tiny.CONFIGS[name]["tie_word_embeddings"],
        language_model_only=False, transformers_version="4.57.1",
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole | outer))
    rename = lambda key: f"model.language_model.{key.removeprefix('model.')}" if key.startswith("model.") else key
    stored = {rename(key): value for key, value in tensors.items()}
    stored["model.visual.patch_embed.proj.weight"] = np.ones((2, 3, 2, 2, 2), np.float32)
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.thorough
def test_the_hubs_form(load, folder, model, tensors, tmp_path):
    """The Hub's form is read like the plain one, and saved as that; without the tower it takes no images."""
    for name, more in (("qwen3_5", {}), (NAME, tensors)):
        ours = zoo.load(hub(tmp_path / name, name, tiny.tensors(name) | more))
        assert ours.config == load(name).config and same(ours, load(name))
    ours = zoo.load(tmp_path / NAME, parts=("mtp",))
    assert same(ours, model)
    zoo.save(ours, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"])
    assert not saved.keys() & {"text_config", "vision_config", "image_token_id", "rope_parameters"}
    after = convert.tensors.open_tensors(tmp_path / "saved")
    assert after.keys() == tensors.keys()
    assert all((after[name].view() == tensors[name]).all() for name in after)
    assert same(zoo.load(tmp_path / "saved", parts=("mtp",)), model)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(sliding_window=8), "'sliding_window' beside text_config"),
        (dict(text_config=CONFIG | dict(attn_output_gate=False)), "attn_output_gate=False"),
        (dict(text_config=CONFIG | dict(num_experts=0)), "num_experts=0, which qwen3_5_moe_text needs"),
        (dict(text_config=CONFIG | dict(layer_types=["full_attention"] * 3)), "layer_types has 3 entries"),
        (dict(text_config=CONFIG | dict(linear_num_value_heads=3)), "linear_num_value_heads=3 is no multiple of"),
        (dict(text_config=CONFIG | dict(layer_types=["mamba"] * 4)), r"layer_types=\['mamba', "),
        (dict(text_config=CONFIG | dict(model_type="qwen3_5_moe")), "model_type='qwen3_5_moe' with"),
        (dict(vision_config=dict(out_hidden_size=32, deepstack_visual_indexes=[8])), "but the text takes none"),
        (dict(text_config=CONFIG | dict(partial_rotary_factor=1.5, rope_parameters=None)), "partial_rotary_factor=1.5"),
    ],
)
def test_what_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        zoo.config(hub(tmp_path / "model", NAME, {}, **changes))


def one_by_one(tensors):
    """Returns the same tensors, with each expert's matrices separate."""
    apart = {}
    for name, value in tensors.items():
        parts = np.split(value, 2, axis=1) if name.endswith("experts.gate_up_proj") else [value]
        kinds = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
        start, expert, _ = name.partition("experts.")
        for kind, part in zip(kinds if expert else (), parts, strict=bool(expert)):
            apart |= {f"{start}experts.{n}.{kind}.weight": np.ascontiguousarray(one) for n, one in enumerate(part)}
        apart |= {} if expert else {name: value}
    return apart


def test_experts_one_by_one(folder, model, tensors, tmp_path):
    """Experts may be separate, as in Qwen3.5's MTP tensors and transformers' files. Incomplete ones are named."""
    apart = one_by_one(tensors)
    tiny.write(tmp_path, NAME)
    safetensors.numpy.save_file(apart, tmp_path / "model.safetensors")
    assert same(zoo.load(tmp_path, parts=("mtp",)), model)
    apart.pop("mtp.layers.0.mlp.experts.2.up_proj.weight")
    safetensors.numpy.save_file(apart, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensors .*mtp\.layers\.0\.mlp\.experts\.gate_up_proj"):
        zoo.load(tmp_path, parts=("mtp",))


# Tensors that the FP8 releases store in 8 bits, when experts are separate.
FP8 = r".*(_proj|in_proj_qkv|in_proj_z)\.weight"
# Their quantization_config, except for its list of modules that are not quantized.
QUANTIZED = dict(
    quant_method="fp8", activation_scheme="dynamic", weight_per_tensor=False, act_per_tensor=False,
    weight_block_size=[128, 128], modules_to_not_convert=["lm_head"],
)  # fmt: skip


@pytest.mark.thorough
def test_fp8_as_the_hub_has_it(tmp_path):
    """8-bit matrices with bfloat16 scales are read as their dequantised values, and saved in the same form."""
    wide = dict(hidden_size=160, moe_intermediate_size=136, num_hidden_layers=2, num_experts=3)
    config, random, stored, plain = CONFIG | wide, np.random.RandomState(4), {}, {}
    shapes = FAMILY.shapes(config) | FAMILY.further_shapes(config)
    tensors = {name: FAMILY.values(name, random.standard_normal(shape)) for name, shape in sorted(shapes.items())}
    for name, value in one_by_one(tensors).items():
        if re.fullmatch(FP8, name):
            codes = (100 * value).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            codes[::128, ::128] = 448  # so that saving finds the same scales
            scales = random.uniform(1e-4, 1e-3, [-(-n // 128) for n in value.shape]).astype(ml_dtypes.bfloat16)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            spread = scales.astype(np.float32).repeat(128, axis=0).repeat(128, axis=1)
            plain[name] = codes.astype(np.float32) * spread[: len(codes), : codes.shape[1]]
        else:
            kept = np.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else ml_dtypes.bfloat16
            stored[name] = value.astype(kept)
            plain[name] = stored[name].astype(np.float32)
    assert stored["mtp.layers.0.mlp.experts.2.up_proj.weight_scale_inv"].shape == (2, 2)
    folder = hub(tmp_path / "fp8", NAME, stored, text_config=config, quantization_config=QUANTIZED)
    tiny.write(tmp_path / "plain", NAME, **wide)
    safetensors.numpy.save_file(plain, tmp_path / "plain/model.safetensors")
    model = zoo.load(folder, dtype="float32", parts=("mtp",))
    assert same(model, zoo.load(tmp_path / "plain", parts=("mtp",)))
    assert zoo.load(folder).embed_tokens.weight.dtype == jnp.bfloat16

    zoo.save(on_host(model), tmp_path / "saved", fp8=True)
    assert convert.tensors.open_tensors(tmp_path / "saved").keys() == stored.keys()
    assert same(zoo.load(tmp_path / "saved", dtype="float32", parts=("mtp",)), model)


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
def test_fp8_of_the_largest():
    """The numbers of tensors and scales, and their bytes, equal those in the index of Qwen3.5-397B-A17B-FP8."""
    hub = json.loads((FACTS / "qwen3.5-397b-a17b.json").read_text())["config"]
    text = hub["text_config"] | dict(tie_word_embeddings=False)
    shapes = FAMILY.shapes(text) | FAMILY.further_shapes(text) | tiny.MODULES["qwen3_vl"].vision_shapes(hub)
    tensors, scales, size = 0, 0, 0
    for name, shape in shapes.items():
        *experts, rows, columns = shape if "experts." in name else (1, *shape[:1], math.prod(shape[1:]))
        count = math.prod(experts) * (2 if name.endswith("gate_up_proj") else 1)
        rows //= 2 if name.endswith("gate_up_proj") else 1
        quantized = re.fullmatch(FP8, name if experts == [1] else f"{name}.weight") is not None
        width = 1 if quantized else 4 if name.endswith(("A_log", "linear_attn.norm.weight")) else 2
        tensors, scales = tensors + count * (1 + quantized), scales + count * quantized
        size += count * (rows * columns * width + quantized * 2 * -(-rows // 128) * -(-columns // 128))
    assert (tensors, scales, size) == (189_042, 94_078, 406_125_181_280)


def test_decays_stay_in_float32(folders):
    model = zoo.load(folders["qwen3_5"], dtype="bfloat16")
    linear = next(m for path, m in surgery.modules(model, qwen3_5.GatedDeltaNet) if "period" in path)
    stored = tiny.tensors("qwen3_5")
    assert np.array_equal(linear.A_log.value[0], stored["model.layers.1.linear_attn.A_log"])
    assert linear.dt_bias.dtype == linear.norm.weight.dtype == jnp.bfloat16


@pytest.mark.thorough
@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
@pytest.mark.parametrize("name", FAMILY.MTP_PARAMETERS)
def test_parameters_with_mtp(name):
    """With the vision tower, model and MTP module have all numbers in the Hub's files."""
    facts, config = json.loads((FACTS / f"{name}.json").read_text()), zoo.config(name)
    count = sum(a.size for a in jax.tree.leaves(skeleton(qwen3_5.FAMILY, config, parts=("mtp",))))
    assert count == FAMILY.PARAMETERS[name] + FAMILY.MTP_PARAMETERS[name]
    assert count + FAMILY.vision_parameters(facts["config"]) == facts["hub_safetensors_total"]


# Multi-token prediction.


def oracle(tensors, x, following):
    """Computes features of the token after the next, in float64."""
    t, c = {name.removeprefix("mtp."): a.astype(np.float64) for name, a in tensors.items()}, CONFIG
    matrix = lambda y, name: y @ t[f"{name}.weight"].T
    silu, sigmoid = (lambda y: y / (1 + np.exp(-y))), (lambda y: 1 / (1 + np.exp(-y)))
    norm = lambda y, name: y / np.sqrt(np.mean(y**2, -1, keepdims=True) + 1e-6) * (1 + t[f"{name}.weight"])
    mlp = lambda y, name: matrix(
        silu(matrix(y, f"{name}.gate_proj")) * matrix(y, f"{name}.up_proj"), f"{name}.down_proj"
    )
    layer, (batch, seq, _), dim, turned = "layers.0", x.shape, c["head_dim"], c["head_dim"] // 4

    def rotated(y):
        angle = np.arange(seq)[:, None, None] * 1e4 ** -(np.arange(turned // 2) / (turned // 2))
        a, b, rest = np.split(y, [turned // 2, turned], axis=-1)
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], axis=-1
        )

    y = np.concatenate([norm(following, "pre_fc_norm_embedding"), norm(x, "pre_fc_norm_hidden")], axis=-1)
    y = matrix(y, "fc")
    normed, heads = norm(y, f"{layer}.input_layernorm"), lambda a: a.reshape(batch, seq, -1, dim)
    both = matrix(normed, f"{layer}.self_attn.q_proj").reshape(batch, seq, -1, 2, dim)
    q = rotated(norm(both[:, :, :, 0], f"{layer}.self_attn.q_norm"))
    k = rotated(norm(heads(matrix(normed, f"{layer}.self_attn.k_proj")), f"{layer}.self_attn.k_norm"))
    v = heads(matrix(normed, f"{layer}.self_attn.v_proj"))
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(dim)
    scores = np.exp(np.where(np.tri(seq, dtype=bool), scores - scores.max(-1, keepdims=True), -np.inf))
    seen = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v) * sigmoid(both[:, :, :, 1])
    y = y + matrix(seen.reshape(batch, seq, -1), f"{layer}.self_attn.o_proj")

    normed, mixture = norm(y, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
    out = mlp(normed, f"{mixture}.shared_expert") * sigmoid(matrix(normed, f"{mixture}.shared_expert_gate"))
    chances = np.exp(matrix(normed, f"{mixture}.gate"))
    chances = np.where(chances >= np.sort(chances, axis=-1)[..., -c["num_experts_per_tok"], None], chances, 0)
    chances /= chances.sum(-1, keepdims=True)
    gate, up = np.split(np.einsum("bsd,efd->bsef", normed, t[f"{mixture}.experts.gate_up_proj"]), 2, axis=-1)
    experts = np.einsum("bsef,edf->bsed", silu(gate) * up, t[f"{mixture}.experts.down_proj"])
    return norm(y + out + np.einsum("bse,bsed->bsd", chances, experts), "norm")


@pytest.mark.thorough
def test_one_more_token_and_its_loss(model, tensors):
    """The module's features equal the oracle's, and its loss on packed documents reaches all of it."""
    batch = dict(tokens=TOKENS[:, :-1], targets=TOKENS[:, 1:], loss_mask=jnp.ones((2, 39), jnp.int32))
    batch["segments"] = jnp.asarray(np.broadcast_to(np.where(np.arange(39) < 17, 1, 2), (2, 39)), jnp.int32)
    batch["positions"] = kernels.counted(batch["segments"])
    parameters, fixed = eqx.partition(model.mtp, eqx.is_inexact_array)

    @jax.jit
    def run(parameters, rest):
        def loss(parameters):
            whole = eqx.tree_at(lambda m: m.mtp, rest, eqx.combine(parameters, fixed), is_leaf=lambda x: x is None)
            total, _, sums, _ = cross_entropy(whole, batch, mtp_weight=1.0)
            return total, sums

        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(parameters)
        x, _, _ = rest.hidden(batch["tokens"])
        following = rest.embed_tokens(batch["targets"])
        y, _, _ = eqx.combine(parameters, fixed)(x, following, None, Tokens())
        return x, y, sums, gradient

    x, y, sums, gradient = run(parameters, eqx.tree_at(lambda m: m.mtp, model, None))
    embedded = tensors["model.embed_tokens.weight"][tiny.TOKENS[:, 1:]]
    close(y, oracle(tensors, np.asarray(x, np.float64), embedded.astype(np.float64)), terms=MODEL)
    assert sums["mtp_loss"] > 0 and all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.thorough
def test_greedy_with_mtp(model):
    """The linear layers' states are rolled back together with the tokens."""
    assert_greedy(model, zoo.complete(model, PROMPTS, draft=zoo.MTPDraft(model, 2), **SHAPE))


def test_mtp_has_rules_for_every_array(model):
    specs = surgery.partition_specs(model, qwen3_5.FAMILY.partition_rules)
    assert specs.mtp.layers[0].mlp.experts.gate_up_proj.weight == jax.P("expert", "tensor", "fsdp")
    assert specs.layers.period[0].linear_attn.in_proj_qkv.weight == jax.P("stage", "tensor", "fsdp")
    with pytest.raises(ValueError, match="mtp needs mtp_num_hidden_layers=1, not 0"):
        qwen3_5.Model(
            qwen3_5.Config(64, 32, 1, 2, 1, intermediate_size=8, mtp_num_hidden_layers=0),
            key=jax.random.key(0),
            parts=("mtp",),
        )
