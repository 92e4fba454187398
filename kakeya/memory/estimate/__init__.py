"""How many bytes a model and its KV cache will take, before anything loads."""
