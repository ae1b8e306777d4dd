"""Planning of runs on devices that are not at hand: whether a model fits there, and what a training step costs."""
