"""The only importer of mlx and mlx_lm: loading, the verifier, draft models, adapters. Its files are
one idea: a model in memory, and what it computes."""
