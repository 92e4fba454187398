"""The edge of HTTP: which host and origin may come in, how bodies are read, how an error leaves."""
