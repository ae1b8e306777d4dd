# pyright: strict
"""Calls of zoo's public interface, as users write them. Their types are known, so that users' programs pass strict
checks. pyright reads this file; nothing runs it. tests/test_typed.py compares it with the README and `zoo.__all__`.
"""

import jax

import zoo
from zoo.models import qwen3


def readme() -> None:
    model = zoo.load("tiny")
    tokenizer = zoo.tokenizer("tiny")
    print(zoo.generate(model, tokenizer, "textwrap.dedent(text)\n\n", max_new_tokens=32))


def checkpoints() -> None:
    zoo.keep_programs()
    model = zoo.load("qwen3-0.6b", dtype="bfloat16", mesh="fsdp=-1", revision="main", quantize="int8")
    zoo.save(model, "folder", fp8=True)
    print(zoo.names(), zoo.config("tiny").vocab_size, zoo.inspect("tiny").num_hidden_layers, zoo.fingerprint("tiny"))
    print(zoo.make_mesh("fsdp=-1").shape)


def texts() -> None:
    model, tokenizer = zoo.load("tiny"), zoo.tokenizer("tiny")
    texts: list[str] = zoo.generate(model, tokenizer, ["def __init__(self", "import "], max_new_tokens=8)
    chat: str = zoo.generate(model, tokenizer, [{"role": "user", "content": "Hello"}])
    pieces: list[str] = list(zoo.stream(model, tokenizer, "Return the", temperature=0.7, top_p=0.9))
    sampling = zoo.Sampling(max_new_tokens=8, temperature=0.7, stop=["."])
    again: str = zoo.generate(model, tokenizer, "import ", sampling, seed=1)
    print(texts, chat, pieces, again)


def tokens() -> None:
    model, tokenizer = zoo.load("tiny"), zoo.tokenizer("tiny")
    draft = zoo.ModelDraft(zoo.load("tiny"), num_draft_tokens=4)
    groups: list[list[zoo.Completion]] = zoo.complete(
        model, [tokenizer.encode("Return the")], samples=4, max_new_tokens=16, temperature=1.0, draft=draft
    )
    print(tokenizer.decode(groups[0][0].tokens), sum(groups[0][0].logprobs))
    engine = zoo.Engine(model, batch=2, max_tokens=64, stops=tokenizer.eos, draft=zoo.MTPDraft(model))
    zoo.Engine(model, batch=2, max_tokens=64, draft=zoo.NGramDraft(num_draft_tokens=4, ngram=2))
    print(engine.idle)


def heads() -> None:
    model, tokenizer = zoo.load("qwen3-embedding-0.6b", head="embedding"), zoo.tokenizer("qwen3-embedding-0.6b")
    print(zoo.embed(model, tokenizer, ["def f(x):", "import re"], prompt_name="query", width=256).shape)
    best = zoo.rank(model, tokenizer, "a regular expression", ["import re", "import os"])[0]
    print(best.index, best.score)
    question = {"type": "choice", "instructions": "Which part of Python is this?", "criteria": {"re": None, "os": None}}
    print(zoo.decide(zoo.load("tiny"), zoo.tokenizer("tiny"), "import re", {"part": question}))


def tasks() -> None:
    found: dict[str, float] = zoo.evaluate(zoo.load("tiny"), zoo.tokenizer("tiny"), ["gsm8k"], limit=8)
    print(found)


def adapters() -> None:
    model = zoo.lora.add(zoo.load("tiny"), rank=8, alpha=16.0, key=jax.random.key(0))
    zoo.peft.save(model, "adapter", base="org/name")
    print(zoo.peft.load(zoo.load("tiny"), "adapter").config)


def models(tokens: jax.Array) -> None:
    model = zoo.init("tiny", key=jax.random.key(0), dtype="bfloat16", mesh="fsdp=-1")
    logits, activations = zoo.capture(model, "layers.*.mlp")(tokens)
    model = zoo.surgery.with_layer(model, 1, model.layers[0])
    print(model, len(model.layers), logits.shape, activations["layers.0.mlp"])


def families() -> None:
    zoo.register(qwen3.FAMILY)
    print(zoo.qwen3.CONFIGS["qwen3-0.6b"].config.vocab_size, zoo.qwen3_vl.FAMILY.title)
