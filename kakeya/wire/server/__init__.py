"""gRPC from the listener's side: ports, connections, and the rules for which caller may call
which method.
"""
