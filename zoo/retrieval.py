"""Embeds texts, ranks them by how well they answer a query, and decides: `zoo.embed`, `zoo.rank`, `zoo.decide`.

model, tokenizer = zoo.load("qwen3-embedding-0.6b", head="embedding"), zoo.tokenizer("qwen3-embedding-0.6b")
zoo.embed(model, tokenizer, ["A text.", "Another."])  # [2, 1024], each of length 1
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from zoo.generation.shapes import bucket
from zoo.nn.heads import ClassificationHead, EmbeddingHead, normalized, pool
from zoo.nn.model import AbstractModel
from zoo.text import questions as asking
from zoo.text.questions import Question, Settings
from zoo.text.tokenizer import Tokenizer
from zoo.weights.gather import gathered


# The prompt of Qwen3-Reranker, by its model card.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QUESTION = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Ranked(NamedTuple):
    """A text by its number among the texts, and its score: the higher, the better it answers the query."""

    index: int
    score: float


def embed(
    model: AbstractModel,
    tokenizer: Tokenizer,
    texts: str | Sequence[str],
    *,
    prompt_name: str | None = None,
    width: int | None = None,
    batch: int = 32,
) -> Float[np.ndarray, "*texts width"]:
    """Embed texts, as sentence-transformers does: an array [texts, width] in float32, or [width] for one text.

    Texts of similar lengths share a batch. The end of a text longer than the tokenizer's `max_length`, or than the
    model's positions, is left out. If several processes hold parts of the model, all must call this.

    Args:
        model: loaded with head="embedding".
        prompt_name: the name of one of `tokenizer.prompts`, which precedes each text, such as "query".
        width: only the first so many numbers of each embedding, normalised again (Matryoshka); None: all.
        batch: number of texts that are embedded at a time.

    Raises:
        ValueError: the model has no head for embeddings, the tokenizer has no such prompt, or the embeddings have fewer
            numbers than `width`.
    """
    head = model.head
    if not isinstance(head, EmbeddingHead):
        raise ValueError("The model has no head for embeddings: load it with head='embedding'.")
    if prompt_name is not None and prompt_name not in tokenizer.prompts:
        known = ", ".join(tokenizer.prompts) or "none"
        raise ValueError(f"The tokenizer has no prompt {prompt_name!r}; it has {known}.")
    prompt = "" if prompt_name is None else tokenizer.prompts[prompt_name]
    most = _most(model, tokenizer)
    ids = [tokenizer.encode(prompt + text, most=most) for text in ([texts] if isinstance(texts, str) else texts)]
    found = _batched(functools.partial(_results, model), ids, batch) if ids else np.zeros((0, 0), np.float32)
    if width is not None:
        if width > found.shape[1]:
            raise ValueError(f"The embeddings have {found.shape[1]} numbers, fewer than width={width}.")
        cut = found[:, :width]
        found = np.asarray(normalized(jnp.asarray(cut))) if head.normalize else cut
    return found[0] if isinstance(texts, str) else found


def rank(
    model: AbstractModel,
    tokenizer: Tokenizer,
    query: str,
    texts: Sequence[str],
    *,
    instruction: str = INSTRUCTION,
    batch: int = 32,
) -> list[Ranked]:
    """Rank texts by how well they answer a query, the best first.

    - A model without a head is asked whether a text answers the query, in the words of Qwen3-Reranker. The score is the
      probability of "yes", if the answer is "yes" or "no".
    - A model with one label, or with a head for rewards, is asked the same. The score is the sigmoid of its result.
    - A model with a head for embeddings gets the query and the texts with the prompts "query" and "document", if the
      tokenizer has these. The score is the cosine of their embeddings.

    Args:
        instruction: says what makes a text a good answer; embeddings do not read it.
        batch: number of texts that are read at a time.

    Raises:
        ValueError: the model has several labels; or "yes" and "no" are no single tokens.
    """
    head = model.head
    if isinstance(head, EmbeddingHead):
        prompts = ["query", "document"]
        ask, answers = [name if name in tokenizer.prompts else None for name in prompts]
        own = embed(model, tokenizer, query, prompt_name=ask, batch=batch)
        scores = _cosines(own, embed(model, tokenizer, texts, prompt_name=answers, batch=batch))
    else:
        if isinstance(head, ClassificationHead) and len(head.labels) != 1:
            raise ValueError(f"The model has the labels {', '.join(head.labels)}: one label ranks texts.")
        ids = _questions(model, tokenizer, query, texts, instruction)
        if head is None:
            answers = np.array([_token(tokenizer, word) for word in ("no", "yes")])
            run = functools.partial(_judged, model, answers)
        else:
            run = functools.partial(_results, model)
        scores = np.asarray(jax.nn.sigmoid(_batched(run, ids, batch).reshape(-1))) if ids else np.zeros(0)
    order = np.argsort(-scores, kind="stable")
    return [Ranked(int(index), float(scores[index])) for index in order]


def decide(
    model: AbstractModel,
    tokenizer: Tokenizer,
    state: Any,
    questions: Mapping[str, Mapping[str, Any]],
    *,
    settings: Settings | None = None,
    batch: int = 32,
) -> dict[str, dict[str, Any]]:
    """Answer questions about a state, a text or any JSON, each in one pass and without sampling, as transformers does.

    Any language model decides: an option's probability is the softmax, over the labels of the question's options alone,
    of the logits of the next token, divided by the temperature of the question's type.

    Args:
        model: a language model, without a head.
        questions: name -> question (see `zoo.text.questions`), such as {"type": "choice", "instructions": "What is the
            tone?", "criteria": {"calm": None, "pushy": "Presses the reader"}}.
        settings: labels and temperatures; None: those of decision.json beside the tokenizer.
        batch: number of questions that are read at a time.

    Returns:
        Name -> answer: {"type": "choice", "choice", "confidence", "probabilities"}, {"type": "noul", "noul"} with the
        probability of yes, or {"type": "score", "score", "legend", "confidence", "probabilities"} with the mean level.

    Raises:
        ValueError: a question has another format, or the model has a head, or labels are no single tokens.
    """
    if model.head is not None:
        raise ValueError("The model has a head, and decisions are read from a language model's logits.")
    settings = Settings.of(tokenizer.folder) if settings is None else settings
    asked = {name: Question.of(question, settings) for name, question in questions.items()}
    most, answers = _most(model, tokenizer), {}
    ids = [asking.encode(state, question, tokenizer, most) for question in asked.values()]
    rows = _batched(functools.partial(_next_logits, model), ids, batch) if ids else ()
    for (name, question), logits in zip(asked.items(), rows, strict=True):
        of_labels = logits[asking.label_ids(question, tokenizer)] / settings.temperature[question.kind]
        answers[name] = question.answer(np.asarray(jax.nn.softmax(of_labels)).tolist())
    return answers


def _cosines(a: Float[np.ndarray, " width"], b: Float[np.ndarray, "texts width"]) -> Float[np.ndarray, " texts"]:
    length = lambda x: np.maximum(np.linalg.norm(x, axis=-1), 1e-12)
    return b @ a / (length(b) * length(a))


def _most(model: AbstractModel, tokenizer: Tokenizer) -> int:
    """Returns the largest number of tokens of a text."""
    positions = model.config.max_position_embeddings
    return min(positions, tokenizer.max_length or positions)


def _questions(
    model: AbstractModel, tokenizer: Tokenizer, query: str, texts: Sequence[str], instruction: str
) -> list[list[int]]:
    """Encodes the question of each text. Of a question that is too long, the end of its text is left out."""
    before, after = (tokenizer.encode(part, special=False) for part in (BEFORE, AFTER))
    room = _most(model, tokenizer) - len(before) - len(after)
    asked = [QUESTION.format(instruction=instruction, query=query, text=text) for text in texts]
    return [before + tokenizer.encode(each, special=False, most=room) + after for each in asked]


def _token(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(word, special=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens of this tokenizer, and a judge answers with one.")
    return ids[0]


Tokens = Int[np.ndarray | Array, "batch seq"]


def _batched(
    run: Callable[[Tokens, Tokens], Array], ids: Sequence[Sequence[int]], batch: int
) -> Float[np.ndarray, "texts ..."]:
    """Returns `run(tokens, segments)` for each text, in order. Texts of similar lengths share a batch."""
    found: dict[int, np.ndarray] = {}
    order = sorted(range(len(ids)), key=lambda n: -len(ids[n]))  # texts that need most memory come first
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        tokens = np.zeros((min(batch, bucket(len(part), 1)), bucket(len(ids[part[0]]))), np.int32)
        segments = np.zeros_like(tokens)
        for row, n in enumerate(part):
            tokens[row, : len(ids[n])], segments[row, : len(ids[n])] = ids[n], 1
        found |= zip(part, gathered(run(tokens, segments)), strict=False)
    return np.stack([found[n] for n in range(len(ids))])


@eqx.filter_jit
def _results(model: AbstractModel, tokens: Tokens, segments: Tokens) -> Float[Array, "batch ..."]:
    return model(jnp.asarray(tokens), segments=jnp.asarray(segments)).astype(jnp.float32)


@eqx.filter_jit
def _judged(
    model: AbstractModel, answers: Int[np.ndarray | Array, " 2"], tokens: Tokens, segments: Tokens
) -> Float[Array, " batch"]:
    """Computes the logit of the second answer minus that of the first, after each row's text."""
    logits = _next_logits(model, tokens, segments)
    return logits[:, answers[1]] - logits[:, answers[0]]


@eqx.filter_jit
def _next_logits(model: AbstractModel, tokens: Tokens, segments: Tokens) -> Float[Array, "batch vocab"]:
    """Computes the logits of the token that follows each row's text."""
    x, _, _ = model.hidden(jnp.asarray(tokens), segments=jnp.asarray(segments))
    return model.unembed(pool(x, jnp.asarray(segments)[:, None] != 0, "lasttoken")[:, 0]).astype(jnp.float32)
