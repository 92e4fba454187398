"""A model over the ranks of an mlx.distributed group: rank 0 serves, the others follow its calls."""
