"""Blocks on disk: files with checksums, an index, and a writer that never delays a request. A
damaged file is set aside and computed again.
"""
