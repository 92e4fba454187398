"""The edge of HTTP: which host, origin and key may come in, by TLS or plain; how bodies are read,
how an error leaves.
"""
