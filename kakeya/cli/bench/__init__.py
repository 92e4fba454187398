"""`kakeya bench`: how fast a model is at a node, as its clients feel it; kept, shown, compared."""
