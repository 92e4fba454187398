"""gRPC from the listener's side: ports, connections, and the rules that decide which caller may
call which method.
"""
