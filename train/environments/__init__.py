"""Environments for reinforcement learning that need no network: a calculator, Python, a search, and a game.

    python -m train.environments calculator questions.jsonl
    python -m train.grpo --environment calculator --data questions.jsonl ...

Each module of an environment has a class for `train.grpo --environment`, a function `record` that draws a record for
it, and functions that give chats for `train.sft`: `solved`, in which the record is solved, and `guessed`, in which it
is not. `tiny` makes a model that learns these in minutes.
"""
