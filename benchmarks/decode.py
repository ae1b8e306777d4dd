"""Speed of greedy decoding: zoo's engine against static batches, and transformers' generate.

    python -m benchmarks.decode --help

All continue the same prompts with the same float32 weights, and must generate the same tokens. A static batch waits for
its longest sequence.
"""

import contextlib
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common import REFERENCE, Contestant, alternate, import_transformers, ratios, report, write_checkpoint


Work = Sequence[tuple[list[int], int]]  # prompts, each with the number of tokens to generate
Generate = Callable[[], list[list[int]]]


def zoo_engine(folder: str, work: Work, batch: int) -> Generate:
    import zoo

    model = zoo.load(folder)
    room = max(len(prompt) for prompt, _ in work) + max(new for _, new in work)

    def generate() -> list[list[int]]:
        engine = zoo.Engine(model, batch=batch, max_tokens=room)
        completions = [engine.submit(prompt, zoo.Sampling(max_new_tokens=new))[0] for prompt, new in work]
        while not engine.idle:
            engine.step()
        return [completion.tokens for completion in completions]

    return generate


def zoo_batches(folder: str, work: Work, batch: int) -> Generate:
    import zoo

    model = zoo.load(folder)

    def generate() -> list[list[int]]:
        texts = []
        for part in batches(work, batch):
            new = max(new for _, new in part)
            groups = zoo.complete(model, [prompt for prompt, _ in part], max_new_tokens=new)
            texts += [group[0].tokens[:new] for group, (_, new) in zip(groups, part, strict=True)]
        return texts

    return generate


def transformers_batches(folder: str, work: Work, batch: int) -> Generate:
    import torch

    model = import_transformers().Qwen3ForCausalLM.from_pretrained(folder).eval()

    def generate() -> list[list[int]]:
        texts = []
        for part in batches(work, batch):
            longest = max(len(prompt) for prompt, _ in part)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
            new = max(new for _, new in part)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
            texts += [row[longest : longest + new].tolist() for row, (_, new) in zip(out, part, strict=True)]
        return texts

    return generate


def batches(work: Work, batch: int) -> list[Work]:
    return [work[at : at + batch] for at in range(0, len(work), batch)]


def main(
    equal: tuple[int, ...] = (1, 8),
    ragged: int = 48,
    batch: int = 8,
    prompt: int = 64,
    new: int = 128,
    layers: int = 8,
    rounds: int = 7,
) -> None:
    """Measures tokens per second over all sequences, for a small Qwen3; prefill is part of the time.

    Args:
        equal: batch sizes for sequences of one length; each is measured by itself.
        ragged: sequences in the last case, whose prompts have 8 to `prompt` tokens, and their continuations `new` / 32
            to `new` with the logarithm spread evenly: most are short, some long.
        batch: number of these sequences that are decoded at once.
        prompt: tokens of a prompt.
        new: tokens to generate.
        layers: layers of the model.
        rounds: rounds in which all take turns, after a first call each.
    """
    config, random = REFERENCE | dict(num_hidden_layers=layers), np.random.default_rng(0)
    some = lambda tokens: random.integers(config["vocab_size"], size=tokens).tolist()
    length = lambda: round(new / 32 ** random.random())
    cases = {f"batch {n}": ([(some(prompt), new) for _ in range(n)], n) for n in equal}
    cases["ragged"] = ([(some(random.integers(8, prompt + 1)), length()) for _ in range(ragged)], batch)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config)
        for case, (work, at_once) in cases.items():
            builds = {"zoo": zoo_engine, "transformers": transformers_batches}
            if case == "ragged":
                builds["zoo in batches"] = zoo_batches
            with contextlib.ExitStack() as running:
                contestants = {
                    name: running.enter_context(Contestant(build, folder, work, at_once))
                    for name, build in builds.items()
                }
                first = {name: contestant.turn() for name, contestant in contestants.items()}
                if any(turn["outputs"] != first["zoo"]["outputs"] for turn in first.values()):
                    raise RuntimeError("The contestants wrote different tokens.")
                taken = alternate({name: contestant.turn for name, contestant in contestants.items()}, rounds)
            tokens = sum(new for _, new in work)
            speeds = {name: [tokens / turn["wall"] for turn in turns] for name, turns in taken.items()}
            for name, turns in taken.items():
                results[f"{name}, {case}"] = {
                    "tokens/s": speeds[name],
                    "speed / transformers": ratios(speeds[name], speeds["transformers"]),
                    "CPU time of a token, ms": [1e3 * turn["cpu"] / tokens for turn in turns],
                    "first call, s": [first[name]["wall"]],
                    "peak memory, MB": [turns[-1]["peak"] / 1e6],
                }
    settings = dict(
        config=config, equal=equal, ragged=ragged, batch=batch, prompt=prompt, new=new, rounds=rounds,
    )  # fmt: skip
    report("decode", "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
