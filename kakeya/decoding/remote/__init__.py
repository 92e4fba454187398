"""Drafts from another node, with deadlines and a circuit breaker: a slow or dead peer costs its
drafts and no time of the generation.
"""
