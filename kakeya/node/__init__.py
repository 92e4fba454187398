"""Composition: what is built, in which order, and what is wired to what. It decides nothing. Its
files are one idea: the assembly of one node and of one engine.
"""
