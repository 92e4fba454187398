"""A capability card: the offer of a node, its order among the node's other cards, and its
bytes. A bad card is dropped alone.
"""
