"""KV of prompts, named by content: the same prefix is computed once, kept in pages and on disk,
and fetched from peers. A wrong or missing block costs time, never a token.
"""
