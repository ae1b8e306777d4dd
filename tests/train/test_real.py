"""Scripts that train SmolLM2-135M-Instruct (tests/real.py) for three steps, and their adapters in PEFT."""

import json

import equinox as eqx
import numpy as np
import pytest

import zoo
from tests import real
from tests.train.conftest import command, devices, losses
from tests.zoo.programs import error
from train.watch.metrics import read_metrics


pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # of PEFT and transformers

NEW = 16  # tokens of samples and of completions
PAIRS = [  # so long that all prompts are read as 64 tokens
    ("What is the capital of France?", "Paris.", "I don't know, sorry."),
    ("What is the capital of Italy?", "Rome.", "It is a city of some size."),
    ("How many days are in a week?", "Seven.", "There are many of them."),
    ("What is the opposite of hot?", "Cold.", "Hot is a temperature."),
]


@pytest.fixture(scope="module")
def folder():
    return real.smollm2()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns a folder of data for each script, with a reward."""
    folder = tmp_path_factory.mktemp("data")
    ask = lambda question: [{"role": "user", "content": question}]
    say = lambda answer: [{"role": "assistant", "content": answer}]
    records = {
        "sft": [{"messages": ask(question) + say(good)} for question, good, _ in PAIRS],
        "dpo": [{"prompt": ask(question), "chosen": say(good), "rejected": say(bad)} for question, good, bad in PAIRS],
        "grpo": [{"prompt": ask(question)} for question, *_ in PAIRS],
    }
    for script, lines in records.items():
        (folder / f"{script}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text("def length(completion, record):\n    return len(completion) / 100\n")
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """Returns a function of an adapter's folder and tokens, which computes PEFT's logits; without adapter if None."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(adapter, tokens):
        adapted = base if adapter is None else peft.PeftModel.from_pretrained(base, adapter)
        with torch.no_grad():
            found = adapted(torch.tensor(tokens)).logits.numpy()
        if adapter is not None:
            adapted.unload()
        return found

    return logits


forward = eqx.filter_jit(lambda model, tokens: model(tokens))


@pytest.mark.parametrize("script", ["sft", "dpo", "grpo"])
def test_three_steps(script, folder, data, theirs, tmp_path, monkeypatch):
    """The adapter of a script changes the model, and PEFT computes the same logits from it."""
    devices(monkeypatch, 1)
    monkeypatch.setattr("train.watch.watch.TOKENS", NEW)
    options = {
        "model": folder, "data": data / f"{script}.jsonl", "out": tmp_path / "out", "lora.rank": 4, "steps": 3,
        "seq-len": 80, "lr": 1e-3, "warmup": 0, "schedule": "wsd", "compute-dtype": "float32", "hold-out": 0,
        "save-every": 3, "sample-every": 3,
    }  # fmt: skip
    # As many completions at a time as there are samples, so that one program writes both.
    rolled = {"prompts": 1, "group": 3, "max-new-tokens": NEW, "reward": f"{data / 'reward.py'}:length"}
    options |= rolled if script == "grpo" else {"batch": len(PAIRS)}  # a step learns from all, so that losses fall
    command(f"train.{script}", *(word for name, value in options.items() for word in (f"--{name}", value)))
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    found = losses(metrics)
    assert len(found) == 3 and np.isfinite(found).all()
    if script == "grpo":  # trainer and sampler agree, and completions differ
        assert all(line["drift"] < 1e-4 and line["reward"] > 0 for line in metrics if "loss" in line)
    else:
        assert found[-1] < found[0]
        assert script == "sft" or found[0] == pytest.approx(np.log(2), abs=1e-5)  # the policy is the reference
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 3} and any("Paris" in sample["text"] for sample in samples)

    (config,) = (tmp_path / "out").glob("*/adapter_config.json")
    tokens = [zoo.tokenizer(folder).encode_prompt([{"role": "user", "content": PAIRS[0][0]}])]
    adapted = zoo.peft.load(zoo.load(folder, dtype="float32"), config.parent)
    ours, wanted = forward(adapted, np.array(tokens)), theirs(config.parent, tokens)
    assert error(ours, wanted) < 1e-4 < error(theirs(None, tokens), wanted)
