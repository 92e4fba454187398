"""The clients of a node, the order in which they are served, the model that a name or a task gets,
and the node that serves it."""
