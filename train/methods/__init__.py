"""Generates what a run learns from while it runs: rollouts of GRPO, logits of a teacher."""
