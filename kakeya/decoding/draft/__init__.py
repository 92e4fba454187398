"""The contract of a draft: proposers, the accept rule, position-keyed sampling, and the decoder
that asks for drafts and commits tokens, without I/O.
"""
