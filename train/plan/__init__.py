"""Whether a model fits on devices that are not at hand, and what a step of its training costs there."""
