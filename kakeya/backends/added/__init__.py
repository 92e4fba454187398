"""Models that are added to a node while it runs, and taken away again: ring groups, and models that
pulls brought.
"""
