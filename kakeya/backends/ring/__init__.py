"""Ring groups as engines of a node: to the node, the group of a model is one child process."""
