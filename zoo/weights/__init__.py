"""Reads and writes weights: a model's tensors in the Hub's layout, and adapters in PEFT's."""
