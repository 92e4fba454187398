"""`kakeya connect`: configuration of programs that speak with a node, and the way back."""
