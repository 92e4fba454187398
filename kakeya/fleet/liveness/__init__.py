"""Probes, direct and through other nodes, and two nodes with one id: a card expires only when its
node is really unreachable.
"""
