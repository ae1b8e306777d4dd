"""GLM-4.5's own feature: its module for one more token, in files with copies of embedding and head and without."""

import jax
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, on_host, same
from tests.zoo.test_speculative import PROMPTS, SHAPE, assert_greedy
from zoo import surgery
from zoo.models import glm4_moe
from zoo.weights.checkpoint import skeleton


FAMILY, NAME = tiny.MODULES["glm4_moe"], "glm4_moe"
CONFIG = tiny.CONFIGS[NAME]


@pytest.fixture(scope="module")
def tensors():
    """Returns the tensors of the checkpoint, including those of the MTP module as in GLM-4.6."""
    random, out = np.random.RandomState(2), tiny.tensors(NAME)
    for name, shape in sorted(FAMILY.further_shapes(CONFIG).items()):
        out[name] = FAMILY.values(name, random.standard_normal(shape)).astype(np.float32)
    return out


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    """Returns the folder of a checkpoint with these, and with copies of embedding and head as in GLM-4.5."""
    folder = tiny.write(tmp_path_factory.mktemp("further"), NAME)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    copies = {f"model.layers.3.{copy}.weight": tensors[f"{name}.weight"] for copy, name in copies.items()}
    safetensors.numpy.save_file(tensors | copies, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, parts=("mtp",))


def test_round_trip(folder, model, tensors, load, tmp_path):
    """The module is skipped, or loaded, given rules, and exported bit by bit; its size is that of the Hub's files."""
    assert same(zoo.load(folder), load(NAME))
    zoo.save(on_host(model), tmp_path)
    after = convert.tensors.open_tensors(tmp_path)
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name].view(), tensors[name]) for name in after)
    assert same(zoo.load(tmp_path, parts=("mtp",)), model)
    specs = surgery.partition_specs(model, glm4_moe.FAMILY.partition_rules).mtp
    assert specs.block.mlp.experts.up_proj.weight == jax.P("expert", "tensor", "fsdp")
    config = zoo.config("glm4.6")
    size = lambda *parts: sum(x.size for x in jax.tree.leaves(skeleton(glm4_moe.FAMILY, config, parts)))
    assert size("mtp") - size() == 3_988_069_792
    with pytest.raises(ValueError, match="mtp needs num_nextn_predict_layers=1, not 0"):
        zoo.load(tiny.write(tmp_path / "air", "glm4_moe-air-new"), parts=("mtp",))


@pytest.mark.live
def test_further_is_transformers(folder, model, monkeypatch):
    torch = pytest.importorskip("torch", reason="live parity needs transformers and torch")
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    layers, caches = transformers.modeling_layers, transformers.cache_utils
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no multi-token prediction")
    monkeypatch.setattr(transformers.Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    load = transformers.AutoModelForCausalLM.from_pretrained
    main = load(folder, dtype="float32", attn_implementation="eager").eval()
    module = layers.MtpModel.from_pretrained(main).eval()
    tokens, positions = torch.tensor(tiny.TOKENS), torch.arange(1, 40)[None].repeat(2, 1)
    with torch.no_grad():
        states = main(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        cache = caches.MtpCache(config=main.config.get_mtp_config())
        theirs = main.lm_head(module.forward_layer(0, states, positions, cache, input_ids=tokens[:, 1:])).numpy()
    x, _, _ = model.hidden(TOKENS[:, :-1])
    y, _, _ = model.mtp(x, model.embed_tokens(TOKENS[:, 1:]), None, Tokens())
    close(model.unembed(y), theirs, terms=MODEL)


@pytest.mark.thorough
def test_greedy_with_mtp(model):
    """The module drafts, with its own cache of keys and values; the text is the model's."""
    assert_greedy(model, zoo.complete(model, PROMPTS, draft=zoo.MTPDraft(model, 2), **SHAPE))
