"""Users' mistakes: each is reported in one sentence that names the file, and the tensor or key."""

import contextlib
import json
import pathlib
import pickle
import random
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.reliability import trials
from tests.zoo import tiny


NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path):
    return tiny.write(tmp_path / "model", "qwen3-tied")


def edit(folder, change):
    tensors = tiny.tensors("qwen3-tied")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def refused(folder, *words, **kwargs):
    with pytest.raises(ValueError) as info:
        zoo.load(folder, **kwargs)
    message = str(info.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_missing_tensor(folder):
    edit(folder, lambda t: t.pop(NORM))
    refused(folder, str(folder), NORM, "lacks 1 tensors")


def test_extra_tensor(folder):
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}))
    refused(folder, str(folder), "model.layers.0.self_attn.q_proj.bias", "no place")


def test_misshaped_tensor(folder):
    edit(folder, lambda t: t.update({NORM: np.ones(31, np.float32)}))
    refused(folder, "model.safetensors", NORM, "(31,)", "(32,)")


def test_integers_for_weights(folder):
    edit(folder, lambda t: t.update({NORM: np.ones(32, np.int8)}))
    refused(folder, "model.safetensors", NORM, "int8")


def test_layers_of_different_dtypes(folder):
    edit(folder, lambda t: t.update({NORM: np.ones(32, np.float16)}))
    refused(folder, NORM, "float16", "float32", "dtype=")
    assert zoo.load(folder, dtype="float32").layers.period[0].input_layernorm.weight[1].tolist() == [1] * 32


UP, EMBED = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "name, value, options",
    [
        (UP, np.nan, {}),
        (EMBED, np.inf, {"dtype": "bfloat16"}),
        (NORM, -np.inf, {"mesh": "fsdp=8"}),
        (UP, np.nan, {"quantize": "int8"}),
        (EMBED, -0.0, {}),
        (UP, 0, {"dtype": "bfloat16"}),
        (UP, 0, {"mesh": "fsdp=8"}),
        (UP, 0, {"quantize": "int8"}),
    ],
)
def test_values_that_no_model_has(folder, name, value, options):
    """A value that is not finite is refused, and a matrix of zeros, be it stacked, mapped, cast, split or quantised."""

    def change(tensors):
        if value:
            tensors[name].flat[-1] = value
        else:
            tensors[name][:] = value

    edit(folder, change)
    says = "holds NaN or infinities" if value else "holds nothing but zeros"
    refused(folder, f"{name} in {folder}/model.safetensors {says}", "check_values=False", **options)
    if not options:
        zoo.load(folder, check_values=False)


def test_zeros_that_models_have(folder):
    """Norms and biases may be zero, and half of a matrix, because a process on another mesh may have only that half."""

    def change(tensors):
        tensors[NORM][:] = 0
        tensors[UP][: len(tensors[UP]) // 2] = 0

    edit(folder, change)
    for options in ({}, {"mesh": "fsdp=8"}, {"quantize": "int8"}):
        zoo.load(folder, **options)


def test_values_too_large_for_the_dtype(folder):
    edit(folder, lambda t: t[UP].__setitem__(0, 1e5))
    refused(folder, UP, "holds NaN or infinities in float16", dtype="float16")
    zoo.load(folder)


def test_files_of_another_export(folder, tmp_path):
    zoo.save(zoo.load(folder), tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    refused(tmp_path / "saved", f"{tmp_path}/saved/model.safetensors is not what was written", "verify=False")
    zoo.load(tmp_path / "saved", verify=False)


def damaged(raw, header, choose):
    """Returns bytes with some bits flipped among the first `header`, or some bytes cut off, removed or inserted."""
    changed, at = bytearray(raw), choose.randrange(header)
    match choose.choice(["flip", "flip", "flip", "cut", "drop", "insert", "zero"]):
        case "flip":
            for _ in range(choose.randint(1, 3)):
                changed[choose.randrange(header)] ^= 1 << choose.randrange(8)
        case "cut":
            del changed[choose.randrange(len(raw)) :]
        case "drop":
            del changed[at : at + choose.randint(1, 8)]
        case "insert":
            changed[at:at] = choose.randbytes(choose.randint(1, 8))
        case "zero":
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
    return bytes(changed)


def test_damage_makes_no_wrong_model(folder, tmp_path, record_property):
    """A damaged folder gives the same model, bit by bit, or one sentence that names the file. In others' folders the
    headers and the index are damaged, and files are cut short. In folders by `zoo.save`, which have hashes, any byte is
    damaged.
    """
    tensors, choose = tiny.tensors("qwen3-tied"), random.Random(0)
    model = zoo.load(folder)
    bits = lambda model: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]
    right = bits(model)
    zoo.save(model, tmp_path / "hashed")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    where = {tensor: names[n % 2] for n, tensor in enumerate(tensors)}
    for name in names:
        shard = {tensor: array for tensor, array in tensors.items() if where[tensor] == name}
        safetensors.numpy.save_file(shard, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    hashed = [tmp_path / "hashed" / name for name in ("model.safetensors", "model.safetensors.manifest.json")]
    files = [folder / name for name in (*names, "model.safetensors.index.json")]
    refused = 0
    for _ in range(count := trials(300, 10_000, 100_000)):
        path = choose.choice([*files, *hashed])
        raw = path.read_bytes()
        head = 8 + int.from_bytes(raw[:8], "little") if path in files[:2] else len(raw)
        path.unlink()
        path.write_bytes(damaged(raw, head, choose))
        try:
            same = bits(zoo.load(path.parent)) == right
        except (ValueError, OSError) as error:
            refused += 1
            assert str(path.parent) in str(error) and "\n" not in str(error), error
            assert any(each.name in str(error) for each in path.parent.iterdir()), error
        else:
            assert same, f"a wrong model of a damaged {path.name}"
        path.unlink()
        path.write_bytes(raw)
    assert bits(zoo.load(folder)) == right and refused > 0.8 * count
    record_property("figure", f"{count} damaged: 0 wrong, {refused} refused, each naming a file")


EVENTS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
)


def test_nothing_of_a_repository_is_run(folder, tmp_path):
    """In a repository full of code, with a config that names it, only data files are opened."""
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').write('1')"
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "__init__.py",
        "sitecustomize.py",
    ):
        (folder / name).write_text(code)

    class Evil:
        def __reduce__(self):
            return exec, (code,)

    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "model.pkl", "tf_model.h5", "weights.npz"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config |= {"auto_map": classes, "_attn_implementation_internal": "evil/kernel"}
    zoo.load(folder)  # imports everything that is imported at first use
    tiny.write_tokenizer(folder)
    zoo.tokenizer(folder)
    seen, watching = [], True

    def watch(event, arguments):
        if watching and (event in EVENTS or (event in ("open", "import", "compile", "exec"))):
            seen.append((event, str(arguments[0] if event != "compile" else arguments[1])))

    sys.addaudithook(watch)  # until Python ends
    try:
        zoo.load(folder)
        zoo.tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(ValueError):  # keys that the model does not have
            zoo.load(folder)
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).unlink()
            with pytest.raises((ValueError, OSError)):
                (zoo.load if name.startswith("model") else zoo.tokenizer)(folder)
    finally:
        watching = False
    assert not ran.exists() and not [event for event in seen if event[0] in EVENTS]
    opened = {pathlib.Path(name).name for _, name in seen if str(folder) in name}
    assert "config.json" in opened and "model.safetensors" in opened
    assert not [name for name in opened if not name.endswith((".json", ".safetensors", ".jinja", ".model"))], opened


def test_an_untied_head_in_a_tied_model(folder):
    embed = tiny.tensors("qwen3-tied")["model.embed_tokens.weight"]
    edit(folder, lambda t: t.update({"lm_head.weight": embed}))
    zoo.load(folder)  # Qwen3-0.6B repeats it, and nothing is lost
    edit(folder, lambda t: t.update({"lm_head.weight": embed + 1}))
    refused(folder, "model.safetensors", "lm_head.weight", "differs from model.embed_tokens.weight")


def test_stale_rotary_buffers_are_known(tmp_path):
    folder = tiny.write(tmp_path / "model", "llama")
    tensors = tiny.tensors("llama")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # Llama 2's files have them
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    zoo.load(folder)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(attention_chunk_size=8), ["attention_chunk_size", "does not know", "--ignore-keys attention_chunk_size"]),
        (dict(hidden_act="gelu"), ["hidden_act='gelu'", "only 'silu' and 'swish'"]),
        (dict(num_key_value_heads=3), ["num_attention_heads=4", "no multiple", "num_key_value_heads=3"]),
        (dict(num_hidden_layers=10**9), ["num_hidden_layers=1000000000", "less than 100000"]),
        (dict(num_hidden_layers=0), ["num_hidden_layers=0", "more than 0"]),
        (dict(rms_norm_eps=-1e-6), ["rms_norm_eps=-1e-06", "0 or more"]),
        (dict(rope_theta=0), ["rope_theta=0", "more than 0"]),
        (dict(head_dim=15), ["rope_theta=10000.0", "heads of 15"]),
        (dict(head_dim=2 * 10**9), ["rope_theta=10000.0", "heads of 2000000000"]),
        (dict(text_config="x"), ["text_config='x'", "object"]),
        (dict(rope_scaling="yarn"), ["rope_scaling='yarn'", "object"]),
        (dict(rope_parameters=[1]), ["rope_parameters=[1]", "object"]),
        (dict(rope_scaling=dict(rope_type="linear", factor=0)), ["factor=0", "more than 0"]),
        (dict(rope_scaling=dict(rope_type="linear", factor=None)), ["'linear' lacks 'factor'"]),
        (dict(rope_scaling=dict(rope_type="linear", factor="2")), ["factor='2'", "float"]),
        (dict(rope_scaling=dict(rope_type=["linear"], factor=2)), ["rope scaling ['linear']"]),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0), rope_theta=1.0), ["rope_theta=1.0", "no angles"]),
        (dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5", "whole heads"]),
        (dict(hidden_size="32"), ["hidden_size='32'", "int"]),
        (dict(layer_types=["full_attention"] * 2 + ["linear_attention"]), ["layer_types=", "'linear_attention'"]),
        (dict(layer_types=["full_attention"] * 2), ["layer_types has 2 entries", "3"]),
        (dict(layer_types=["full_attention"] * 100_001), ["needs at most 100000 entries, and there are 100001."]),
        (dict(rope_scaling=dict(rope_type="su", factor=2.0)), ["'su'", "llama3, yarn, dynamic, longrope"]),
        (dict(rope_scaling=dict(rope_type="longrope", long_factor=[1.0])), ["'longrope' lacks 'short_factor'"]),
        (
            dict(rope_scaling=dict(rope_type="longrope", long_factor=[1.0], short_factor=[2.0])),
            ["short_factor and long_factor need 8 numbers"],
        ),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0, twist=1)), ["'linear' has no 'twist'"]),
        (dict(model_type="rwkv"), ["model_type 'rwkv'", "implemented are deepseek_v2"]),
        (dict(num_hidden_layers=4), ["lacks 11 tensors", "model.layers.3."]),
        (dict(num_hidden_layers=10_000), ["10000 layers", "35 tensors"]),
        (dict(num_hidden_layers=2), ["has 11 tensors", "no place"]),
        (dict(quantization_config=dict(quant_method="fp8")), ["quantization_config"]),
    ],
)
def test_config(tmp_path, change, words):
    folder = tiny.write(tmp_path / "model", "qwen3-tied", **change)
    refused(folder, str(folder), *words)


def test_config_lacks_a_key(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json", "lacks 'hidden_size'")


def test_config_is_broken(folder):
    (folder / "config.json").write_text('{"model_type": "qwen3",')
    refused(folder, "config.json")


@pytest.mark.parametrize("dtype", ["bfloat17", "int8", "float64"])
def test_wrong_dtype_string(folder, dtype):
    refused(folder, repr(dtype), "bfloat16", dtype=dtype)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'qwen9-1b' is no zoo name.*zoo.names\(\)"):
        zoo.load("qwen9-1b")


def test_a_near_miss_of_a_name():
    for given, meant in ("Qwen3-0.6B", "qwen3-0.6b"), ("llama-3.1-8b", "llama3.1-8b"), ("tinny", "tiny"):
        with pytest.raises(ValueError, match=f"{given!r} is no zoo name.* did you mean {meant}"):
            zoo.tokenizer(given)


def test_a_mesh_by_its_description(folder):
    with pytest.raises(ValueError, match="'fdsp=-1' in the mesh"):
        zoo.load(folder, mesh="fdsp=-1")
    model = zoo.load(folder, mesh="fsdp=-1")
    assert model.embed_tokens.weight.sharding.mesh == zoo.make_mesh("fsdp=-1")


def test_absent_folder():
    with pytest.raises(OSError, match=r"no folder .*nowhere"):
        zoo.load("./nowhere")


def test_folder_without_a_config(tmp_path):
    with pytest.raises(OSError, match=r"config\.json"):
        zoo.load(tmp_path)


def test_a_url_where_a_folder_is_written(folder):
    with pytest.raises(
        ValueError, match="folder gs://bucket/x is in an object store, and must be a path of this machine"
    ):
        zoo.save(zoo.load(folder), "gs://bucket/x")
