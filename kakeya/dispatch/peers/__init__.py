"""Requests that one node serves for another: the calls of both sides, and a peer's model as one of
this node's own."""
