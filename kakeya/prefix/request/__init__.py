"""One request and its KV: blocks that it finds, waits for, computes and keeps. One prefix is
computed once, however many requests need it.
"""
