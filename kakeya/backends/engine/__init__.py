"""The agent's end of an engine process: start, stop, health, restart with backoff, and the client
of its socket.
"""
