"""The page of a node: its files, and the one stream of events that feeds it."""
