"""A script that makes an untrained model that learns to call tools: `python -m train.environments.tiny OUT`.

It is a Qwen3 with random weights, and a chat template with tools. Each digit is a token of its own, so that the model
copies numbers digit by digit. The other tokens are those of the built-in environments' chats (`train.environments`).
"""

import dataclasses
import datetime
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import zoo
from train.environments.__main__ import chats
from train.methods.environments import BUILT_IN, FOLDER
from train.tiny.__main__ import END, SPECIAL, TURN_END
from zoo.models import qwen3
from zoo.text.templates import render
from zoo.text.tokenizer import MARKS


TEMPLATE = FOLDER / "tools.jinja"
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Two layers are the fewest that copy: one finds what stood before a token, the next what follows it (arXiv:2209.11895).
CONFIG = qwen3.Config(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=1024,
    max_window_layers=2,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)


def texts() -> Iterator[str]:
    """Yields chats with the built-in environments, in pieces between the tokens of `SPECIAL` and `TAGS`."""
    between = re.compile("|".join(map(re.escape, [*SPECIAL, *TAGS])))
    for name in BUILT_IN:
        for chat in chats(name, 100, solved=0.5):
            yield from between.split(MARKS.sub("", render(TEMPLATE.read_text(), chat, datetime.datetime.min)))


def make_tokenizer() -> Tokenizer:
    """Trains byte-level BPE whose tokens are digits, and phrases without digits."""
    tokenizer = Tokenizer(models.BPE())
    phrases = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), phrases])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size - len(TAGS),
        min_frequency=30,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes an untrained model that can learn to call tools.

    Args:
        out: folder of the model, in the Hub's layout.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    shutil.copy(TEMPLATE, out / "chat_template.jinja")
    files = {
        "generation_config.json": {"eos_token_id": [tokenizer.token_to_id(token) for token in (END, TURN_END)]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END,
            "model_max_length": CONFIG.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    config = dataclasses.replace(CONFIG, source=out)
    zoo.save(zoo.init(config, key=jax.random.key(0)), out)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.environments.tiny")
