"""The bytes that a model and its KV cache will take, before anything loads."""
