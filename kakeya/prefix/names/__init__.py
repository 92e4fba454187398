"""Names of KV blocks: a hash chain over token ids and everything else that their values depend on.
Equal names mean equal values.
"""
