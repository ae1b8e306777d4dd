"""Runs a training script from its options to the exported model, and the libraries of the tools beside the scripts."""
