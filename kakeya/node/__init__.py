"""Composition: the parts of one node and of one engine are built and wired here, in a fixed order.
Nothing here decides. Its files are one idea: the assembly of a process from its parts.
"""
