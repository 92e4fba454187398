"""What to compute before it is requested: declared prompts, next turns, and what was warm before a
restart. It yields to every request.
"""
