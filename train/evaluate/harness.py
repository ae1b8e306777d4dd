"""Tasks of lm-eval for `train.evaluate.tasks`, with the model that is trained behind lm-eval's interface for models.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness, 0.4.13) reads the tasks, makes requests of their documents
and computes the metrics. It is imported only if --eval-tasks names one of its tasks. Prompts are as the task writes
them, without a chat template. Every process answers all requests, with its part of the model.
"""

import contextlib
import importlib
import io
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels.cross_entropy.chunks import Chunks
from train.evaluate.task import WRONG, TaskOptions, Wrong
from zoo.generation.engine import bucket
from zoo.generation.generate import generate
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.text.tokenizer import Tokenizer
from zoo.weights.gather import gathered


QUESTIONS = 200  # of each task, from its beginning; lm-eval itself scores whole tasks, on the exported model


class Harness:
    """One or several tasks of lm-eval: a task by its name, or the tasks of a YAML file or of a folder of such files.

    The metrics are `eval_TASK/METRIC`, such as eval_hellaswag/acc_norm. If the task filters answers, they are
    `eval_TASK/METRIC/FILTER`, such as eval_gsm8k/exact_match/strict-match.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: lm-eval has no such task, or the file or folder has none.
    """

    def __init__(self, name: str, options: TaskOptions, tokenizer: Tokenizer, config: AbstractConfig):
        try:
            self._evaluator = importlib.import_module("lm_eval.evaluator")
            tasks = importlib.import_module("lm_eval.tasks")
        except ImportError as error:
            raise ImportError(
                f"--eval-tasks {name} is a task of lm-eval, unless it ends in .jsonl, and that needs: pip install "
                "'equinox-zoo[lm-eval]'"
            ) from error
        self.name, self._o, self._tokenizer, self._wrong = f"eval_{pathlib.Path(name).stem}", options, tokenizer, []
        path = pathlib.Path(name)
        if path.exists():
            folder = path if path.is_dir() else path.parent
            self._manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
            here = lambda entry: path.is_dir() or (entry.yaml_path and entry.yaml_path.samefile(path))
            names = [name for name, entry in self._manager.task_index.items() if here(entry)]
        else:
            self._manager = tasks.TaskManager()
            names = [name]
        try:
            loaded = self._manager.load(names)
        except KeyError as error:
            raise ValueError(f"--eval-tasks {name} is neither a file or folder nor a task of lm-eval.") from error
        if not loaded["tasks"]:
            raise ValueError(f"--eval-tasks {name} has no YAML file with a task of lm-eval.")
        # A group has metrics of all its tasks together, and includes the tasks.
        self._tasks = [loaded["groups"][n] for n in names if n in loaded["groups"]] or list(loaded["tasks"].values())

    def evaluate(self, model: AbstractModel, rows: int, told: Callable[[int, int], None]) -> dict[str, float]:
        lm = adapter(model, self._tokenizer, rows, self._o.eval_tokens, told)
        with contextlib.redirect_stderr(io.StringIO()):  # hides lm-eval's own progress bars
            found = self._evaluator.simple_evaluate(
                model=lm, tasks=self._tasks, task_manager=self._manager, limit=QUESTIONS,
                bootstrap_iters=0, random_seed=None, numpy_random_seed=None, torch_random_seed=None,
            )  # fmt: skip
        self._wrong = list(itertools.islice(wrong(found["samples"]), WRONG))
        return {
            f"eval_{task}/{key.removesuffix(',none').replace(',', '/')}": float(value)
            for task, metrics in (found["results"] | found.get("groups", {})).items()
            for key, value in metrics.items()
            if "," in key and "_stderr" not in key and isinstance(value, int | float)
        }

    def wrong(self) -> Sequence[Wrong]:
        return self._wrong


def wrong(samples: dict[str, list[dict[str, Any]]]) -> Iterator[Wrong]:
    """Yields the answers whose first metric is 0, from the samples that lm-eval logs."""
    for sample in itertools.chain(*samples.values()):
        if sample[sample["metrics"][0]] == 0:
            resps = sample["filtered_resps"]
            text = resps[0] if len(resps) == 1 else f"log-likelihoods: {[value for value, *_ in resps]}"
            yield Wrong(sample["arguments"][0][0], str(text), str(sample["target"]))


def adapter(
    model: AbstractModel, tokenizer: Tokenizer, rows: int, tokens: int, told: Callable[[int, int], None]
) -> Any:
    """Wraps the model as an lm_eval.api.model.LM. It writes at most `tokens` tokens if a task sets no limit."""
    utils, limit = importlib.import_module("lm_eval.utils"), model.config.max_position_embeddings
    first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos[0]  # precedes a text without a context

    class Adapter(importlib.import_module("lm_eval.api.model").LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return score(model, [pair(tokenizer, *request.args, first=first) for request in requests], rows, told)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            """Scores texts of any length in windows of all the model's positions; each token is scored once."""
            sums = []
            for request in requests:
                ids = tokenizer.encode(request.args[0], special=False)
                windows = utils.get_rolling_token_windows(ids, first, limit - 1, 1)
                pairs = [(list(a), list(b)) for a, b in map(utils.make_disjoint_window, windows)]
                sums.append(sum(logp for logp, _ in score(model, pairs, rows, lambda *_: None)))
                told(len(sums), len(requests))
            return sums

        def generate_until(self, requests: list[Any]) -> list[str]:
            by_way: dict[str, list[int]] = {}
            for n, request in enumerate(requests):
                by_way.setdefault(repr(sorted(request.args[1].items())), []).append(n)
            found: dict[int, str] = {}
            for numbers in by_way.values():
                said = requests[numbers[0]].args[1]
                until, new = said.get("until") or [], int(said.get("max_gen_toks", tokens))
                prompts = [tokenizer.encode(requests[n].args[0])[-(limit - new) :] for n in numbers]
                texts = generate(
                    model, tokenizer, prompts, max_new_tokens=new, batch=rows, repetition_penalty=1.0,
                    stop=[until] if isinstance(until, str) else until,
                    temperature=float(said.get("temperature") or 0) if said.get("do_sample") else 0.0,
                )  # fmt: skip
                found |= zip(numbers, texts, strict=True)
                told(len(found), len(requests))
            return [found[n] for n in range(len(requests))]

    return Adapter()


def pair(tokenizer: Tokenizer, context: str, continuation: str, *, first: int) -> tuple[list[int], list[int]]:
    """Tokenizes a context and its continuation, as lm-eval's other models do.

    Spaces between the two parts belong to the continuation.
    """
    if not context:
        return [first], tokenizer.encode(continuation, special=False)
    spaces = len(context) - len(context.rstrip())
    context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
    before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
    return whole[: len(before)], whole[len(before) :]


def score(
    model: AbstractModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    rows: int,
    told: Callable[[int, int], None],
) -> list[tuple[float, bool]]:
    """Computes, for each pair, the log-likelihood of its second part after the first.

    Also returns whether greedy decoding would write the second part. Rows are padded to powers of two. A pair that is
    longer than the model's positions loses its beginning.
    """
    limit, found = model.config.max_position_embeddings, {}
    order = sorted(range(len(pairs)), key=lambda n: -sum(map(len, pairs[n])))  # pairs that need most memory come first
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        ids = {n: (pairs[n][0] + pairs[n][1])[-limit - 1 :] for n in part}
        tokens = np.zeros((rows, min(bucket(len(ids[part[0]]) - 1), limit)), np.int32)
        targets = np.zeros_like(tokens)
        for row, n in enumerate(part):
            length = len(ids[n]) - 1
            tokens[row, :length], targets[row, :length] = ids[n][:-1], ids[n][1:]
        logps, greedy = map(gathered, numbers(model, tokens, targets))
        for row, n in enumerate(part):
            learnt = slice(len(ids[n]) - 1 - len(pairs[n][1]), len(ids[n]) - 1)
            found[n] = float(logps[row, learnt].sum(dtype=np.float64)), bool(greedy[row, learnt].all())
        told(len(found), len(pairs))
    return [found[n] for n in range(len(pairs))]


@eqx.filter_jit
def numbers(
    model: AbstractModel, tokens: Int[np.ndarray | Array, "rows seq"], targets: Int[np.ndarray | Array, "rows seq"]
) -> tuple[Float[Array, "rows seq"], Bool[Array, "rows seq"]]:
    """Computes each target's log-probability, and whether no other token is likelier, in chunks to save memory."""
    x, _, _ = model.hidden(jnp.asarray(tokens))
    chunks = Chunks.of(len(tokens), tokens.shape[1], 2048)

    def of(part: tuple[Array, Array]) -> tuple[Array, Array]:
        x, targets = part
        logp = jax.nn.log_softmax(model.unembed(x).astype(jnp.float32), axis=-1)
        own = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        return own, own >= logp.max(axis=-1)

    logps, greedy = jax.lax.map(of, (chunks.cut(x), chunks.cut(jnp.asarray(targets))))
    return chunks.joined(logps), chunks.joined(greedy)
