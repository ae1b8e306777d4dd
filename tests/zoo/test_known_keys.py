"""Keys of config.json that transformers does not read are skipped, all others are read or refused, and `ignore` is the
way out; on the files of real repositories, too.
"""

import contextlib
import json
import logging
import pathlib
import sys

import numpy as np
import pytest
import tyro

import zoo
import zoo.chat
from convert.files import read_json
from tests.zoo import tiny
from train.sft import SFTOptions
from zoo import registry
from zoo.config import known_keys, read, write
from zoo.source import Source


# What tools leave in the config.json of a Llama or a Qwen3, and transformers 5.24 does not read there.
LEFTOVERS = {
    "_model_name_or_path": "org/base", "_num_labels": 2, "add_bos_token": True, "add_cross_attention": False,
    "adapter_path": "adapters", "architecture": "llama", "axolotl_version": "0.9", "base_model": "org/base",
    "base_model_name_or_path": "org/base", "bos_token": "<s>", "calibration": {}, "chat_template": "x",
    "cross_attention_hidden_size": 8, "data_seed": 1, "datasets": ["org/data"], "diversity_penalty": 0.5,
    "do_sample": True, "early_stopping": True, "eos_token": "</s>", "finetuned_from": "org/base",
    "finetuning_task": "chat", "freeze_backbone": False, "gguf": {}, "gradient_checkpointing_kwargs": {},
    "internal_version": "7b", "is_decoder": True, "is_llama_config": True, "k_codes": 50, "kv_cache_dtype": "fp8",
    "language": ["en"], "layer_norm_eps": 1e-5, "length_penalty": 2.0, "library_name": "mlx", "license": "mit",
    "lora_alpha": 16, "lora_r": 8, "max_length": 20, "max_new_tokens": 9, "max_seq_length": 4096,
    "merge_method": "slerp", "min_length": 1, "mlx_lm": {"version": "0.28"}, "model_name": "mine", "n_positions": 8,
    "n_shared_experts": 1, "neftune_noise_alpha": 5, "num_beams": 4, "num_parameters": 7_000_000,
    "optimum_version": "1.2", "original_vocab_size": 32000, "output_scores": True, "pad_token": "<pad>",
    "pipeline_tag": "text-generation", "prefix": "x", "pruned_heads": {}, "quantization": {"bits": 4},
    "remove_invalid_values": True, "repetition_penalty": 1.1, "seq_length": 2048, "tags": ["chat"],
    "temperature": 0.6, "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_model_max_length": 8192,
    "tokenizer_padding_side": "right", "top_k": 50, "top_p": 0.9, "torchscript": False, "trained_with": "trl",
    "training_args": {"lr": 1e-4}, "transformers.js_config": {"dtype": "q4"}, "unk_token_id": 0, "unsloth_fixed": True,
    "unsloth_tiled_mlp": False, "unsloth_version": "2025.9", "use_bfloat16": False, "use_dynamic_ntk": True,
    "use_flash_attention_2": True, "use_flash_attn": True, "use_logn_attn": False, "vllm_config": {"max": 1},
}  # fmt: skip
OF_QWEN = {"max_window_layers": 21, "use_sliding_window": False}  # which a Llama that was a Qwen may still have
REAL = json.loads(pathlib.Path(__file__).with_name("real_configs.json").read_text())


def config_of(hub, **options):
    return read(registry.family_for(hub), hub, **options)


@contextlib.contextmanager
def refusal(*words):
    """Expects one ValueError in a single line, with these words."""
    with pytest.raises(ValueError) as info:
        yield
    message = str(info.value)
    assert "\n" not in message and [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("name, more", [("llama", OF_QWEN), ("qwen3", {})])
def test_leftovers_are_skipped_with_one_warning(name, more, caplog):
    hub, more = tiny.CONFIGS[name], LEFTOVERS | more
    assert len(more) >= 80
    with caplog.at_level(logging.WARNING, "zoo"):
        assert config_of(hub | more) == config_of(hub)
    (record,) = caplog.records
    assert record.getMessage().endswith(f" does not read them: {', '.join(sorted(more))}")


def test_keys_that_the_code_of_a_repository_may_read(caplog):
    config_of(tiny.CONFIGS["llama"] | {"k_codes": 50, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    (record,) = caplog.records
    assert record.getMessage().endswith("read them (the repository's own code, which is not run, might): k_codes")


@pytest.mark.parametrize("name", sorted(tiny.CONFIGS))
def test_keys_that_transformers_reads_are_not_skipped(name, caplog):
    """With a nonsensical value of each the file is refused, unless the family knows the key as one without effect."""
    hub = tiny.CONFIGS[name]
    if (known := known_keys()["types"].get(hub["model_type"])) is None:
        with refusal("'k_codes' (= 50)", "does not know"):  # transformers has no class, so that nothing is known
            config_of(hub | {"k_codes": 50})
        return
    for key in [*known["keys"], "per_layer_config", "swiglu_limit", "attention_chunk_size"]:
        with contextlib.suppress(ValueError):
            config_of(hub | {key: "?"})
        skipped = [record.getMessage().rpartition(" does not read them: ")[2].split(", ") for record in caplog.records]
        assert not any(key in keys for keys in skipped), key


def test_all_problems_in_one_message(tmp_path):
    changes = dict(hidden_size="32", hidden_act="gelu", attention_chunk_size=8, swiglu_limit=7.0)
    folder = tiny.write(tmp_path, "qwen3", rope_scaling=dict(rope_type="su"), k_codes=50, **changes)
    hub = read_json(folder / "config.json")
    del hub["vocab_size"]
    (folder / "config.json").write_text(json.dumps(hub))
    way = "ignore=('hidden_act', 'attention_chunk_size', 'swiglu_limit'), or --ignore-keys hidden_act attention"
    numbered = [f"({n}) " for n in range(1, 7)]
    says = "hidden_size='32'", "hidden_act='gelu'", "(= 8)", "(= 7.0)", "scaling 'su'", "lacks 'vocab_size'", way
    with refusal(str(folder / "config.json"), "6 problems", *numbered, *says):
        zoo.load(folder)


def test_ignored_keys(tmp_path, caplog):
    folder = tiny.write(tmp_path, "qwen3", attention_chunk_size=8, hidden_act="gelu", k_codes=50)
    keys, plain = ("attention_chunk_size", "hidden_act", "absent"), config_of(tiny.CONFIGS["qwen3"])
    with caplog.at_level(logging.WARNING, "zoo"):
        assert zoo.config(folder, ignore=keys) == plain
    (record,) = caplog.records
    assert record.getMessage().endswith("read them: k_codes; ignored, as asked: attention_chunk_size, hidden_act")
    assert zoo.load(folder, ignore=keys).config == zoo.inspect(folder, ignore=keys) == plain
    opened = Source.open(folder, ignore=keys)
    assert zoo.load(opened).config == plain
    with refusal("opened before", "keys to ignore"):
        zoo.config(opened, ignore=keys)
    with refusal("'attention_chunk_size' (= 8)"):
        zoo.config(folder, ignore="hidden_act")
    caplog.clear()
    zoo.save(zoo.load(opened), tmp_path / "saved")
    caplog.clear()
    assert zoo.config(tmp_path / "saved") == plain and not caplog.records


def test_keys_that_the_model_needs_cannot_be_ignored(tmp_path):
    folder = tiny.write(tmp_path, "qwen3", attention_chunk_size=8)
    for key in "hidden_size", "rope_theta", "rms_norm_eps":
        with refusal(f"{key!r}, a key to ignore, which qwen3 reads: without it, the model would be another"):
            zoo.config(folder, ignore=("attention_chunk_size", key))
    with refusal("hidden_size='32'", "'hidden_size', a key to ignore"):
        zoo.config(tiny.write(tmp_path, "qwen3", hidden_size="32"), ignore=("hidden_size",))


def test_the_option_of_commands_and_scripts(tmp_path):
    folder = str(tiny.write(tmp_path, "qwen3", attention_chunk_size=8))
    plain, args = config_of(tiny.CONFIGS["qwen3"]), ["--ignore-keys", "attention_chunk_size", "twist"]
    assert tyro.cli(zoo.chat.LoadOptions, args=args).open(folder).config == plain
    options = SFTOptions.of(data=("x",), model=folder, ignore_keys=("attention_chunk_size", "twist"))
    assert options.source.open(options.model).config == plain


def test_objects_within_the_file(caplog):
    """The same rule holds in `text_config`, in `vision_config` and beside them, each by transformers' class of it."""
    hub = tiny.SEEING["gemma3-pattern"].config()
    within = lambda **more: {key: hub[key] | more for key in ("text_config", "vision_config")}
    with caplog.at_level(logging.WARNING, "zoo"):
        assert config_of(hub | within(k_codes=50, unsloth_fixed=True) | dict(audio_config={})) == config_of(hub)
    (record,) = caplog.records
    keys = "audio_config, k_codes, unsloth_fixed, vision_config.k_codes, vision_config.unsloth_fixed"
    assert record.getMessage().endswith(f"read them: {keys}")
    # A text model's key beside `text_config`, and one of each part that transformers reads there.
    wrong = hub | within(attention_chunk_size=8) | dict(swiglu_limit=1.0)
    names = "swiglu_limit", "vision_config.attention_chunk_size", "attention_chunk_size"
    with refusal("3 problems", f"--ignore-keys {' '.join(names)}"):
        config_of(wrong)
    assert config_of(wrong, ignore=names) == config_of(hub)
    with refusal("'vision_config.hidden_size', a key to ignore, which gemma3 reads"):
        config_of(hub, ignore=("vision_config.hidden_size",))


@pytest.mark.parametrize("case", REAL, ids=lambda case: case["from"].split(":")[0].split("/")[1])
def test_real_files(case, caplog):
    """Files of real repositories are read, saved, and read again without a warning; or refused for the right reason."""
    hub, family = case["config"], registry.family_for(case["config"])
    if "refused" in case:
        with refusal(case["refused"]):
            read(family, hub)
        return
    config = read(family, hub)
    skipped = [record.getMessage().rpartition(" does not read them: ")[2] for record in caplog.records]
    assert skipped == ([case["skipped"]] if "skipped" in case else [])
    caplog.clear()
    assert read(family, write(config, family, np.dtype("float32"))) == config and not caplog.records


def test_there_are_enough_real_files():
    assert len({case["from"] for case in REAL}) == len(REAL) and sum("refused" not in case for case in REAL) >= 40


@pytest.mark.live
def test_the_keys_are_those_of_the_installed_transformers():
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    from tests.zoo import make_known_keys

    if transformers.__version__ != known_keys()["transformers"]:
        pytest.skip(f"the keys are those of transformers {known_keys()['transformers']}")
    assert json.loads(make_known_keys.FILE.read_text()) == make_known_keys.known_keys()


@pytest.mark.live
@pytest.mark.parametrize("family", sorted(tiny.MODULES))
def test_keys_that_transformers_asks_for_are_known(family, theirs, monkeypatch):
    """While a model is made, run and generates, its configs are asked for known keys alone."""
    torch = pytest.importorskip("torch", reason="live parity needs transformers and torch")
    from transformers.configuration_utils import PreTrainedConfig

    asked, known, get = set(), known_keys(), PreTrainedConfig.__getattribute__
    # The first looks for ids of tokens in every key that there is; the second for settings of generation, which configs
    # do not keep; the third for arguments of `from_pretrained`.
    others = "validate_token_ids", "_get_generation_parameters", "from_dict"

    def recorded(self, key):
        if not key.startswith("__") and sys._getframe(1).f_code.co_name not in others:
            asked.add((get(self, "model_type"), key))
        return get(self, key)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", recorded)
    name = next(iter(tiny.MODULES[family].CONFIGS))
    model = theirs(name)
    with torch.no_grad():
        model.generate(torch.tensor(tiny.TOKENS[:1, :8]), max_new_tokens=2, do_sample=False)
    keys = {kind: entry["keys"] | known["shared"] for kind, entry in known["types"].items()}
    assert len(asked) > 20 and {(kind, key) for kind, key in asked if kind in keys and key not in keys[kind]} == set()
