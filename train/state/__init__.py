"""The state of a run, and how it is built, placed and saved: model, optimizer, mesh, remat, checkpoints."""
