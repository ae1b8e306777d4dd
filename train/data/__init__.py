"""From files to batches: records, packing, preferences, and for reinforcement learning rollouts and their rewards."""
