"""Answers requests for embeddings, scores and rankings of texts, in the forms of OpenAI, vLLM, and Jina and Cohere."""

import base64
import uuid
from typing import Any

import numpy as np

from zoo import retrieval
from zoo.serve.fields import REPLIES, Refusal, is_text
from zoo.serve.served import Served


def embeddings(said: dict[str, Any], served: Served) -> dict[str, Any]:
    """Embeds `input`, in the models' thread."""
    texts = texts_of(said, "input")
    vectors = retrieval.embed(
        served.model, served.tokenizer, texts, prompt_name=said.get("prompt_name"), width=said.get("dimensions")
    )
    data = [{"object": "embedding", "index": n, "embedding": written(said, each)} for n, each in enumerate(vectors)]
    return {"object": "list", "data": data, "model": served.name, "usage": usage(served, texts)}


def scores(said: dict[str, Any], served: Served) -> dict[str, Any]:
    """Scores each of `text_2` by how well it answers `text_1`, in the models' thread."""
    texts = texts_of(said, "text_2")
    ranked = ranking(said, served, "text_1", texts)
    data = [{"object": "score", "index": each.index, "score": each.score} for each in sorted(ranked)]
    return {"object": "list", "data": data, "model": served.name, "usage": usage(served, [said["text_1"], *texts])}


def rerank(said: dict[str, Any], served: Served) -> dict[str, Any]:
    """Ranks `documents` by how well they answer `query`, the best first, in the models' thread."""
    texts = texts_of(said, "documents")
    document = lambda n: {"document": {"text": texts[n]}} if said.get("return_documents", True) else {}
    results = [
        {"index": each.index} | document(each.index) | {"relevance_score": each.score}
        for each in ranking(said, served, "query", texts)[: said.get("top_n")]
    ]
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": served.name}
    return head | {"usage": usage(served, [said["query"], *texts]), "results": results}


def ranking(said: dict[str, Any], served: Served, query: str, texts: list[str]) -> list[retrieval.Ranked]:
    """Ranks texts by the field `query`, and by `instruction` if it is there."""
    if query not in said:
        raise Refusal(f"{query} is missing.", query)
    options = {"instruction": said["instruction"]} if "instruction" in said else {}
    return retrieval.rank(served.model, served.tokenizer, said[query], texts, **options)


def texts_of(said: dict[str, Any], field: str) -> list[str]:
    texts = [said[field]] if is_text(said[field]) else said[field]
    if len(texts) > REPLIES:
        raise Refusal(f"{field} has {len(texts)} texts, and {REPLIES} are the most. Send several requests.", field)
    return texts


def written(said: dict[str, Any], vector: np.ndarray) -> list[float] | str:
    """Returns numbers, or their bytes in little-endian float32, as OpenAI's client asks for by default."""
    if said.get("encoding_format") == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def usage(served: Served, texts: list[str]) -> dict[str, int]:
    """Counts the tokens of the texts as they are sent."""
    count = sum(len(served.tokenizer.encode(text)) for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}
