"""One training step: losses, gradients, the update; and the detection of NaNs."""
