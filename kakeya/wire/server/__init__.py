"""gRPC from the listener's side: ports, connections, whether the node is well enough to answer, and
the rules for which caller may call which method.
"""
