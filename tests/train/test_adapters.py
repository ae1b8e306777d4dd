"""Adapters in fine-tuning: training, checkpoints, exports and resuming, over which weights; and uploads."""

import json
import math
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import convert.hub
import convert.tensors
import zoo.__main__
from tests.close import close
from tests.train.conftest import devices, losses, run
from tests.zoo import tiny
from tests.zoo.programs import MODEL, same, thorough
from train.base.source import SourceOptions
from train.data.packing import Chat
from train.run import finetune, folder
from train.state.optim import make_schedule
from train.state.state import Lora
from zoo import lora
from zoo.orbax import to_hub
from zoo.source import Source
from zoo.surgery import modules
from zoo.weights import peft


pytestmark = pytest.mark.usefixtures("quick")

LORA = Lora(rank=2)
forward = eqx.filter_jit(lambda model, tokens: model(tokens))


# ======================================================================================================================
# Adapters.
# ======================================================================================================================


def adapted(base, out, **changes):
    """Runs `train.sft`, and returns its metrics and the model with adapters at its end."""
    models = []
    with pytest.MonkeyPatch.context() as patch:
        save = peft.save
        patch.setattr(folder.peft, "save", lambda model, *args, **kw: (models.append(model), save(model, *args, **kw)))
        metrics = run(base, out, **dict(lora=LORA, lr=3e-2) | changes)
    return metrics, *models


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora")
    return out, *adapted(base, out)


def stored(out, step=8):
    """Returns path -> number of elements, for the arrays in a checkpoint."""
    state = json.loads((out / "checkpoints" / str(step) / "meta.json").read_text())["state"]
    return {path: math.prod(json.loads(text[text.index("[") :])) for path, text in state.items()}


def test_adapters_are_all_that_is_kept(model, tuned):
    """Weights do not change and are not in the checkpoint, nor has the optimizer moments for them."""
    out, metrics, trained = tuned
    assert np.mean(losses(metrics)[-2:]) < losses(metrics)[0] - 0.3
    adapters, frozen = lora.split(trained)
    size = sum(a.size for a in jax.tree.leaves(adapters))
    assert size < 0.3 * sum(a.size for a in jax.tree.leaves(frozen))
    arrays = stored(out)
    assert sum(n for path, n in arrays.items() if path.startswith("model.")) == size
    assert sum(n for path, n in arrays.items() if path.startswith("opt_state.") and n > 1) == 2 * size
    assert all(path.endswith((".a", ".b")) for path, n in arrays.items() if n > 1)
    assert same(lora.bare(trained), model)


def test_the_adapter_on_disk_is_the_trained_one(base, model, tuned, capsys):
    out, _, trained = tuned
    assert not (out / "model").exists()
    assert "library_name: peft\n" in (out / "adapter" / "README.md").read_text()
    tokens = jnp.asarray(tiny.TOKENS)
    logits = np.asarray(forward(trained, tokens))
    assert np.array_equal(forward(peft.load(model, out / "adapter"), tokens), logits)
    assert np.abs(logits - forward(model, tokens)).max() > 0.1
    zoo.__main__.merge(str(base / "model"), out / "adapter", out / "merged")
    assert "WARNING" not in capsys.readouterr().out
    close(forward(zoo.load(out / "merged"), tokens), logits, terms=MODEL)


@pytest.mark.thorough
def test_another_chat_template(base, tmp_path):
    """The template is saved with the adapter, or with the model from any checkpoint. Another one is another run."""
    text = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).write_text(text)
    chat = Chat(template=str(tmp_path / "a.jinja"))
    run(base, tmp_path / "out", lora=LORA, lr=3e-2, chat=chat)
    assert (tmp_path / "out" / "adapter" / "chat_template.jinja").read_text() == text
    zoo.__main__.merge(str(base / "model"), tmp_path / "out" / "adapter", tmp_path / "merged")
    assert zoo.tokenizer(tmp_path / "merged").chat_template == text
    run(base, tmp_path / "whole", chat=chat)
    to_hub(tmp_path / "whole", tmp_path / "hub")
    for out in (tmp_path / "whole" / "model", tmp_path / "hub"):
        assert zoo.tokenizer(out).chat_template == text
    run(base, tmp_path / "whole", chat=Chat(template=str(tmp_path / "b.jinja")))  # the same text in another file
    (tmp_path / "b.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    with pytest.raises(ValueError, match=r"of another run: its identity.data.sets.0.tokenizer"):
        run(base, tmp_path / "whole", chat=Chat(template=str(tmp_path / "b.jinja")))


@pytest.fixture(scope="module")
def rounded(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("int8")
    return out, *adapted(base, out, quantize="int8")


def assert_over_rounded_weights(out, metrics, trained, tuned):
    """Checks that a checkpoint of QLoRA is as large as one of LoRA, and that the losses are nearly the same."""
    assert any(modules(trained, zoo.quantized.QuantizedLinear))
    assert stored(out) == stored(tuned[0])
    assert np.mean(losses(metrics)[-2:]) < losses(metrics)[0] - 0.3
    assert 0 < np.abs(np.subtract(losses(metrics), losses(tuned[1]))).mean() < 0.2


@pytest.mark.thorough
def test_what_an_adapter_was_trained_over(base, tuned, rounded, tmp_path, monkeypatch, capsys):
    """The adapter names its base as PEFT finds it. Merging warns about another base, or about other rounding."""
    config = json.loads((tuned[0] / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((base / "model").resolve()) and config["revision"] is None
    assert peft.base_name("qwen3-0.6b") == "Qwen/Qwen3-0.6B" and peft.base_name("org/name") == "org/name"
    assert zoo.config(peft.base_name("tiny")) == zoo.config("tiny")
    over = json.loads((rounded[0] / "adapter" / "base.json").read_text())
    assert over == {"revision": None, "weights": zoo.fingerprint(base / "model"), "quantize": "int8"}
    assert not peft.warnings_of(rounded[0] / "adapter", quantize="int8")
    monkeypatch.setattr(lora, "merge", lambda model: model)
    monkeypatch.setattr(zoo, "save", lambda *_, **__: None)
    zoo.__main__.merge(str(base / "model"), rounded[0] / "adapter", tmp_path)
    said = capsys.readouterr().out
    assert "trained over weights quantised to int8; these are not quantised" in said and "other weights" not in said
    tiny.write(tmp_path / "another", "qwen3", eos_token_id=63)
    tensors = convert.tensors.open_tensors(base / "model")
    changed = {name: np.array(tensor.view()) * 2 for name, tensor in tensors.items()}
    safetensors.numpy.save_file(changed, tmp_path / "another" / "model.safetensors", metadata={"format": "pt"})
    zoo.__main__.merge(str(tmp_path / "another"), tuned[0] / "adapter", tmp_path)
    said = capsys.readouterr().out
    assert "was trained over other weights than these" in said and "quantised" not in said


@pytest.mark.thorough
def test_over_rounded_weights(rounded, tuned):
    assert_over_rounded_weights(*rounded, tuned)


@pytest.mark.thorough
def test_over_weights_of_four_bits(base, tmp_path):
    slower = dict(lr=1e-2, hold_out=0.05)
    tuned = tmp_path / "float", *adapted(base, tmp_path / "float", **slower)
    assert_over_rounded_weights(tmp_path / "nf4", *adapted(base, tmp_path / "nf4", quantize="nf4", **slower), tuned)


@pytest.mark.thorough
def test_adapters_on_a_mesh(base, rounded, tmp_path, monkeypatch, stop_after):
    """On a mesh, the losses equal one device's, also over rounded weights."""
    devices(monkeypatch, 4)
    stop_after(2)
    metrics = run(base, tmp_path, mesh="fsdp=2,tensor=2", lora=LORA, quantize="int8", lr=3e-2)
    close(losses(metrics), losses(rounded[1])[:2], terms=2 * MODEL)


@pytest.mark.thorough
def test_adapters_in_a_pipeline(base, tmp_path, monkeypatch):
    options = dict(steps=2, batch=12, lora=LORA)
    want = losses(run(base, tmp_path / "one", **options))
    devices(monkeypatch, 6)
    metrics = run(base, tmp_path / "many", mesh="stage=3,fsdp=2", **options)
    close(losses(metrics), want, terms=2 * MODEL)


@pytest.mark.thorough
def test_adapters_go_on_exactly(base, tuned, tmp_path, stop_after):
    out, metrics, _ = tuned
    stop_after(3)
    run(base, tmp_path, lora=LORA, lr=3e-2)
    assert not (tmp_path / "adapter").exists()
    stop_after(0)
    assert losses(run(base, tmp_path, lora=LORA, lr=3e-2)) == losses(metrics)
    file = "adapter/adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (out / file).read_bytes()


@pytest.mark.thorough
def test_more_steps_jump(base, tuned, tmp_path, capsys):
    """At a run's end the learning rate is 0. With more steps it jumps, and a line reports it."""
    out = shutil.copytree(tuned[0], tmp_path / "out")
    metrics = run(base, out, lora=LORA, lr=3e-2, steps=11)
    said = " ".join(capsys.readouterr().out.split())
    assert "The learning rate rises from 0, where the old schedule was, to " in said and "at once." in said
    schedule = make_schedule("cosine", peak=3e-2, steps=11, warmup=1, decay=0)
    want = [schedule(8), schedule(9), schedule(10)]
    close([line["learning_rate"] for line in metrics[-3:]], want, terms=10, size=3e-2)  # of the peak


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(lora=Lora(rank=4)), r"identity\.lora\.rank is 2, and now it is 4"),
        thorough(
            dict(lora=Lora(rank=2, alpha=2.0)),
            r"identity\.lora\.scale \(alpha / rank\) is 2\.0, and now it is 1\.0",
        ),
        thorough(dict(lora=Lora(rank=2, where="*.q_proj")), r"identity\.lora\.where is layers\.\*, and now .*q_proj"),
        thorough(dict(lora=LORA, quantize="int8"), r"--quantize was none and is int8"),
        (dict(), r"identity\.lora\.rank is 2, and now it is 0"),
    ],
)
def test_other_adapters_are_refused(base, tuned, changes, words):
    with pytest.raises(ValueError, match=words):
        run(base, tuned[0], **changes)


def test_another_base_is_refused(base, model, tuned, tmp_path, monkeypatch):
    """A base with one changed bit in the weights, or with another revision, is refused."""
    weights, aside = base / "model" / "model.safetensors", tmp_path / "aside"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.rename(aside)  # not overwritten, because loaded models map it
    try:
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=r"identity\.weights is \w{64}, and now it is \w{64}"):
            run(base, tuned[0], lora=LORA, lr=3e-2)
    finally:
        aside.replace(weights)
    source = Source.open(base / "model")  # a folder has no revisions
    monkeypatch.setattr(SourceOptions, "open", lambda *_: source)
    adapted = lora.add(model, rank=2, alpha=4.0, key=jax.random.key(0))
    monkeypatch.setattr(finetune, "load", lambda *_, **__: adapted)
    with pytest.raises(ValueError, match=r"--revision was None and is v2"):
        run(base, tuned[0], lora=LORA, lr=3e-2, revision="v2")


def test_rounded_weights_are_not_trained(base, tmp_path):
    with pytest.raises(ValueError, match=r"--quantize nf4 keeps weights that are not trained; it needs --lora\.rank"):
        run(base, tmp_path / "out", quantize="nf4")
    assert not (tmp_path / "out").exists()
