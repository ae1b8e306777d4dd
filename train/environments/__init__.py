"""Environments for reinforcement learning that need no network: a calculator, Python, and a game of two turns.

    python -m train.environments calculator questions.jsonl
    python -m train.grpo --environment calculator --data questions.jsonl ...

Each module has a class for `train.grpo --environment`, a function `record` that draws a record for it, and a function
`solved` that gives a chat in which the record is solved, from which `train.sft` learns.
"""
