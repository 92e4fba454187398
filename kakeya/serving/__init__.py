"""The HTTP gateway, its dialects, and the backends that run models for it."""
