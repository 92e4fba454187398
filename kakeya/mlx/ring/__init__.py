"""A model over the ranks of a ring group: rank 0 serves, the others repeat its calls."""
