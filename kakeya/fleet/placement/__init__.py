"""The choice of nodes: which verify and draft, which keep a prefix, which form a ring group; pure
functions of a snapshot, with the numbers on which they were decided.
"""
