"""The fleet as one node believes it to be: cards, identity, views, gossip, liveness, paths,
placement. Every node decides for itself; there is no coordinator.
"""
