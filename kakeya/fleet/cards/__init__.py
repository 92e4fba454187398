"""A capability card: what a node says of itself, its order among the node's other cards, and its
bytes. A bad card is dropped alone.
"""
