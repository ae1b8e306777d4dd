"""The decode step: one token of the delta rule for each row of a batch, from and to a cache of states.

It has no entry of its own: `kernels.delta_rule` calls it for one token with a state in `kernels.stacked.Slots`.
"""
