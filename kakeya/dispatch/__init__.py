"""Who asks for the models of a node, and in what order they are served."""
