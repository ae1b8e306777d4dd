"""How fast greedy text comes: zoo.generate's loop against transformers' generate.

    python -m benchmarks.decode --help

Both continue the same prompts with the same float32 weights, and must write the same tokens.
"""

import contextlib
import tempfile
from collections.abc import Callable

import numpy as np

from benchmarks.common import REFERENCE, Contestant, alternate, import_transformers, ratios, report, write_checkpoint


def zoo_generate(folder: str, prompts: np.ndarray, new: int) -> Callable[[], np.ndarray]:
    import jax
    import jax.numpy as jnp

    import zoo
    from zoo.generate import Sampler, advance, start

    model = zoo.load(folder)
    lengths = jnp.full(len(prompts), prompts.shape[1])
    no_stops = jnp.zeros(0, jnp.int32)

    def generate() -> np.ndarray:
        generation = start(model, jnp.asarray(prompts), lengths, new, jax.random.key(0))
        return np.asarray(advance((model, no_stops), generation, Sampler(), jnp.array(new)).tokens)

    return generate


def transformers_generate(folder: str, prompts: np.ndarray, new: int) -> Callable[[], np.ndarray]:
    import torch

    model = import_transformers().Qwen3ForCausalLM.from_pretrained(folder).eval()
    inputs = torch.from_numpy(prompts).long()
    mask = torch.ones_like(inputs)

    def generate() -> np.ndarray:
        return model.generate(inputs, attention_mask=mask, max_new_tokens=new, do_sample=False)[
            :, inputs.shape[1] :
        ].numpy()

    return generate


def main(batches: tuple[int, ...] = (1, 8), prompt: int = 64, new: int = 128, layers: int = 8, rounds: int = 7) -> None:
    """Tokens per second, of all sequences together, from a small Qwen3; the prompt's prefill is part of the time.

    Args:
        batches: numbers of sequences continued at once; each is measured by itself.
        prompt: tokens of a prompt.
        new: tokens to write.
        layers: of the model.
        rounds: in which both take turns, after a first call each.
    """
    config = REFERENCE | dict(num_hidden_layers=layers)
    builds = {"zoo": zoo_generate, "transformers": transformers_generate}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, config)
        for batch in batches:
            prompts = np.random.default_rng(0).integers(config["vocab_size"], size=(batch, prompt), dtype=np.int32)
            with contextlib.ExitStack() as running:
                contestants = {
                    name: running.enter_context(Contestant(build, folder, prompts, new))
                    for name, build in builds.items()
                }
                first = {name: contestant.turn() for name, contestant in contestants.items()}
                ours, theirs = (turn["outputs"][0] for turn in first.values())
                np.testing.assert_array_equal(ours, theirs, "zoo and transformers wrote different tokens")
                taken = alternate({name: contestant.turn for name, contestant in contestants.items()}, rounds)
            speeds = {name: [batch * new / turn["wall"] for turn in turns] for name, turns in taken.items()}
            for name, turns in taken.items():
                results[f"{name}, batch {batch}"] = {
                    "tokens/s": speeds[name],
                    "speed / transformers": ratios(speeds[name], speeds["transformers"]),
                    "CPU time of a token, ms": [1e3 * turn["cpu"] / (batch * new) for turn in turns],
                    "first call, s": [first[name]["wall"]],
                    "peak memory, MB": [turns[-1]["peak"] / 1e6],
                }
    report("decode", "cpu", dict(config=config, batches=batches, prompt=prompt, new=new, rounds=rounds), results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
