"""The only importer of mlx and mlx_lm: loading, the verifier, draft models, adapters."""
