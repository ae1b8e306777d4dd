"""The step of a decode: one token of the delta rule for each row of a batch, from and to a cache of states.

It has no entry of its own: `kernels.delta_rule` hands one token over `kernels.stacked.Slots` to it.
"""
