"""gRPC from the caller's side: channels, TLS, deadlines, and the form of errors on the wire. No
service is known here.
"""
