"""Adapter files: the formats that are read, their checks against the base model, and the store of
packed adapters.
"""
