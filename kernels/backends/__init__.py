"""Helpers for implementations of all operations: devices, block sizes, XLA's options, Triton's and Mosaic's tools."""
