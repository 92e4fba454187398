"""Diagnosis of a node, its machine and the network to its peers: each finding names a fault and the
command that mends it.
"""
