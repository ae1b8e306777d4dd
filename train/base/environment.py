"""Settings of a machine, which are no options of a run: environment variables."""

import os


def number(name: str, default: float) -> float:
    """Returns the environment variable `name` as a number, or `default` if it is not set.

    Raises:
        ValueError: the variable is no number, or below 0.
    """
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(f"The environment variable {name} must be a number from 0 on, not {text!r}.")
    return value
