"""The parts that families are written in: the contract of a model (`model`), layers, caches, and the stack."""
