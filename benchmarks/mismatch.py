"""The distance of a drawn token's log-probability in an update from that in sampling: mean and largest of 1,024 tokens.

    python -m benchmarks.mismatch                  # all rows of the table in docs/grpo.md
    python -m benchmarks.mismatch --only qwen3_moe

Sampler and trainer have the same weights, so a distance is rounding: of another order of sums, of a cache, or of a
recurrence that one runs in steps and the other in chunks; and in a mixture what follows from a token that goes to
another expert. The models are the tests' checkpoints, random ones of width 32 whose logits are about 10, and the
embedded model. They run on the CPU, of which XLA makes eight devices.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import re
import tempfile


os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

import zoo
from benchmarks.common import report
from tests.zoo import tiny
from train.methods.texts import Text, packed
from train.state.mesh import generating, put_batch
from train.step import loss
from train.step.language import features
from train.step.step import Batch
from zoo.generation.complete import complete
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractModel
from zoo.nn.routing import replayed
from zoo.surgery import cast


PROMPTS, GROUP, PROMPT, NEW = 4, 4, 90, 64  # a text of 153 tokens crosses two chunks of a recurrence


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str = "tiny"
    dtype: str = "bfloat16"
    cache: str | None = None
    mesh: str = "fsdp=1"
    replay: bool = False

    def __str__(self) -> str:
        parts = [self.model, self.dtype, f"{self.cache} cache" if self.cache else ""]
        parts += ["" if self.mesh == "fsdp=1" else self.mesh, "replayed" if self.replay else ""]
        return ", ".join(part for part in parts if part)


FAMILIES = ("qwen3", "gemma3", "deepseek3", "gpt_oss", "qwen3_moe", "qwen3_next", "kimi_linear", "nemotron_h")
MIXTURES = ("deepseek3", "gpt_oss", "qwen3_moe", "qwen3_next", "kimi_linear", "nemotron_h")
CASES = (
    Case(dtype="float32"),
    Case(),
    Case(cache="int8"),
    Case(dtype="float32", mesh="fsdp=8"),
    Case(mesh="fsdp=8"),
    Case(mesh="fsdp=4,tensor=2"),
    Case(mesh="fsdp=4,context=2"),
    *(Case(name, dtype) for name in FAMILIES for dtype in ("float32", "bfloat16")),
    *(Case(name, replay=True) for name in MIXTURES),
    Case("qwen3_moe", mesh="expert=4,fsdp=2"),
    Case("qwen3_moe", mesh="expert=4,fsdp=2", replay=True),
)


def logprobs(model: AbstractModel, batch: Batch) -> jax.Array:
    """Computes the log-probabilities of a batch's targets as an update does."""
    if "experts" in batch:
        model = replayed(model, batch["experts"])
    x, _ = features(model, batch)
    return loss.logprobs(lambda x: model.unembed(x).astype(jnp.float32), x, batch["targets"])[0]


def distances(case: Case, name: str | pathlib.Path) -> dict[str, list[float]]:
    """Draws completions, and compares their log-probabilities with those of the update's program."""
    mesh = make_mesh(case.mesh, jax.devices()[: math.prod(int(size) for size in re.findall("[0-9]+", case.mesh))])
    model = zoo.load(name, mesh=mesh)
    random = np.random.RandomState(0)
    prompts = random.randint(0, min(model.config.vocab_size, 1000), (PROMPTS, PROMPT)).tolist()
    with generating(model, mesh, case.dtype) as sampling:
        groups = complete(
            sampling, prompts, samples=GROUP, max_new_tokens=NEW, temperature=1.0, seed=0, cache_dtype=case.cache,
            record=("experts",) * case.replay,
        )  # fmt: skip
    texts = [
        Text(prompt + c.tokens, [None] * PROMPT + c.logprobs, 0.0, experts=c.records.get("experts"))
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    with jax.set_mesh(mesh):
        batch = put_batch(packed(texts, max(2, mesh.size), zoo.tokenizer("tiny")), mesh, model)
        found = jax.jit(logprobs)(cast(model, case.dtype), batch)
        apart = np.abs(np.asarray(found) - np.asarray(batch["old"]))[np.asarray(batch["loss_mask"]) == 1]
    return {"mean": [float(apart.mean())], "largest": [float(apart.max())]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of the rows to measure")
    only = parser.parse_args().only
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if only in str(case):
                name = case.model
                if name != "tiny":
                    longer = {
                        key: 256 for key in ("max_position_embeddings", "model_max_length") if key in tiny.CONFIGS[name]
                    }
                    name = tiny.write(pathlib.Path(folder) / name, name, **longer)
                results[str(case)] = distances(case, name)
                print(case, results[str(case)], flush=True)
    settings = {"prompts": PROMPTS, "group": GROUP, "prompt": PROMPT, "new": NEW}
    report("mismatch", "cpu", settings, results)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
