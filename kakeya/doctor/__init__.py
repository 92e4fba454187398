"""Diagnosis of a node, its machine and the way to its peers: each finding says what is wrong and
what mends it.
"""
