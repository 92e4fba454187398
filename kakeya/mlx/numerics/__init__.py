"""Numerics that decide bits and speed: the prefill grid, BLAS, attention, and checks that batching
is exact on this machine.
"""
