"""Training data that is generated during a run: rollouts of GRPO, logits of a teacher."""
