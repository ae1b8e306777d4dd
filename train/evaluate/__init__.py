"""Evaluation of a model during a run: validation data, questions of a file, tasks of lm-eval."""
