"""Which node of the fleet serves a request: a pure decision on what is known of the nodes, and the
ledger of the requests that the figures of the nodes do not count yet.
"""
