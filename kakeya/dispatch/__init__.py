"""Who asks for the models of a node, in what order they are served, and which model a name
or a task gets."""
