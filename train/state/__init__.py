"""Builds, places and saves the state of a run: model, optimizer, mesh, remat, checkpoints."""
