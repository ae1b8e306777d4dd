"""Waiting under load: the time to the first token, and the gaps between a text's tokens, while requests arrive.

    python -m benchmarks.latency --help

Requests arrive at the same random times for zoo's engine, with the server's settings, and for transformers' continuous
batching. One process decodes, and no network lies between: a request's time begins when it was due, and a token counts
when its step has ended.
"""

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common import REFERENCE, Contestant, alternate, import_transformers, ratios, report, write_checkpoint


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt that arrives `due` seconds after the start, and the number of tokens to generate."""

    due: float
    prompt: list[int]
    new: int


Measure = Callable[[], list[list[float]]]  # of each request: the seconds from when it was due to each of its tokens


def zoo_engine(folder: str, requests: Sequence[Request], batch: int, room: int) -> Measure:
    import zoo
    from zoo.serve.server import STRIDE

    model = zoo.load(folder)

    def measure() -> list[list[float]]:
        engine = zoo.Engine(model, batch=batch, max_tokens=room, stride=STRIDE, beside=512, prefixes=True)
        waiting, times = list(enumerate(requests)), [[] for _ in requests]
        numbers: dict[zoo.Completion, int] = {}
        begin = time.perf_counter()
        while waiting or not engine.idle:
            while waiting and time.perf_counter() - begin >= waiting[0][1].due:
                n, request = waiting.pop(0)
                (completion,) = engine.submit(request.prompt, zoo.Sampling(max_new_tokens=request.new))
                numbers[completion] = n
            if engine.idle:
                time.sleep(max(0.0, waiting[0][1].due - (time.perf_counter() - begin)))
            else:
                drawn = engine.step()
                now = time.perf_counter() - begin
                for completion, tokens in drawn.items():
                    n = numbers[completion]
                    times[n] += [now - requests[n].due] * len(tokens)
        return times

    return measure


def transformers_continuous(folder: str, requests: Sequence[Request], batch: int, room: int) -> Measure:
    transformers = import_transformers()
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    page = 64
    options = dict(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=page, num_blocks=batch * -(-room // page), max_batch_tokens=512, max_requests_per_batch=batch
        ),
    )

    def measure() -> list[list[float]]:
        with model.continuous_batching_context_manager(**options, block=True, timeout=5) as manager:
            begin = time.perf_counter()

            def arrive() -> None:
                for n, request in enumerate(requests):
                    time.sleep(max(0.0, request.due - (time.perf_counter() - begin)))
                    manager.add_request(
                        request.prompt, request_id=str(n), max_new_tokens=request.new, record_timestamps=True
                    )

            arrivals = threading.Thread(target=arrive)
            arrivals.start()
            found: dict[int, list[float]] = {}
            while len(found) < len(requests):
                result = manager.get_result(timeout=1)
                if result and result.is_finished():
                    n = int(result.request_id)
                    found[n] = [stamp - begin - requests[n].due for stamp in result.timestamps]
                elif not result and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended early.")
            arrivals.join()
        return [found[n] for n in range(len(requests))]

    return measure


BUILDS = {"zoo": zoo_engine, "transformers, continuous": transformers_continuous}


def main(
    count: int = 60,
    rate: float = 2.0,
    prompt: int = 512,
    new: int = 128,
    batch: int = 8,
    layers: int = 8,
    rounds: int = 3,
) -> None:
    """Measures how long requests wait, for a small Qwen3 in float32.

    Args:
        count: requests.
        rate: mean number of requests that arrive in a second, at exponential distances.
        prompt: tokens of the longest prompt; the shortest has 8, and the logarithm is spread evenly.
        new: tokens of the longest completion; the shortest has `new` / 8, and the logarithm is spread evenly.
        batch: requests that are decoded at once; others wait.
        layers: layers of the model.
        rounds: rounds in which both take turns, after a first call each.
    """
    config, random = REFERENCE | dict(num_hidden_layers=layers), np.random.default_rng(0)
    dues = random.exponential(1 / rate, count).cumsum().tolist()
    lengths = np.round(8 * (prompt / 8) ** random.random(count)).astype(int)
    drawn = np.round(new / 8 ** random.random(count)).astype(int)
    requests = [
        Request(due, random.integers(config["vocab_size"], size=length).tolist(), max(2, int(new)))
        for due, length, new in zip(dues, lengths, drawn, strict=True)
    ]
    results = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        write_checkpoint(folder, config)
        contestants = {
            who: running.enter_context(Contestant(build, folder, requests, batch, prompt + new))
            for who, build in BUILDS.items()
        }
        for contestant in contestants.values():
            contestant.turn()
        taken = alternate({who: contestant.turn for who, contestant in contestants.items()}, rounds)
    for who, turns in taken.items():
        rounds_of = [_waits(turn["outputs"][0]) for turn in turns]
        results[who] = {name: [waits[name] for waits in rounds_of] for name in rounds_of[0]}
    for who in results:
        results[who]["first token, median / zoo's"] = ratios(
            results[who]["first token, median, s"], results["zoo"]["first token, median, s"]
        )
    settings = dict(config=config, count=count, rate=rate, prompt=prompt, new=new, batch=batch, rounds=rounds)
    report("latency", "cpu", settings, results)


def _waits(times: Sequence[Sequence[float]]) -> dict[str, float]:
    first = [each[0] for each in times]
    gaps = [max(np.diff(each)) for each in times]
    mean = [(each[-1] - each[0]) / (len(each) - 1) for each in times]
    return {
        "first token, median, s": float(np.median(first)),
        "first token, 95 %, s": float(np.quantile(first, 0.95)),
        "time of a token, median, s": float(np.median(mean)),
        "a text's longest gap, median, s": float(np.median(gaps)),
        "a text's longest gap, 95 %, s": float(np.quantile(gaps, 0.95)),
        "whole reply, median, s": float(np.median([each[-1] for each in times])),
    }


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
