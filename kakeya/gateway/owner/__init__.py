"""What the owner of a node asks it beside requests: its settings, its models, and plans of ring
groups."""
