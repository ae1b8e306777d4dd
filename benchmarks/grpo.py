"""Tokens per second of whole steps of GRPO, sampling and update: train.grpo's step against TRL's GRPOTrainer.

    python -m benchmarks.grpo --help

Both have the same weights, prompts, group, length of completions, loss and AdamW, in float32 on the CPU. No completion
ends early, so that both draw equally many tokens.
"""

import contextlib
import functools
import pathlib
import tempfile
import threading
from collections.abc import Callable

from benchmarks.common import Contestant, alternate, import_transformers, ratios, report


LEARNING_RATE = 1e-5
INSTRUCTION = "Use a tool where it helps: its name, and its arguments by name. "  # many of them are as a list of tools
QUESTIONS = ("Return the sum of two numbers.", "Name a month.", "What is a list?", "Write a loop.", "Read a file.")


def reward(text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def write_model(folder: str) -> Callable[[], None]:
    """Writes the embedded model without end tokens, so that completions have their full length."""
    import json
    import shutil

    import zoo
    from zoo.source import Source

    source = Source.open("tiny")
    zoo.save(zoo.load("tiny", dtype="float32"), folder)
    there = pathlib.Path(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source.folder / name, there / name)
    for name in ("config.json", "generation_config.json"):
        path = there / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": None}))
    return lambda: None


def prompts_of(prompts: int, instructions: int) -> list[str]:
    """Returns the prompts: questions behind so many instructions."""
    return [INSTRUCTION * instructions + QUESTIONS[n % len(QUESTIONS)] for n in range(prompts)]


def zoo_step(folder: str, prompts: int, group: int, new: int, instructions: int) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    import zoo
    from train import grpo
    from train.data.prompts import Prompt
    from train.methods.rollouts import rollout
    from train.methods.texts import rows_of
    from train.state.optim import make_optimizer
    from train.state.state import init_state
    from train.step.step import Recipe, jit_train_step
    from zoo.mesh import make_mesh

    mesh, tokenizer = make_mesh("fsdp=1"), zoo.tokenizer(folder)
    tokenizer.eos = ()
    model = zoo.load(folder, dtype="float32", mesh=mesh)
    o = grpo.GRPOOptions.of(group=group, max_new_tokens=new, lr=LEARNING_RATE, steps=10**6, warmup=0, decay=1)
    optimizer, schedule = make_optimizer(o.optim)
    recipe = Recipe(
        optimizer=optimizer, schedule=schedule, compute_dtype=jnp.float32,
        objective=functools.partial(grpo.objective, options=o),
    )  # fmt: skip
    state = init_state(model, optimizer)
    update = jit_train_step(state, recipe)
    asked = [Prompt(tokenizer.encode(prompt), {}) for prompt in prompts_of(prompts, instructions)]
    n = 0

    def step() -> float:
        nonlocal state, n
        with jax.set_mesh(mesh):
            batches, *_ = rollout(
                state.model, asked, n, None, options=o.rollouts, rewards=o.rewards,
                judges=[lambda text, _: reward(text)], tokenizer=tokenizer, mesh=mesh, rows=rows_of(prompts * group, 1),
                dtype="float32", seed=0,
            )  # fmt: skip
            state, metrics = update(state, {name: jnp.asarray(array) for name, array in batches[0].items()}, None)
        n += 1
        return float(metrics["loss"])

    return step


def trl_step(folder: str, prompts: int, group: int, new: int, instructions: int) -> Callable[[], float]:
    transformers = import_transformers()
    import datasets  # pyright: ignore[reportMissingImports]  # not everywhere
    import trl  # pyright: ignore[reportMissingImports]  # not everywhere

    begin, done = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(transformers.TrainerCallback):
        """A callback by which each step waits for its turn."""

        def on_step_begin(self, *_: object, **__: object) -> None:
            begin.acquire()

        def on_step_end(self, *_: object, **__: object) -> None:
            done.release()

    # TRL needs an end token; this one is beyond the model's vocabulary, so it is never drawn.
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", pad_token="<|endoftext|>", eos_token="<never>"
    )
    arguments = trl.GRPOConfig(
        output_dir=f"{folder}/trl", per_device_train_batch_size=prompts * group, num_generations=group,
        max_completion_length=new, max_steps=10**6, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", beta=0.0,
        loss_type="dapo", logging_steps=10**6, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    data = [{"prompt": prompt} for prompt in prompts_of(prompts, instructions)]
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), processing_class=tokenizer,
        reward_funcs=lambda completions, **_: list(map(reward, completions)), args=arguments,
        train_dataset=datasets.Dataset.from_list(data), callbacks=[Turns()],
    )  # fmt: skip
    ended = threading.Event()

    def train() -> None:
        try:
            trainer.train()
        finally:  # an error is printed by the thread
            ended.set()
            done.release()

    threading.Thread(target=train, daemon=True).start()

    def step() -> float:
        begin.release()
        done.acquire()
        if ended.is_set():
            raise RuntimeError("TRL's trainer ended; its error is above.")
        return 0.0

    return step


def main(
    prompts: int = 8, group: int = 8, new: int = 64, instructions: int = 0, rounds: int = 5, steps: int = 2
) -> None:
    """Measures completion tokens per second of whole steps.

    Args:
        prompts: prompts of a step.
        group: completions of a prompt.
        new: tokens of a completion.
        instructions: sentences before each question, of 20 tokens each, such as a list of tools has.
        rounds: rounds in which both take turns.
        steps: steps in each turn.
    """
    builds, sizes = {"zoo": zoo_step, "TRL": trl_step}, (prompts, group, new, instructions)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        with Contestant(write_model, folder):
            pass
        contestants = {n: running.enter_context(Contestant(build, folder, *sizes)) for n, build in builds.items()}
        for contestant in contestants.values():
            contestant.turn(2)  # compiles
        taken = alternate({name: functools.partial(c.turn, steps) for name, c in contestants.items()}, rounds)
    tokens, results = prompts * group * new, {}
    for name in builds:
        seconds = [turn["wall"] for turn in taken[name]]
        results[name] = {
            "step, s": seconds,
            "tokens / s": [tokens / each for each in seconds],
            "tokens / s / TRL's": ratios([turn["wall"] for turn in taken["TRL"]], seconds),
            "CPU time of a step, s": [turn["cpu"] for turn in taken[name]],
            "peak memory, MB": [taken[name][-1]["peak"] / 1e6],
        }
    settings = dict(
        model="tiny", prompts=prompts, group=group, new=new, instructions=instructions, rounds=rounds, steps=steps
    )
    report("grpo", "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
