"""One request and its KV: what is found, waited for, computed and kept. One prefix is computed
once, however many requests need it.
"""
