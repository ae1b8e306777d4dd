"""Runs of training scripts, from their options to the exported model, and the libraries of the tools beside them."""
