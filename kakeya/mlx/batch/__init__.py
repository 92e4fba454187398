"""Many sequences in one forward pass: batched caches, places in the batch, prefixes that rows
share. A row's values do not depend on its neighbours.
"""
