"""What the owner of a node asks it beside requests: its settings, and plans of ring groups."""
