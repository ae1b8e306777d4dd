"""The first update of GRPO beside that of TRL's trainer, with the same model, prompts, completions and loss.

Our engine draws the completions. Each side computes its own rewards, advantages, log-probabilities and gradient.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from tests.zoo import tiny
from train import grpo
from train.data import prompts as prompts_
from train.data.records import Record
from train.methods import rollouts
from train.state.state import init_state
from train.step.step import Recipe, jit_train_step
from zoo.mesh import make_mesh


pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # TRL's own
PROMPTS, GROUP, NEW = ("abc ", "hello ", "x ", "fox "), 4, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("trl", reason="needs trl")
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder, "qwen3", eos_token_id=63)
    tiny.write_tokenizer(folder)
    return folder


def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / 8


@pytest.fixture(scope="module")
def ours(folder):
    """Returns a function that takes one step with some options: its metrics, and the completions in their groups."""
    model, tokenizer, mesh = (
        zoo.load(folder, dtype="float32"),
        zoo.tokenizer(folder),
        make_mesh("fsdp=1", jax.devices()[:1]),
    )
    prompts = [prompts_.encode(Record("", {"prompt": text}), tokenizer) for text in PROMPTS]

    def step(**changes):
        o = grpo.GRPOOptions.of(group=GROUP, max_new_tokens=NEW, temperature=0.8, **changes)
        drawn, judge = [], lambda text, record: vowels(text)
        with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
            keep = lambda *arguments, **named: drawn.extend(found := complete(*arguments, **named)) or found
            complete = rollouts.complete
            patch.setattr(rollouts, "complete", keep)
            (batch,), *_ = rollouts.rollout(
                model, prompts, 0, None, options=o.rollouts, rewards=o.rewards, judges=[judge], tokenizer=tokenizer,
                mesh=mesh, rows=2, dtype="float32", seed=0,
            )  # fmt: skip
            sgd = optax.sgd(1e-3)
            recipe = Recipe(
                optimizer=sgd, schedule=optax.constant_schedule(1e-3), compute_dtype=jnp.float32,
                objective=functools.partial(grpo.objective, options=o),
            )  # fmt: skip
            state = init_state(jax.tree.map(jnp.copy, model), sgd)
            _, metrics = jit_train_step(state, recipe)(state, {name: jnp.asarray(a) for name, a in batch.items()}, None)
        return {name: float(value) for name, value in metrics.items()}, drawn

    return step


def theirs(folder, out, drawn, **changes):
    """Returns the log of TRL's first step with the same completions."""
    import datasets
    import transformers
    import trl

    def rollout(prompts, trainer):
        groups = [drawn[PROMPTS.index(prompt)] for prompt in prompts[::GROUP]]
        completions = [completion for group in groups for completion in group]
        tokens = dict(prompt_ids=[c.prompt for c in completions], completion_ids=[c.tokens for c in completions])
        return tokens | {"logprobs": [c.logprobs for c in completions]}

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<end>", pad_token="<end>"
    )
    arguments = trl.GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=len(PROMPTS) * GROUP, num_generations=GROUP, max_steps=1,
        max_completion_length=NEW, temperature=0.8, learning_rate=1e-3, logging_steps=1, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
        max_grad_norm=1e9, **changes,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), processing_class=tokenizer,
        reward_funcs=lambda completions, **_: list(map(vowels, completions)), args=arguments, rollout_func=rollout,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize(
    "own, other",
    [
        (dict(loss="dapo"), dict(loss_type="dapo")),
        (dict(loss="grpo", epsilon_high=0.28), dict(loss_type="grpo", epsilon_high=0.28)),
        (dict(loss="dr_grpo", scale_rewards=False), dict(loss_type="dr_grpo", scale_rewards="none")),
        (dict(loss="grpo", level="sequence"), dict(loss_type="grpo", importance_sampling_level="sequence")),
    ],
    ids=["dapo", "grpo", "dr_grpo", "gspo"],
)
def test_the_first_update_of_grpo_equals_trl(folder, ours, tmp_path, own, other):
    """The loss to 1e-5, and the norm of the gradient to 1e-4."""
    metrics, drawn = ours(**own)
    log = theirs(folder, tmp_path, drawn, beta=0.0, **other)
    assert metrics["loss"] == pytest.approx(log["loss"], abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-4) and metrics["grad_norm"] > 1e-3
    assert log["reward"] == pytest.approx(
        np.mean([[vowels(text(folder, c)) for c in group] for group in drawn]), abs=1e-6
    )


@functools.cache
def tokenizer_of(folder: pathlib.Path):
    return zoo.tokenizer(folder)


def text(folder, completion):
    return tokenizer_of(folder).answer(completion.tokens)
