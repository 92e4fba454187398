"""Which generation enters the engine next, and how much room there is for it."""
