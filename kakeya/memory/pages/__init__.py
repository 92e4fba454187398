"""One pool of fixed-size pages in shared memory, for KV blocks and adapters. A pinned page is
never evicted, and free, pinned and evictable pages add up to all of them. Its files are one
idea: the pool, its owners, and the order of eviction.
"""
