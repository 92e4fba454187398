"""Blocks of other nodes: which peer to ask, the fetch, the checks and the leases. A peer that
lies, hangs or dies costs time only. Its files are one idea: both ends of one exchange of
blocks.
"""
