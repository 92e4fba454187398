"""What decides bits and speed: the grid of prefill, BLAS, attention, checks that batching is exact
on this machine.
"""
