"""The only importer of mlx and mlx_lm: devices, loading, the verifier, draft models."""
