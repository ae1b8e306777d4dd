"""Shared by implementations of all operations: devices, sizes of blocks, XLA's options, Triton's and Mosaic's tools."""
