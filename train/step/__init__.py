"""One training step: losses, gradients, the update; and what may go wrong in it."""
