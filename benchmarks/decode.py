"""Speed of greedy decoding: zoo's engine against static batches, transformers' generate and continuous batching, and
llama.cpp where `pip install llama-cpp-python gguf` has been run.

    python -m benchmarks.decode --help

All continue the same prompts with the same weights. In float32 zoo and transformers must generate the same tokens. With
--dtype bfloat16 the checkpoint has 16 bits, which zoo widens as it loads them (dtype="auto"), and logits are rounded in
other places; llama.cpp multiplies in another way, and random weights have logits that are nearly equal. A static batch
waits for its longest sequence. Where a text has several turns, the engine and llama.cpp read only what is new, and the
others the whole text.
"""

import contextlib
import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from benchmarks import in_llama
from benchmarks.common import (
    QWEN3_600M,
    REFERENCE,
    SMOLLM2_135M,
    Contestant,
    alternate,
    import_transformers,
    ratios,
    report,
    write_checkpoint,
)
from benchmarks.gpu import matches


Text = Sequence[tuple[list[int], int]]  # what comes before each turn, and the number of tokens to generate in it
Work = Sequence[tuple[list[int], int]]  # prompts, each with the number of tokens to generate
Generate = Callable[[], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Texts to be generated, `batch` at a time; static batches have at most `most` rows, which fit the memory."""

    texts: Sequence[Text]
    batch: int
    most: int = 64

    @property
    def room(self) -> int:
        """The number of tokens of the longest text."""
        return max(sum(len(before) + new for before, new in text) for text in self.texts)


def zoo_engine(folder: str, case: Case) -> Generate:
    import zoo

    model = zoo.load(folder, dtype="auto")

    def generate() -> list[list[int]]:
        engine = zoo.Engine(model, batch=case.batch, max_tokens=case.room, prefixes=True)
        drawn: list[list[int]] = [[] for _ in case.texts]
        going = {}

        def submit(n: int, turn: int, after: zoo.Completion | None = None) -> None:
            before, new = case.texts[n][turn]
            keep = turn + 1 < len(case.texts[n])
            (completion,) = engine.submit(before, zoo.Sampling(max_new_tokens=new), after=after, keep=keep)
            going[completion] = n, turn

        for n in range(len(case.texts)):
            submit(n, 0)
        while not engine.idle:
            for completion in engine.step():
                if completion.finished:
                    n, turn = going.pop(completion)
                    drawn[n] += completion.tokens
                    if turn + 1 < len(case.texts[n]):
                        submit(n, turn + 1, completion)
        return drawn

    return generate


def by_turns(case: Case, generate: Callable[[Work], list[list[int]]]) -> Generate:
    """Returns a function that generates the turns of all texts one after another, each after the whole text so far."""

    def all_turns() -> list[list[int]]:
        whole: list[list[int]] = [[] for _ in case.texts]
        drawn: list[list[int]] = [[] for _ in case.texts]
        for turn in range(max(map(len, case.texts))):
            those = [n for n, text in enumerate(case.texts) if turn < len(text)]
            work = [(whole[n] + case.texts[n][turn][0], case.texts[n][turn][1]) for n in those]
            for n, (before, _), new in zip(those, work, generate(work), strict=True):
                whole[n], drawn[n] = before + new, drawn[n] + new
        return drawn

    return all_turns


def zoo_batches(folder: str, case: Case) -> Generate:
    import zoo

    model = zoo.load(folder, dtype="auto")

    def generate(work: Work) -> list[list[int]]:
        texts = []
        for part in batches(work, min(case.batch, case.most)):
            new = max(new for _, new in part)
            groups = zoo.complete(model, [prompt for prompt, _ in part], max_new_tokens=new)
            texts += [group[0].tokens[:new] for group, (_, new) in zip(groups, part, strict=True)]
        return texts

    return by_turns(case, generate)


def transformers_batches(folder: str, case: Case, cache: str | None = None) -> Generate:
    import torch

    model = import_transformers().AutoModelForCausalLM.from_pretrained(folder).eval()

    def generate(work: Work) -> list[list[int]]:
        texts = []
        for part in batches(work, min(case.batch, case.most)):
            longest = max(len(prompt) for prompt, _ in part)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
            new, options = (
                max(new for _, new in part),
                dict(do_sample=False, pad_token_id=0, cache_implementation=cache),
            )
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
            texts += [row[longest : longest + new].tolist() for row, (_, new) in zip(out, part, strict=True)]
        return texts

    return by_turns(case, generate)


def transformers_static(folder: str, case: Case) -> Generate:
    return transformers_batches(folder, case, "static")


def transformers_continuous(folder: str, case: Case) -> Generate:
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    page = 64
    blocks = case.batch * -(-case.room // page)
    options = dict(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=max(512, case.batch), max_requests_per_batch=case.batch
        ),
    )

    def generate(work: Work) -> list[list[int]]:
        found = {}
        with model.continuous_batching_context_manager(**options, block=True, timeout=5) as manager:
            names = [manager.add_request(prompt, max_new_tokens=new) for prompt, new in work]
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
                elif not result and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended early.")
        return [found[name] for name in names]

    return by_turns(case, generate)


def llama(folder: str, case: Case) -> Generate:
    model = in_llama.Llama(in_llama.write_gguf(folder), min(case.batch, case.most), case.room)
    return lambda: in_llama.generate(model, case.texts)


def batches(work: Work, batch: int) -> list[Work]:
    return [work[at : at + batch] for at in range(0, len(work), batch)]


MODELS = {"34m": REFERENCE, "smollm2-135m": SMOLLM2_135M, "qwen3-0.6b": QWEN3_600M}
FIXED = ("zoo", "transformers")
BUILDS = {
    "zoo": zoo_engine,
    "zoo in batches": zoo_batches,
    "transformers": transformers_batches,
    "transformers, static": transformers_static,
    "transformers, continuous": transformers_continuous,
    "llama.cpp": llama,
}
if any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")):
    del BUILDS["llama.cpp"]


def main(
    equal: tuple[int, ...] = (1, 8),
    ragged: int = 48,
    shared: int = 512,
    talks: int = 8,
    batch: int = 8,
    prompt: int = 64,
    new: int = 128,
    model: Literal["34m", "smollm2-135m", "qwen3-0.6b"] = "34m",
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 7,
    only: tuple[str, ...] = ("*",),
    by: tuple[str, ...] = ("*",),
) -> None:
    """Measures tokens per second over all sequences, for a Qwen3 or a Llama; prefill is part of the time.

    Args:
        equal: batch sizes for sequences of one length; each is measured by itself.
        ragged: sequences in the case "ragged", whose prompts have 8 to `prompt` tokens, and their continuations `new` /
            32 to `new` with the logarithm spread evenly: most are short, some long.
        shared: sequences in the case "shared", 64 at a time: `prompt` * 8 tokens that all begin with, then lengths like
            those of "ragged".
        talks: texts in the case "turns", of five turns: each has `prompt` new tokens and draws `new` / 4.
        batch: number of the sequences of "ragged" that are decoded at once.
        prompt: tokens of a prompt.
        new: tokens to generate.
        model: sizes of the model: 33.6 million parameters, or those of SmolLM2-135M or Qwen3-0.6B; weights are random.
        dtype: of the checkpoint's weights. llama.cpp takes float32.
        rounds: rounds in which all take turns, after a first call each.
        only: cases whose names one of these patterns matches.
        by: contestants whose names one of these patterns matches, beside "zoo" and "transformers".
    """
    config, random = MODELS[model], np.random.default_rng(0)
    some = lambda tokens: random.integers(config["vocab_size"], size=tokens).tolist()
    length, own = lambda: max(1, round(new / 32 ** random.random())), lambda: some(random.integers(8, prompt + 1))
    begin = some(8 * prompt)
    cases = {f"batch {n}": Case([[(some(prompt), new)] for _ in range(n)], n) for n in equal}
    cases["ragged"] = Case([[(own(), length())] for _ in range(ragged)], batch)
    rows = [[(begin + own(), length())] for _ in range(shared)]
    cases["shared"] = Case(rows, Case.most)
    cases["turns"] = Case([[(some(prompt), max(1, new // 4)) for _ in range(5)] for _ in range(talks)], talks)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config, dtype=dtype)
        for name, case in ((name, case) for name, case in cases.items() if case.texts and matches(name, only)):
            builds = {who: build for who, build in BUILDS.items() if who in FIXED or matches(who, by)}
            with contextlib.ExitStack() as running:
                contestants = {
                    who: running.enter_context(Contestant(build, folder, case)) for who, build in builds.items()
                }
                first = {who: contestant.turn() for who, contestant in contestants.items()}
                wanted = first["zoo"]["outputs"][0]
                differ = {
                    who: np.mean([a != b for a, b in zip(turn["outputs"][0], wanted, strict=True)])
                    for who, turn in first.items()
                }
                if dtype == "float32" and any(share for who, share in differ.items() if who != "llama.cpp"):
                    raise RuntimeError(f"The contestants wrote different tokens: {differ}.")
                taken = alternate({who: contestant.turn for who, contestant in contestants.items()}, rounds)
            tokens = sum(new for text in case.texts for _, new in text)
            speeds = {who: [tokens / turn["wall"] for turn in turns] for who, turns in taken.items()}
            for who, turns in taken.items():
                results[f"{who}, {name}"] = {
                    "tokens/s": speeds[who],
                    "speed / transformers": ratios(speeds[who], speeds["transformers"]),
                    "zoo's speed / this": ratios(speeds["zoo"], speeds[who]),
                    "CPU time of a token, ms": [1e3 * turn["cpu"] / tokens for turn in turns],
                    "first call, s": [first[who]["wall"]],
                    "peak memory, MB": [turns[-1]["peak"] / 1e6],
                    "texts that differ from zoo's": [differ[who]],
                }
    settings = dict(
        config=config, equal=equal, ragged=ragged, shared=shared, talks=talks, batch=batch, prompt=prompt, new=new,
        dtype=dtype, rounds=rounds,
    )  # fmt: skip
    name = "-".join(["decode", *[model][: model != "34m"], *[dtype][: dtype != "float32"]])
    report(name, "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
