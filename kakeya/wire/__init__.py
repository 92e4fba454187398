"""gRPC from the caller's side: channels, TLS, deadlines, and what an error is on the wire. It
knows no service.
"""
