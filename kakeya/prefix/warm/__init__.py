"""Prefixes that are computed before a request: declared prompts, next turns, and the prefixes that
were warm before a restart. The work yields to every request.
"""
