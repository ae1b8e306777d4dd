"""Answers requests for embeddings and scores of texts, in the forms of OpenAI's API and of vLLM's."""

import base64
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
    if "text_1" not in said:
        raise Refusal("text_1 is missing.", "text_1")
    texts, options = texts_of(said, "text_2"), {"instruction": said["instruction"]} if "instruction" in said else {}
    ranked = retrieval.rank(served.model, served.tokenizer, said["text_1"], texts, **options)
    data = [{"object": "score", "index": each.index, "score": each.score} for each in sorted(ranked)]
    return {"object": "list", "data": data, "model": served.name, "usage": usage(served, [said["text_1"], *texts])}


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
